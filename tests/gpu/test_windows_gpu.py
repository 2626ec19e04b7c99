"""Windows, softcaps and sinks in the compiled kernels of attention: the checks of the CPU tests, other heads,
and a CUDA graph.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import attention_cases
import pytest
import torch
from attention_cases import Heads, variant_of
from checked_llm import make_tiny
from engine_cases import make_prompts
from freed_blocks import CELLS, spoil_free_blocks
from tensors import BF16, F16, F32, FP8, assert_near
from tiny_models import MORE_FAMILIES, transformers_greedy, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.batch import PADDING
from nanovllm.flash_attn.backend import FlashAttnBackend
from nanovllm.kernels.attention_reference import (
    paged_decode_attention_reference,
    paged_prefill_attention_reference,
)
from nanovllm.kernels.decode_attention import paged_decode_attention_triton
from nanovllm.kernels.paged import Variant
from nanovllm.kernels.prefill_attention import LONG, SHORT, WIDE
from nanovllm.runner.memory import CacheLayout

pytestmark = pytest.mark.gpu

GPU = "cuda"
SHAPES = [
    Heads(8, 4, 256, 256, BF16),
    Heads(64, 8, 64, 256, BF16),
    Heads(16, 8, 128, 256, BF16),
    Heads(8, 1, 256, 16, F16),
    Heads(14, 2, 64, 16, F32),
    Heads(4, 2, 256, 16, F32),
    Heads(20, 1, 80, 48, BF16),  # more query heads per KV head than a tile holds
    Heads(8, 4, 256, 256, BF16, FP8),
    Heads(64, 8, 64, 32, F16, FP8),
    Heads(6, 3, 24, 784, BF16),
]
VARIANTS = [
    (1, None, False),
    (128, None, True),
    (700, 50.0, False),
    (1024, None, False),
    (9000, 30.0, True),
    (None, 5.0, False),
    (None, None, True),
]
MIXED = [1, 127, 128, 129, 0, 700, 701, 1023, 1024, 1025, 1151, 2048, 3000]


@pytest.mark.parametrize(("window", "softcap", "sinks"), VARIANTS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_decode(heads: Heads, window: int | None, softcap: float | None, sinks: bool) -> None:
    attention_cases.check_decode(MIXED, heads, GPU, variant_of(heads, GPU, window, softcap, sinks))


@pytest.mark.parametrize("sequences", [1, 3, 17, 97, 256])
def test_decode_batches(sequences: int) -> None:
    contexts = [(397 * row) % 2049 for row in range(1, sequences + 1)]
    for heads in SHAPES[:2]:
        attention_cases.check_decode(contexts, heads, GPU, variant_of(heads, GPU, 128, None, True))


@pytest.mark.parametrize(("window", "softcap", "sinks"), VARIANTS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_prefill(heads: Heads, window: int | None, softcap: float | None, sinks: bool) -> None:
    lengths = [(1, 1), (63, 63), (129, 129), (1, 700), (200, 1713), (0, 9), (4, 0), (577, 2577)]
    variant = variant_of(heads, GPU, window, softcap, sinks)
    attention_cases.check_prefill(lengths, heads, GPU, variant=variant)


@pytest.mark.parametrize("tiles", [LONG, WIDE, SHORT], ids=str)
def test_prefill_by_each_tile(tiles: attention_cases.Tiles) -> None:
    heads = Heads(6, 2, 128, 256, BF16)
    for window, softcap, sinks in VARIANTS:
        variant = variant_of(heads, GPU, window, softcap, sinks)
        lengths = [(1000, 1259), (0, 5), (31, 31), (1, 700), (3, 0), (1500, 1500)]
        attention_cases.check_prefill(lengths, heads, GPU, tiles, variant)


@pytest.mark.parametrize("chunks", [[1, 400], [255, 256, 257]], ids=str)
def test_prefill_bits_do_not_depend_on_chunks(chunks: list[int]) -> None:
    for heads in SHAPES[:4]:
        variant = variant_of(heads, GPU, 300, 20.0, True)
        attention_cases.check_chunked_prefill(1111, chunks, heads, GPU, variant)


def test_a_spoilt_key_spoils_only_the_queries_whose_window_has_it() -> None:
    for window in (3, 11, 40):
        variant = variant_of(Heads(2, 2, 64, 16), GPU, window, None)
        attention_cases.check_keys_that_are_not_finite(GPU, variant)


@pytest.mark.parametrize("tile", [16, 64])
def test_shared_prefixes_with_sinks_and_softcaps(tile: int) -> None:
    heads = Heads(16, 8, 128, 256, BF16)
    contexts = [5000, *[4097 + 31 * row for row in range(20)], 0, 1100, 2000, 600, 513, 512]
    shares = {**dict.fromkeys(range(1, 21), 0), 23: 22, 25: 24}
    variant = variant_of(heads, GPU, None, 30.0, True)
    attention_cases.check_shared_prefixes(contexts, shares, heads, GPU, tile, variant)


def test_a_cuda_graph_replays_windows() -> None:
    """Captured with an upper bound of contexts, replayed with others."""
    heads = Heads(8, 4, 256, 256, BF16)
    cache = attention_cases.make_cache([3000, 1500, 7, 2048], heads, GPU)
    q = attention_cases.fused_queries(4, heads, GPU)
    variant, contexts = Variant(1024, 50.0), cache.contexts.clone()
    inputs = q, cache.kv, cache.tables, contexts, 8192, 0.1
    paged_decode_attention_triton(*inputs, variant=variant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_decode_attention_triton(*inputs, variant=variant)
    for lengths in ([3000, 1500, 7, 2048], [1025, 1024, 0, 1]):
        contexts.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, paged_decode_attention_triton(*inputs, variant=variant))
        assert_near(out, paged_decode_attention_reference(*inputs, variant=variant))


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 17, "num_kvcache_blocks": 7}], ids=str)
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_families(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """The engine in float32, with graphs, twice; Phi-3 starts with the factors for long sequences."""
    heads = {} if "phi" in family else {"head_dim": 16}
    if family in ("olmo2", "olmo3", "granite", "granite4", "exaone4", "smollm3", "qwen2-window"):
        heads = {"hidden_size": 64}  # their head_dim is hidden_size over heads
    folder = write_tiny_model(tmp_path, family, **heads)
    prompts = [prompt for prompt in make_prompts() if family != "phi3" or len(prompt) > 8]
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    expected = [transformers_greedy(folder, prompt, 14) for prompt in prompts]
    common = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "num_kvcache_blocks": 64}
    with LLM(str(folder), attention_backend="triton", kvcache_block_size=16, **common | options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [each["token_ids"] for each in outputs] == expected


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "gemma2"])
def test_freed_blocks_are_not_read(
    tmp_path: Path, family: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free blocks are NaN before each step; with graphs, and windows longer and shorter than blocks."""
    heads = {"head_dim": 16} if "gemma" in family else {"hidden_size": 64}
    for window in (6, 40):
        folder = write_tiny_model(tmp_path / str(window), family, sliding_window=window, **heads)
        prompts = [prompt * 3 for prompt in make_prompts()]
        params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        expected = [transformers_greedy(folder, prompt, 300) for prompt in prompts]
        options = {
            "dtype": "float32",
            "attention_backend": "triton",
            "kvcache_block_size": 16,
            "device": "cuda",
        }
        common = {"max_model_len": 400, **CELLS[cell], "num_kvcache_blocks": 90, "async_scheduling": True}
        with make_tiny(folder, **options | common) as llm:
            spoil_free_blocks(llm, monkeypatch)
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [each["token_ids"] for each in outputs] == expected
            tables = [batch.tables[-1] for batch in llm.batches]
            assert any((table[:, 0] == PADDING).any() for table in tables), "no block was freed"


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (300, None), (None, 20.0)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_flash_attn_equals_the_twin(head_dim: int, window: int | None, softcap: float | None) -> None:
    """In decode and in prefill behind a context; skipped for what the installed package refuses."""
    pytest.importorskip("flash_attn")
    heads = Heads(4, 2, head_dim, 256, BF16)
    spec = AttentionSpec(4, 2, head_dim, scale=0.1, window=window, softcap=softcap)
    if reason := FlashAttnBackend.unsupported((spec,)):
        pytest.skip(reason)
    contexts, lengths = [700, 1, 41, 513], [5, 1, 30, 200]
    cache, variant = attention_cases.make_cache(contexts, heads, GPU), Variant(window, softcap)
    tables = cache.tables.clamp(min=0)
    q = attention_cases.fused_queries(4, heads, GPU)
    slots, longest = torch.zeros(1, dtype=torch.int32, device=GPU), max(contexts)
    meta = AttentionMetadata(slots, cache.contexts, tables, longest)
    wanted = paged_decode_attention_reference(q, cache.kv, tables, cache.contexts, longest, 0.1, variant)
    assert_near(FlashAttnBackend().forward(q, cache.kv, meta, spec), wanted)
    q = attention_cases.fused_queries(sum(lengths), heads, GPU)
    starts, ends = (
        torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=GPU) for each in (lengths, contexts)
    )
    meta = AttentionMetadata(slots, cache.contexts, tables, longest, starts, ends, max(lengths))
    places = tables, starts, cache.contexts, max(lengths)
    wanted = paged_prefill_attention_reference(q, cache.kv, *places, 0.1, variant)
    assert_near(FlashAttnBackend().forward(q, cache.kv, meta, spec), wanted)


@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
def test_long_answers_in_few_blocks(
    tmp_path: Path, family: str, cache: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of 256 and a window of 300, in bfloat16: as with a cache that frees nothing."""
    if backend == "flash_attn":
        pytest.importorskip("flash_attn")
        if cache == "fp8":
            pytest.skip("flash-attn 2 reads no FP8 cache")
        if reason := FlashAttnBackend.unsupported((AttentionSpec(4, 2, 64, window=300),)):
            pytest.skip(reason)
    size = {"head_dim": 64, "hidden_size": 256, "sliding_window": 300, "max_position_embeddings": 4096}
    folder = write_tiny_model(tmp_path, family, **size)
    prompts = [prompt * 30 for prompt in make_prompts()]
    params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
    options = {"kvcache_block_size": 256, "kv_cache_dtype": cache, "attention_backend": backend}
    common = {"dtype": "bfloat16", "device": "cuda", "max_model_len": 4096, "enable_prefix_caching": False}
    answers = []
    for keeps in (False, True):
        with monkeypatch.context() as patch:
            if keeps:
                patch.setattr(CacheLayout, "of", lambda specs, *_: CacheLayout.plain(specs))
            with make_tiny(folder, num_kvcache_blocks=90, **options | common) as llm:
                if not keeps:
                    spoil_free_blocks(llm, patch)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                answers.append([each["token_ids"] for each in outputs])
    assert answers[0] == answers[1]
