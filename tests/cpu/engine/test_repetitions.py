"""`repetition_detection`: an answer ends at the first token that completes a repeated pattern."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import draft_cases
import pytest
from jobs import read_rows, run, write_rows
from test_drafts import Oracle, whole_texts

import nanovllm
from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.extras.repetitions import Repetitions
from nanovllm.jobs.params import make_params
from nanovllm.sampling_params import RepetitionDetectionParams

PROMPTS = ["The sun", "Once upon a time", "1 2 3 4", "Add 3 and 4.", "a b a b"]
FOUND = RepetitionDetectionParams(max_pattern_size=12, min_count=3)


def repeats(ids: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether a pattern stands at the end, tried one by one."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        whole = ids[-size * params.min_count :]
        if len(whole) == size * params.min_count and whole == whole[:size] * params.min_count:
            return True
    return False


def first_end(ids: list[int], params: RepetitionDetectionParams, min_tokens: int = 0) -> int | None:
    """The tokens of the answer, if a pattern ends it."""
    ends = (end for end in range(1, len(ids) + 1) if repeats(ids[:end], params) and end >= min_tokens)
    return next(ends, None)


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_what_a_plain_one_finds(seed: int) -> None:
    rng = Random(seed)
    for _ in range(25):
        most = rng.randint(1, 6)
        params = RepetitionDetectionParams(most, rng.randint(0, most), rng.randint(2, 4))
        ids = [rng.randrange(rng.choice([2, 3])) for _ in range(60)]
        least = rng.choice([0, 0, 7])
        search = Repetitions(params, least, None, lambda index, ids: None)  # type: ignore[arg-type,return-value]
        found = [place for place, token_id in enumerate(ids, 1) if search.append(token_id)]
        assert (found[0] if found else None) == first_end(ids, params, least)
        assert found == list(range(found[0], 61)) if found else search.found is None


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(nanovllm.demo_model_path(), device="cpu", dtype="float32", num_kvcache_blocks=100) as made:
        yield made


def asked(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 80, "ignore_eos": True} | more)


def test_an_answer_ends_at_the_token_that_completes_a_pattern(llm: LLM) -> None:
    whole = llm.generate(PROMPTS, asked(), use_tqdm=False)
    found = llm.generate(PROMPTS, asked(repetition_detection=FOUND, logprobs=0), use_tqdm=False)
    ends = [first_end(list(each.outputs[0].token_ids), FOUND) for each in whole]
    assert None not in ends[:2], "greedy answers of the demo model repeat themselves"
    for output, plain, end in zip(found, whole, ends, strict=True):
        own, other = output.outputs[0], plain.outputs[0]
        assert own.token_ids == other.token_ids[:end]
        assert output.metrics is not None
        assert len(own.logprobs or ()) == len(own.token_ids)
        reasons = ("length", None) if end is None else ("repetition", "repetition_detected")
        assert (own.finish_reason, own.stop_reason) == reasons
        assert output.metrics.last_token_time is not None
        assert other.text.startswith(own.text) and own.text


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 30},
        {"detokenize": False},
        {"n": 3, "temperature": 0.7, "seed": 3},
        {"stop": ["E"], "repetition_penalty": 1.01},
        {"max_tokens": 9},
        {"ignore_eos": False, "temperature": 0.8, "seed": 4},
        {"structured_outputs": StructuredOutputsParams(regex="(ab ){20}")},
    ],
    ids=lambda more: next(iter(more)),
)
def test_other_parameters_and_drafts(llm: LLM, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is the beginning of one without the search; a stop string counts first."""
    params = asked(repetition_detection=FOUND, **more)
    whole = llm.generate(PROMPTS, asked(**more), use_tqdm=False)
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    reasons = set()
    for output, plain in zip(found, whole, strict=True):
        for own, other in zip(output.outputs, plain.outputs, strict=True):
            end = first_end(list(other.token_ids), FOUND, more.get("min_tokens", 0))
            is_cut = end is not None and (other.finish_reason == "length" or end < len(other.token_ids))
            assert own.token_ids == (other.token_ids[:end] if is_cut else other.token_ids)
            assert own.finish_reason == ("repetition" if is_cut else other.finish_reason)
            reasons.add(own.finish_reason)
    assert "repetition" in reasons or "max_tokens" in more
    deltas: dict[tuple[str | None, int], tuple[str, str | None]] = {}
    for part in llm.stream(PROMPTS, params, deltas=True):
        for each in part.outputs:
            key = part.prompt, each.index
            deltas[key] = deltas.get(key, ("", None))[0] + each.text, each.finish_reason
    assert deltas == {
        (output.prompt, each.index): (each.text, each.finish_reason)
        for output in found
        for each in output.outputs
    }
    if more.get("n"):
        return
    draft_cases.compute_all_drafts(monkeypatch)
    draft_cases.set_proposer(monkeypatch, Oracle(whole_texts(whole)))
    spec = {"method": "suffix", "num_speculative_tokens": 6}
    path = nanovllm.demo_model_path()
    with LLM(
        path, device="cpu", dtype="float32", num_kvcache_blocks=100, speculative_config=spec
    ) as drafting:
        again = drafting.generate(PROMPTS, params, use_tqdm=False)
        assert drafting.stats().num_accepted_tokens > 5 or "max_tokens" in more
    assert [each.outputs for each in again] == [each.outputs for each in found]


def test_a_known_answer_is_replayed_whole(llm: LLM) -> None:
    params = asked(repetition_detection=FOUND, trace_decode_token_ids=[5] * 20)
    own = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert list(own.token_ids) == [5] * 20 and own.finish_reason == "length"


def test_without_a_tokenizer() -> None:
    path = nanovllm.demo_model_path()
    with LLM(path, device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=100) as made:
        own = made.generate([[7, 8, 9]], asked(repetition_detection=FOUND), use_tqdm=False)[0].outputs[0]
        whole = made.generate([[7, 8, 9]], asked(), use_tqdm=False)[0].outputs[0]
    end = first_end(list(whole.token_ids), FOUND)
    assert end is not None and own.token_ids == whole.token_ids[:end] and own.finish_reason == "repetition"


def test_jobs_take_a_dictionary(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": each} for each in PROMPTS])
    pattern = {"max_pattern_size": 12, "min_count": 3}
    given = {"temperature": 0, "max_tokens": 80, "ignore_eos": True, "repetition_detection": pattern}
    out = tmp_path / "out.jsonl"
    code = run(rows, "-o", out, "--device", "cpu", "--sampling", json.dumps(given), make_llm=LLM)
    assert code == 0
    reasons = [row["finish_reason"] for row in read_rows(tmp_path / "out.jsonl")]
    assert len(reasons) == len(PROMPTS) and "repetition" in reasons


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 2000, "min_count": 2}, "1024"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 3, "min_count": True}, "min_count"),
        ({"max_size": 3}, "max_size"),
    ],
)
def test_what_is_refused(given: dict[str, Any], named: str) -> None:
    for make in (
        lambda: RepetitionDetectionParams(**given),
        lambda: make_params({"repetition_detection": given}),
    ):
        with pytest.raises((ValueError, TypeError), match=named):
            make()


@pytest.mark.parametrize("given", [3, "on", [FOUND], {"max_pattern_size": 12, "min_count": 3}])
def test_other_types_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="RepetitionDetectionParams"):
        asked(repetition_detection=given)


def test_what_finds_nothing_is_none() -> None:
    assert asked(repetition_detection=RepetitionDetectionParams()).repetition_detection is None
