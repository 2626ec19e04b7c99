"""Gemma 4 on a GPU: heads of 512 in the compiled kernels, and layers whose heads differ in one cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attention_cases
import layer_cases
import pytest
from attention_cases import Heads, variant_of
from checked_llm import make_tiny
from engine_cases import make_prompts
from freed_blocks import CELLS, spoil_free_blocks
from tensors import BF16, F16, F32, FP8
from tiny_models import transformers_greedy, write_tiny_model

from nanovllm import SamplingParams
from nanovllm.batch import PADDING

pytestmark = pytest.mark.gpu

GPU = "cuda"
SHAPES = [
    Heads(32, 4, 512, 256, BF16),  # Gemma 4 31B
    Heads(8, 1, 512, 256, F16),  # E2B
    Heads(4, 2, 440, 16, BF16),
    Heads(4, 2, 512, 32, F32),
    Heads(32, 4, 512, 256, BF16, FP8),
]
MIXED = [1, 127, 128, 129, 0, 700, 1025, 3000]
LENGTHS = [(1, 1), (63, 63), (129, 129), (1, 700), (200, 1713), (0, 9), (4, 0), (577, 2577)]


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_attention_of_wide_heads(heads: Heads, window: int | None) -> None:
    variant = variant_of(heads, GPU, window, None, False)
    attention_cases.check_decode(MIXED, heads, GPU, variant)
    for sequences in (1, 97):
        contexts = [(397 * row) % 2049 for row in range(1, sequences + 1)]
        attention_cases.check_decode(contexts, heads, GPU, variant)
    attention_cases.check_prefill(LENGTHS, heads, GPU, variant=variant)


@pytest.mark.parametrize("heads", [*SHAPES[:4], Heads(16, 8, 256, 256, BF16)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 97])
def test_norm_of_values(tokens: int, heads: Heads) -> None:
    layer_cases.check_norm_of_values(tokens, heads, GPU)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dims", [(24, 32), (256, 512)], ids=str)
@pytest.mark.parametrize("family", ["gemma4", "gemma4-small"])
def test_the_engine(
    tmp_path: Path, family: str, dims: tuple[int, int], cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free blocks are NaN before each step; with graphs, twice, and a window longer than a block. Texts are
    longer than the window and the rest of a tile of keys."""
    sizes = dict(zip(("head_dim", "global_head_dim"), dims, strict=True))
    folder = write_tiny_model(tmp_path, family, sliding_window=40, **sizes)
    prompts, params = make_prompts(), SamplingParams(temperature=0, max_tokens=190, ignore_eos=True)
    expected = [transformers_greedy(folder, prompt, 190) for prompt in prompts]
    common: dict[str, Any] = {"dtype": "float32", "device": GPU, "max_model_len": 256}
    options = {"attention_backend": "triton", "kvcache_block_size": 16, "async_scheduling": True}
    with make_tiny(folder, **{**CELLS[cell], **common, **options, "num_kvcache_blocks": 90}) as llm:
        spoil_free_blocks(llm, monkeypatch)
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [each["token_ids"] for each in outputs] == expected
        tables = [batch.tables[1] for batch in llm.batches]
        assert any((table[:, 0] == PADDING).any() for table in tables), "no block was freed"
