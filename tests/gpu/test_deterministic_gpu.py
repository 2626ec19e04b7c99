"""deterministic=True: a prompt's logits and tokens are the same bits for any batch and any schedule."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import CheckedLLM, logits_of
from needs import needs_kv_cache_dtype

from nanovllm import LLM, SamplingParams
from tools.benchmark.shapes import write_shape

pytestmark = pytest.mark.gpu

RNG = random.Random(0)
PROMPT = [RNG.randrange(10000) for _ in range(715)]
OTHERS = [[RNG.randrange(10000) for _ in range(RNG.randint(1, 400))] for _ in range(255)]
SEEDED = SamplingParams(temperature=0.6, seed=5, max_tokens=40, ignore_eos=True)
MANNERS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 96},
    "cold": {"enable_prefix_caching": False, "async_scheduling": False},
    "wide_blocks": {"kvcache_block_size": 256},
    "small cache": {"num_kvcache_blocks": 160},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with the shape of Qwen3-0.6B."""
    folder = write_shape("qwen3-0.6b", tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    return folder


def make(model: Path, **options: Any) -> LLM:
    defaults = {"max_num_seqs": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 8000}
    return CheckedLLM(
        model, deterministic=True, load_format="dummy", skip_tokenizer_init=True, **defaults | options
    )


def answer(llm: LLM, prompt: list[int], others: int) -> tuple[torch.Tensor, list[int]]:
    """The logits and tokens of `prompt` among this many other requests, which end at different times."""
    index = others // 2
    prompts = [*OTHERS[:index], prompt, *OTHERS[index:others]]
    params = [SamplingParams(max_tokens=1 + 7 * i % 50, ignore_eos=True) for i in range(len(prompts))]
    params[index] = SEEDED
    return logits_of(llm, prompts, params, index)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_a_prompts_logits_are_the_same_bits_in_any_batch(model: Path, cache: str) -> None:
    needs_kv_cache_dtype(cache)
    with make(model, kv_cache_dtype=cache) as llm:
        logits, tokens = answer(llm, PROMPT, 0)
        longer = PROMPT + tokens  # the cache must not offer K/V of decode steps
        longer_logits, longer_tokens = answer(llm, longer, 0)
    assert len(tokens) == SEEDED.max_tokens and logits.isfinite().all()
    for options in MANNERS.values():
        with make(model, kv_cache_dtype=cache, **options) as llm:
            for others in (0, 1, 16, 255, 0):
                assert inside.model(llm).lm_head.method.deterministic
                again, same_tokens = answer(llm, PROMPT, others)
                assert torch.equal(again, logits), (options, others)
                assert same_tokens == tokens
            assert llm.stats().num_preemptions == 0
            again, same_tokens = answer(llm, longer, 3)
            assert torch.equal(again, longer_logits) and same_tokens == longer_tokens, options


@pytest.mark.parametrize("shape", ["qwen3.5-0.8b", "qwen3.5-35b-a3b"])
def test_a_hybrid_gives_the_same_bits_in_any_batch(tmp_path: Path, shape: str) -> None:
    """Prompts are cut and begin at multiples of 64, and a step has one tile for any number of sequences."""
    folder = write_shape(shape, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    found = None
    for name in ("graphs", "eager", "chunks", "cold", "small cache"):
        options = MANNERS[name]
        with make(folder, **{"max_model_len": 1024, **options}) as llm:
            for others in (0, 1, 16, 100, 0):
                logits, tokens = answer(llm, PROMPT, others)
                if found is None:
                    found = logits, tokens
                assert logits.isfinite().all()
                assert torch.equal(logits, found[0]) and tokens == found[1], (options, others)
            assert llm.stats().num_preemptions == 0
