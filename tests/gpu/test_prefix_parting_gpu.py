"""On a GPU the tree of all prompts is computed once, with blocks of any size; answers have the same bits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from checked_llm import CheckedLLM
from needs import needs_kv_cache_dtype
from prefix_cases import branching_prompts, must_compute

from nanovllm import SamplingParams
from tools.benchmark.shapes import write_shape

pytestmark = pytest.mark.gpu

PROMPTS = branching_prompts(random.Random(1), 80, 700, 10_000)
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with the shape of Qwen3-0.6B."""
    folder = write_shape("qwen3-0.6b", tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    return folder


def answers(model: Path, **options: Any) -> tuple[list[Any], int]:
    """Tokens and logprobs of all prompts, in one call, and the number of prompt tokens that were computed."""
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**30}
    with CheckedLLM(model, **defaults | options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found = [(each["token_ids"], str(each.outputs[0].logprobs)) for each in outputs]
        return found, llm.stats().num_computed_tokens


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_the_tree_is_computed_once_and_answers_have_the_same_bits(model: Path, cache: str) -> None:
    needs_kv_cache_dtype(cache)
    options = {"deterministic": True, "kv_cache_dtype": cache}
    expected, whole = answers(model, **options, enable_prefix_caching=False)
    assert whole == sum(map(len, PROMPTS))
    for block_size in (16, 48, 64, 256):
        for budget in (512, 16384):
            sizes = {"kvcache_block_size": block_size, "max_num_batched_tokens": budget}
            found, computed = answers(model, **options, **sizes)
            assert computed == must_compute(PROMPTS), sizes
            assert found == expected, sizes


@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_each_backend_computes_the_tree_once(model: Path, backend: str) -> None:
    if backend == "flash_attn":
        pytest.importorskip("flash_attn")
    _, computed = answers(model, attention_backend=backend)
    assert computed == must_compute(PROMPTS)
