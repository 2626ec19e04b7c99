"""Requests for one engine and for its replicas, and the comparison of their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import inside
import pytest

from nanovllm import LLM, RequestOutput, SamplingParams

OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "num_kvcache_blocks": 200}
PROMPTS = [f"Add {3 * number} and {7 * number}." for number in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
# For seconds: it still runs when a caller on a busy machine aborts it.
ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=12),
    SamplingParams(temperature=1.0, seed=5, top_p=0.9, max_tokens=12),
    SamplingParams(temperature=0.8, n=3, max_tokens=8),
    SamplingParams(temperature=0.8, stop=["1", "\n"], max_tokens=20, logprobs=3, prompt_logprobs=2),
] * 5
MIXED.pop()  # one for each prompt


def same(one: LLM, two: LLM, answer: Callable[[LLM], Any]) -> list[RequestOutput]:
    """Whether both engines gave the same answers. Cached tokens and the last bits of logprobs may differ."""
    inside.next_id(one, inside.next_id(two))  # seeds follow from request numbers
    expected, outputs = answer(one), answer(two)
    for own, other in zip(expected, outputs, strict=True):
        assert without_logprobs(own) == without_logprobs(other)
        assert logprobs(own) == pytest.approx(logprobs(other), abs=1e-4)
    return outputs


def without_logprobs(output: RequestOutput) -> RequestOutput:
    completions = [replace(each, logprobs=None, cumulative_logprob=None) for each in output.outputs]
    no_others: dict[str, Any] = {"num_cached_tokens": 0, "metrics": None, "prompt_logprobs": None}
    return replace(output, outputs=completions, **no_others)


def logprobs(output: RequestOutput) -> list[float]:
    """The logprobs of all tokens, in order."""
    lists = [output.prompt_logprobs, *(each.logprobs for each in output.outputs)]
    tokens = [token for each in lists for token in each or () if token is not None]
    return [next(iter(token.values())).logprob for token in tokens]


def pids(llm: LLM) -> list[int]:
    return [process.pid or 0 for process in inside.replicas(llm).processes]


def answer_all(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, MIXED, use_tqdm=False)
