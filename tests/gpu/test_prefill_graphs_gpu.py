"""Prefill steps that are captured between attentions give the answers of steps that are launched."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import inside
import pytest
from fp8_models import tensors_of
from needs import needs_kv_cache_dtype
from prefix_cases import branching_prompts
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from tools.benchmark.shapes import write_shape

pytestmark = pytest.mark.gpu

PROMPTS = branching_prompts(random.Random(1), 80, 700, 10_000)
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
FAMILIES = [
    "qwen3",
    "mistral-window",
    "gemma2",
    "gemma3",
    "gemma4-small",
    "gpt_oss",
    "qwen3_moe",
    "glm4",
    "granite",
]


def captured(llm: LLM) -> dict[int, Any]:
    """The sizes that were captured."""
    found: dict[int, Any] = getattr(inside.runner(llm).prefills, "captured", {})
    return {size: pieces for size, pieces in found.items() if pieces is not None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with the shape of Qwen3-0.6B."""
    folder = write_shape("qwen3-0.6b", tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    return folder


def rounds(model: Path, prompts: list[list[int]], **options: Any) -> tuple[list[Any], int]:
    """Tokens and logprobs of eight calls, before each of which nothing is cached, and the captured sizes."""
    defaults = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**28, "max_num_seqs": 64}
    with LLM(model, **defaults | options) as llm:
        found = []
        for _ in range(8):
            llm.reset_prefix_cache()
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            found.append([(each["token_ids"], str(each.outputs[0].logprobs)) for each in outputs])
        return found, len(captured(llm))


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("budget", [512, 16384])
def test_the_bits_are_those_of_launched_steps(model: Path, cache: str, budget: int) -> None:
    needs_kv_cache_dtype(cache)
    options = {"load_format": "dummy", "deterministic": True, "kv_cache_dtype": cache}
    options |= {"max_num_batched_tokens": budget}
    expected, none = rounds(model, PROMPTS, **options, enforce_eager=True)
    found, sizes = rounds(model, PROMPTS, **options)
    assert none == 0 < sizes
    assert all(each == expected[0] for each in [*expected, *found])


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    sizes: dict[str, Any] = {"head_dim": 16} if family.startswith("gemma") else {}  # as Triton has them
    folder = write_tiny_model(tmp_path, family, **sizes)
    prompts = [[token % 90 + 2 for token in prompt[:200]] for prompt in PROMPTS[:20]]
    options = {"dtype": "float32", "max_model_len": 256, "kvcache_block_size": 16}
    expected, _ = rounds(folder, prompts, **options, enforce_eager=True)
    found, count = rounds(folder, prompts, **options)
    assert count > 0
    tokens = [[row[0] for row in each] for each in [*expected, *found]]
    assert all(each == tokens[0] for each in tokens)


def test_scores_and_wide_steps(model: Path) -> None:
    """Hidden states of many tokens are wanted; a step with all extras ends as before."""
    options = {"load_format": "dummy", "deterministic": True, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    found = []
    for eager in (True, False):
        with LLM(model, enforce_eager=eager, kv_cache_memory_bytes=2**28, **options) as llm:
            for _ in range(6):
                llm.reset_prefix_cache()
                outputs = llm.generate(PROMPTS[:30], params, use_tqdm=False)
                found.append([str(each.prompt_logprobs) for each in outputs])
            assert eager or captured(llm)
    assert all(each == found[0] for each in found)


def test_sleep_and_new_weights(tmp_path: Path) -> None:
    first, second = (write_tiny_model(tmp_path / str(seed), seed=seed, dtype="bfloat16") for seed in (0, 1))
    prompts = [[random.Random(n).randrange(2, 97) for _ in range(50)] for n in range(20)]
    options = {"skip_tokenizer_init": True, "deterministic": True, "kv_cache_memory_bytes": 2**26}

    def answers(llm: LLM) -> list[Any]:
        for _ in range(6):
            llm.reset_prefix_cache()
            found = [out["token_ids"] for out in llm.generate(prompts, PARAMS, use_tqdm=False)]
        return found

    with LLM(second, **options) as llm:
        expected = answers(llm)
    with LLM(first, **options) as llm:
        before = answers(llm)
        assert captured(llm) and before != expected
        llm.sleep()
        llm.wake_up()
        assert not captured(llm) and answers(llm) == before and captured(llm)
        llm.update_weights(tensors_of(second))
        assert answers(llm) == expected
