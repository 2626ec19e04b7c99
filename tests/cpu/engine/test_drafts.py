"""Drafts from the text change no answer: a matrix of parameters and options, with drafts that are right for a
while and then wrong, and with those of the text."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import draft_cases
import numpy as np
import pytest
from checked_llm import CheckedLLM, make_tiny
from tiny_models import VOCAB_SIZE, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.batch import LAST_SAMPLED
from nanovllm.outputs import RequestOutput

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 7},
}
RNG = random.Random(5)
PARTS = [[RNG.randrange(2, VOCAB_SIZE) for _ in range(9)] for _ in range(3)]
PROMPTS = [PARTS[0] * 2, PARTS[1] + PARTS[0], [5], PARTS[2], PARTS[2] + PARTS[1] * 2, PARTS[0][:4] * 5]


def params(**more: Any) -> list[SamplingParams]:
    """Of each prompt: greedy and sampled ones with filters, of several lengths."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.4, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.8, "min_p": 0.05, "seed": 3},
        {"temperature": 0},
        {"temperature": 1.3, "seed": 2**62},
    ]
    return [
        SamplingParams(**{"max_tokens": 21 + 3 * place, "ignore_eos": True, "seed": place} | kind | more)
        for place, kind in enumerate(kinds)
    ]


PARAMETERS: dict[str, list[SamplingParams]] = {
    "plain": params(),
    "penalties": params(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "logprobs": params(logprobs=3),
    "asked logprobs": params(logprob_token_ids=[4, 9]),
    "prompt logprobs": params(prompt_logprobs=2, logprobs=0),
    "least tokens": params(min_tokens=9, ignore_eos=False, stop_token_ids=[*range(2, 30)]),
    "stop tokens": params(ignore_eos=False, stop_token_ids=[*range(2, 12)]),
    "biases": params(logit_bias={7: 3.0, 11: -100.0}),
    "allowed tokens": params(allowed_token_ids=[*range(20, 60)], repetition_penalty=1.1),
    "logits processors": params(
        logits_processors=[lambda ids, logits: logits.index_fill(0, logits.argmax(), -9.0)]
    ),
    "several": params(n=3, temperature=0.7, top_k=0, top_p=1.0, min_p=0.0),
}
PARAMETERS["mixed"] = [kinds[place % 6] for place, kinds in enumerate(PARAMETERS.values())][:6]


class Oracle:
    """Drafts what the answers without drafts go on with; every fifth place of a text is guessed wrong."""

    most = 24

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = [array("i", text).tobytes() for text in texts]

    def draft(self, lines: Any) -> Any:
        from nanovllm.drafts.proposer import nothing

        found = nothing(len(lines.starts) - 1, self.most)
        for text, (start, end) in enumerate(pairwise(lines.starts.tolist())):
            known = lines.ids[start:end].tobytes()
            for each in self.texts:
                if each.startswith(known) and len(each) > len(known):
                    rest = np.frombuffer(each[len(known) :], np.int32)[: self.most].copy()
                    rest[(np.arange(len(rest)) + end - start) % 5 == 4] = 2
                    found.token_ids[text, : len(rest)], found.shares[text, : len(rest)] = rest, 1.0
                    break
        return found

    def ended(self, output: Any) -> None: ...


@pytest.fixture
def all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is computed, whatever it costs."""
    draft_cases.compute_all_drafts(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("windowed"), "gemma3")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[CheckedLLM]:
    with make_drafting(folder, None) as llm:
        yield llm


def make_drafting(folder: Path, method: dict[str, Any] | None, **options: Any) -> CheckedLLM:
    more = {"max_model_len": 128, "async_scheduling": False, "speculative_config": method, "dtype": "float32"}
    return make_tiny(folder, **more | options)


def answered(llm: LLM, asked: list[SamplingParams], prompts: Any = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompts, asked, use_tqdm=False)


def whole_texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [[*each.prompt_token_ids, *one.token_ids] for each in outputs for one in each.outputs]


def check_equal(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for own, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert own.token_ids == other.token_ids
            assert (own.text, own.finish_reason, own.stop_reason) == (
                *(other.text, other.finish_reason, other.stop_reason),
            )
            check_logprobs(own.logprobs, other.logprobs)
        check_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)


def check_logprobs(found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None)
    for own, other in zip(found or (), expected or (), strict=True):
        assert (own or {}).keys() == (other or {}).keys()
        for token_id, value in (own or {}).items():
            assert value.rank == other[token_id].rank
            assert value.logprob == pytest.approx(other[token_id].logprob, abs=2e-4)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(
    name: str, folder: Path, plain: CheckedLLM, all_drafts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answered(plain, PARAMETERS[name])
    draft_cases.set_proposer(monkeypatch, Oracle(whole_texts(expected)))
    with make_drafting(folder, METHODS["suffix"]) as llm:
        found = answered(llm, PARAMETERS[name])
        stats = llm.stats()
    check_equal(found, expected)
    if name == "logits processors":
        assert stats.num_draft_tokens == 0
    else:
        assert stats.num_accepted_tokens > stats.num_decoded_tokens // 3
        assert stats.draft_acceptance_rate < 1


OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7},
    "few sequences": {"max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "few blocks": {"num_kvcache_blocks": 16, "max_model_len": 64},
    "ahead": {"async_scheduling": True},
    "ahead in few blocks": {"async_scheduling": True, "num_kvcache_blocks": 16, "max_model_len": 64},
}


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(
    name: str, windows: bool, folder: Path, windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with all drafts, some and none, in turn."""
    model, asked, rng = windowed if windows else folder, PARAMETERS["mixed"], random.Random(7)
    with make_drafting(model, None, **OPTIONS[name]) as llm:
        expected = answered(llm, asked)
    draft_cases.set_proposer(monkeypatch, Oracle(whole_texts(expected)))
    draft_cases.compute_all_drafts(monkeypatch, lambda: rng.choice([0.0, 0.5, 1.0, 1.0]))
    with make_drafting(model, METHODS["ngram"], **OPTIONS[name]) as llm:
        check_equal(answered(llm, asked), expected)
        check_equal(answered(llm, asked), expected)  # again, from the prefix cache
        stats = llm.stats()
    assert stats.num_accepted_tokens > 30
    assert (stats.num_preemptions > 0) == ("few blocks" in name)


@pytest.mark.parametrize("name", ["penalties", "logprobs", "stop tokens", "logits processors"])
def test_steps_ahead_and_steps_that_wait(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most steps find no draft, so they are planned ahead."""
    shares = cycle([0.0] * 20 + [1.0] * 30)
    with make_drafting(folder, None) as llm:
        expected = answered(llm, PARAMETERS[name])
    draft_cases.set_proposer(monkeypatch, Oracle(whole_texts(expected)))
    draft_cases.compute_all_drafts(monkeypatch, lambda: next(shares))
    with make_drafting(folder, METHODS["suffix"], async_scheduling=True) as llm:
        check_equal(answered(llm, PARAMETERS[name]), expected)
        assert sum(batch.token_ids[0] == LAST_SAMPLED for batch in llm.batches) > 0
        assert (llm.stats().num_accepted_tokens > 0) == (name != "logits processors")


def test_an_engine_sleeps_and_drops_requests_between_drafts(folder: Path, all_drafts: None) -> None:
    with make_drafting(folder, METHODS["ngram"], async_scheduling=True) as llm:
        expected = answered(llm, PARAMETERS["plain"])
        for number in range(8):
            ids = [llm.add_request(*each) for each in zip(PROMPTS, PARAMETERS["plain"], strict=True)]
            for _ in range(number):
                llm.step()
            for request_id in ids:
                llm.abort(request_id)
            llm.sleep()
            llm.wake_up()
        check_equal(answered(llm, PARAMETERS["plain"]), expected)


def test_a_model_with_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM has layers with a state, which cannot forget"):
        make_drafting(write_tiny_model(tmp_path, "qwen3_next"), METHODS["ngram"])
