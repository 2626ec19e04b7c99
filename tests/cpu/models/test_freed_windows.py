"""Engines whose layers have windows: blocks that left them are freed and spoilt, all answers are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import make_tiny
from engine_cases import make_prompts, tokens
from freed_blocks import CELLS, spoil_free_blocks
from tiny_models import MORE_FAMILIES, transformers_answers, transformers_greedy, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.batch import PADDING
from nanovllm.engine.stats import StepStats
from nanovllm.kernels.compat import INTERPRET
from nanovllm.runner.memory import CacheLayout
from nanovllm.windows.policy import Window
from tools.bench_host import without_device
from tools.benchmark.shapes import write_shape

WINDOWED = ("mistral-window", "gemma3", "gemma2", "olmo3", "phi3", "exaone4", "gemma4", "gemma4-small")
WINDOWED += ("gpt_oss", "qwen2-window", "qwen3-window")
MORE_BLOCKS = {"num_kvcache_blocks": 24}  # where 14 hold no sequence
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def reach_of(layout: CacheLayout) -> int | None:
    """The positions that its layers with a window may read; None: all keep the blocks of all tokens."""
    policy = layout.groups[-1].policy
    return policy.reach if isinstance(policy, Window) else None


def parts_of(layout: CacheLayout) -> int | None:
    return layout.groups[0].per_slab if len(layout.groups) > 1 else None


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    "family", [*WINDOWED[:2], *(pytest.param(x, marks=pytest.mark.full) for x in WINDOWED[2:])]
)
def test_freed_blocks_are_not_read(
    tmp_path: Path, family: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path, family)
    prompts = [prompt for prompt in make_prompts() if family != "phi3" or len(prompt) > 8]
    options = CELLS[cell] | (MORE_BLOCKS if "qwen" in family and cell == "tight" else {})
    with make_tiny(folder, kvcache_block_size=4, **options) as llm:
        assert reach_of(inside.runner(llm).layout) is not None
        spoil_free_blocks(llm, monkeypatch)
        found = [tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) for _ in range(2)]
        assert found == [transformers_answers(folder, prompts, 40, found[0])] * 2
        tables = [batch.tables[-1] for batch in llm.batches]
        assert any((table[:, 0] == PADDING).any() for table in tables), "no block was freed"


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu has such a test")
@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_triton_kernels_read_no_freed_block(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, with blocks as long as the longest tile, and shorter ones."""
    folder = write_tiny_model(tmp_path, family, **({"head_dim": 16} if family == "gemma3" else {}))
    prompts = [make_prompts()[4] * 6, [*make_prompts()[4] * 7, 5]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = [transformers_greedy(folder, prompt, 4) for prompt in prompts]
    for size in (128, 16):
        options = {"attention_backend": "triton", "kvcache_block_size": size, "max_num_batched_tokens": 70}
        with make_tiny(folder, num_kvcache_blocks=40, max_model_len=192, **options) as llm:
            spoil_free_blocks(llm, monkeypatch)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [each["token_ids"] for each in outputs] == expected
            tables = [batch.tables[-1] for batch in llm.batches]
            assert any((table[:, 0] == PADDING).any() for table in tables), "no block was freed"


@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
def test_samples_aborts_and_sleep(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompt = write_tiny_model(tmp_path, family), make_prompts()[4]
    params = SamplingParams(temperature=1, top_k=1, n=3, max_tokens=30, ignore_eos=True)
    with make_tiny(folder, kvcache_block_size=4, num_kvcache_blocks=40) as llm:
        spoil_free_blocks(llm, monkeypatch)
        for _ in range(2):
            aborted = llm.add_request(prompt, GREEDY)
            for _ in range(4):
                llm.step()
            llm.abort(aborted)
            [output] = llm.generate([prompt], params, use_tqdm=False)
            first = output.outputs[0].token_ids
            expected = transformers_greedy(folder, prompt, 30, first)
            assert [each.token_ids for each in output.outputs] == [expected] * 3
            assert llm.num_free_blocks == 40
            llm.sleep()
            llm.wake_up()


@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
def test_a_thousand_tokens_in_a_few_blocks(tmp_path: Path, family: str) -> None:
    """A window of 64: a sequence holds it, a chunk and two blocks, however long it is."""
    folder = write_tiny_model(tmp_path, family, sliding_window=64, max_position_embeddings=1100)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    blocks = 120 if family == "gemma3" else 12
    options = {"max_model_len": 1056, "kvcache_block_size": 16, "max_num_batched_tokens": 32}
    with make_tiny(folder, num_kvcache_blocks=blocks, **options) as llm:
        assert inside.scheduler(llm).room.max_model_len == 1056
        [output] = llm.generate([make_prompts()[4]], params, use_tqdm=False)
        assert len(output["token_ids"]) == 1000
        most = 0
        for batch in llm.batches:
            tables = batch.tables[-1]
            most = max(most, int((tables != PADDING).sum(1).max()))
        assert most <= (64 + 32) // 16 + 2


@pytest.mark.parametrize("family", [name for name in MORE_FAMILIES if name in WINDOWED])
def test_an_fp8_cache(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens with chunks, few blocks and hits of the prefix cache; most first ones are right.

    The length is one that all caches hold: the scales are of a prompt so long."""
    folder = write_tiny_model(tmp_path, family)
    prompts = [prompt for prompt in make_prompts() if family != "phi3" or len(prompt) > 8]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    exact = [transformers_greedy(folder, prompt, 12) for prompt in prompts]
    answers = []
    for cell in ("ample", "tight"):
        options = {"kvcache_block_size": 4, "kv_cache_dtype": "fp8", "max_model_len": 40}
        with make_tiny(folder, **options, **CELLS[cell]) as llm:
            assert inside.runner(llm).kv_cache.dtype == torch.float8_e4m3fn
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                answers.append([each["token_ids"] for each in outputs])
    assert answers == answers[:1] * 4
    first = [answer[0] == wanted[0] for answer, wanted in zip(answers[0], exact, strict=True)]
    assert sum(first) >= len(first) - 2, (answers[0], exact)


@pytest.mark.parametrize(
    ("windows", "layers", "parts", "reach"),
    [
        ([None] * 4, 4, None, None),
        ([64] * 4, 4, None, 64),
        ([64, 32], 2, None, 64),
        (([1024] * 5 + [None]) * 5 + [1024] * 4, 30, 6, 1024),  # Gemma 3 4B
        ([128, None] * 12, 12, 1, 128),  # gpt-oss-20b
        (([512] * 5 + [None]) * 4 + [512] * 2, 24, 6, 512),  # Gemma 3 1B
        (([4096] * 3 + [None]) * 8, 24, 3, 4096),  # OLMo 3
        ([64, None, None, None], 4, None, None),  # most of a block would be unused
    ],
)
def test_the_layout_of_the_cache(
    windows: list[int | None], layers: int, parts: int | None, reach: int | None
) -> None:
    specs = [AttentionSpec(4, 2, 16, window=window) for window in windows]
    layout = CacheLayout.of(specs, 256, 128)
    assert (layout.layers, parts_of(layout), reach_of(layout)) == (layers, parts, reach)
    assert layout.group_of == tuple(int(window is not None and parts is not None) for window in windows)
    far = CacheLayout.of(specs, 16, 128)
    assert reach_of(far) == (None if reach is None else reach + 127)


def test_layers_that_read_those_of_others_have_their_blocks() -> None:
    specs = [
        AttentionSpec(4, 2, 16, window=window, kv_from=source)
        for window, source in [(64, None), (64, None), (None, None), (64, 0), (None, 1)]
    ]
    layout = CacheLayout.of(specs, 256, 128)
    assert layout.group_of == (0,) * 5 and layout.layers == 3 and reach_of(layout) is None
    layout = CacheLayout.of([*specs[:4], AttentionSpec(4, 2, 16, kv_from=2)], 256, 128)
    assert layout.group_of == (1, 1, 0, 1, 0)
    assert (layout.layers, parts_of(layout)) == (2, 2)


@pytest.mark.parametrize(("shape", "tokens", "mib"), [("gemma3-4b", 18_000, 512), ("gpt-oss-20b", 2_000, 60)])
def test_the_memory_that_one_sequence_keeps(tmp_path: Path, shape: str, tokens: int, mib: int) -> None:
    """While it decodes, in bfloat16 and blocks of 256; the width of the model does not change it."""
    file = write_shape(shape, tmp_path) / "config.json"
    config = json.loads(file.read_text())
    config |= {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 99}
    file.write_text(json.dumps(config))
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
    options |= {"num_kvcache_blocks": 99, "kvcache_block_size": 256, "max_model_len": tokens + 99}
    with LLM(tmp_path, device="cpu", max_num_seqs=2, enforce_eager=True, **options) as llm:
        without_device(llm)
        size = inside.runner(llm).kv_cache.nbytes / 2**20
        steps: list[StepStats] = []
        llm.on_step = steps.append
        llm.generate([[5] * tokens], GREEDY, use_tqdm=False)
    assert 0.8 * mib < steps[-2].kv_cache_usage * size <= mib
