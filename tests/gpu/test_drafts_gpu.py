"""Drafts on a GPU: with `deterministic=True` tokens and logprobs have the bits of an engine without them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import draft_cases
import pytest
from checked_llm import CheckedLLM

from nanovllm import SamplingParams
from tools.benchmark.shapes import write_shape

pytestmark = pytest.mark.gpu

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 7},
}
RNG = random.Random(3)
PARTS = [[RNG.randrange(2, 300) for _ in range(30)] for _ in range(5)]
PROMPTS = [RNG.choice(PARTS) + RNG.choice(PARTS) * RNG.randint(1, 3) + [2 + n] for n in range(97)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with the shape of Qwen3-0.6B, and 320 tokens, so that answers repeat tokens."""
    folder = write_shape("qwen3-0.6b", tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "vocab_size": 320}))
    return folder


def answers(model: Path, method: dict[str, Any] | None, **options: Any) -> tuple[list[Any], int]:
    """Tokens and logprobs of greedy, sampled, filtered and penalised rows, and the number of drafts."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.4, "top_k": 8},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.05},
    ]
    params = [
        SamplingParams(**kinds[n % 4], max_tokens=20 + n % 50, ignore_eos=True, logprobs=1, seed=n)
        for n in range(len(PROMPTS))
    ]
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**30}
    with CheckedLLM(model, speculative_config=method, **defaults | options) as llm:
        found = []
        for rows in (PROMPTS, PROMPTS[:3], PROMPTS[:1]):
            outputs = llm.generate(rows, params[: len(rows)], use_tqdm=False)
            found += [(each["token_ids"], str(each.outputs[0].logprobs)) for each in outputs]
        return found, llm.stats().num_draft_tokens


@pytest.mark.parametrize("method", [*METHODS])
@pytest.mark.parametrize("blocks", [{}, {"kvcache_block_size": 16, "kv_cache_memory_bytes": 2**24}])
def test_the_bits_are_those_without_drafts(
    model: Path, method: str, blocks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_cases.compute_all_drafts(monkeypatch)
    options = {"deterministic": True, **blocks}
    expected, plain = answers(model, None, **options)
    found, drafted = answers(model, METHODS[method], **options)
    assert found == expected
    assert drafted > 0 == plain


@pytest.mark.parametrize("method", [*METHODS])
def test_drafts_that_are_worth_their_rows_change_nothing(model: Path, method: str) -> None:
    expected, _ = answers(model, None, deterministic=True)
    found, _ = answers(model, METHODS[method], deterministic=True)
    assert found == expected
