"""Drafts change no answer of a model with a tokenizer: stop strings, structured outputs, bad words, streams,
aborted requests, several replicas and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import draft_cases
import pytest
from test_drafts import Oracle, check_equal, whole_texts

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams

SUFFIX = {"method": "suffix", "num_speculative_tokens": 6}
PROMPTS = [f"{left} + {right} =" for left, right in ((12, 3), (4, 4), (100, 7), (31, 8))]
FIELDS = {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["name", "n"], "additionalProperties": False}


def form(**form: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**form)


PARAMETERS: dict[str, dict[str, Any]] = {
    "stop strings": {"temperature": 0.9, "stop": ["1", "e"], "ignore_eos": True},
    "a kept stop string": {
        "temperature": 1.2,
        "stop": "2",
        "include_stop_str_in_output": True,
        "min_tokens": 3,
    },
    "bad words": {"temperature": 0.8, "bad_words": ["1", "12", "the"], "ignore_eos": True},
    "a schema": {"temperature": 0.8, "structured_outputs": form(json=SCHEMA), "logprobs": 1},
    "a regex": {
        "temperature": 1.1,
        "structured_outputs": form(regex="(ab|c)+d?"),
        "min_tokens": 6,
        "repetition_penalty": 1.1,
    },
    "a choice": {"temperature": 1, "structured_outputs": form(choice=["yes", "no, thanks"]), "logprobs": 0},
    "a grammar without an end": {
        "temperature": 1,
        "structured_outputs": form(regex="[0-9]{50}"),
        "bad_words": ["7"],
    },
}


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with make(None) as llm:
        yield llm


def make(method: dict[str, Any] | None, **options: Any) -> LLM:
    more = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 100, "speculative_config": method}
    return LLM(nanovllm.demo_model_path(), **more | options)


def asked(name: str) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=40, seed=seed, **PARAMETERS[name]) for seed in range(len(PROMPTS))]


@pytest.mark.parametrize("name", PARAMETERS)
def test_texts(name: str, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain.generate(PROMPTS, asked(name), use_tqdm=False)
    draft_cases.compute_all_drafts(monkeypatch)
    texts = whole_texts(expected)
    if name == "stop strings":  # what would follow is drafted too
        texts = [[*text, *range(5)] for text in texts]
    draft_cases.set_proposer(monkeypatch, Oracle(texts))
    with make(SUFFIX) as llm:
        check_equal(llm.generate(PROMPTS, asked(name), use_tqdm=False), expected)
        stats = llm.stats()
    assert stats.num_accepted_tokens > 5
    names = {metric.name for metric in llm.get_metrics()}
    assert "vllm:spec_decode_num_accepted_tokens" in names


@pytest.mark.parametrize("method", [SUFFIX, {"method": "ngram", "num_speculative_tokens": 3}])
def test_drafts_of_the_text(method: dict[str, Any], plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the methods find themselves: greedy answers of a small model repeat themselves."""
    draft_cases.compute_all_drafts(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, seed=0)
    expected = plain.generate(PROMPTS, params, use_tqdm=False)
    with make(method) as llm:
        check_equal(llm.generate(PROMPTS, params, use_tqdm=False), expected)
        first = llm.stats()
        check_equal(llm.generate(PROMPTS, params, use_tqdm=False), expected)
        second = llm.stats()
    assert first.num_accepted_tokens > 40
    assert first.num_decode_steps < 119
    again = second.num_decode_steps - first.num_decode_steps
    assert again <= first.num_decode_steps
    if method is SUFFIX:  # earlier answers are known
        assert again < 60


def test_streams_and_aborts(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_cases.compute_all_drafts(monkeypatch)
    params = SamplingParams(temperature=0.3, max_tokens=50, ignore_eos=True, seed=4)
    expected = {each.prompt: each for each in plain.generate(PROMPTS, params, use_tqdm=False)}
    draft_cases.set_proposer(monkeypatch, Oracle(whole_texts([*expected.values()])))
    with make(SUFFIX) as llm:
        parts: dict[int, list[str]] = {}
        for part in llm.stream(PROMPTS, params, deltas=True):
            parts.setdefault(part.index, []).append(part.outputs[0].text)
        for index, prompt in enumerate(PROMPTS):
            assert "".join(parts[index]) == expected[prompt].outputs[0].text
        ids = [llm.add_request(prompt, params) for prompt in PROMPTS]
        llm.step()
        llm.step()
        llm.abort(ids[1])
        found = []
        while not llm.is_finished():
            found += llm.step()
        assert [each.prompt for each in found] == [PROMPTS[0], *PROMPTS[2:]]
        check_equal(found, [expected[each.prompt] for each in found])


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def test_ranks_and_replicas(sizes: dict[str, int], plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, seed=0)
    expected = plain.generate(PROMPTS, params, use_tqdm=False)
    with make(SUFFIX, **sizes) as llm:
        check_equal(llm.generate(PROMPTS, params, use_tqdm=False), expected)
        assert llm.stats().num_draft_tokens > 0


def test_a_stop_string_before_the_end_of_the_same_step(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step accepts the token that completes a stop string, and the end-of-sequence token after it."""
    params = [SamplingParams(max_tokens=40, seed=seed, temperature=1.2) for seed in range(len(PROMPTS))]
    outputs = plain.generate(PROMPTS, params, use_tqdm=False)
    whole = [output.outputs[0] for output in outputs]
    rows = [row for row, each in enumerate(whole) if each.finish_reason == "stop" and len(each.text) > 3]
    assert rows
    for row in rows:
        params[row].stop, params[row].min_tokens = [whole[row].text[-1]], len(whole[row].token_ids) - 2
    expected = plain.generate(PROMPTS, params, use_tqdm=False)
    assert all(expected[row].outputs[0].stop_reason for row in rows)
    draft_cases.compute_all_drafts(monkeypatch)
    draft_cases.set_proposer(monkeypatch, Oracle(whole_texts(outputs)))
    with make(SUFFIX) as llm:
        check_equal(llm.generate(PROMPTS, params, use_tqdm=False), expected)
        assert llm.stats().num_accepted_tokens > 5
