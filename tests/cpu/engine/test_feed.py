"""Long lists: tokenised as they are needed, checked before the first step, and answered as in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import inside
import pytest

from nanovllm import LLM, SamplingParams, StructuredOutputsParams, demo_model_path
from nanovllm.order import feed
from nanovllm.order.texts import Texts
from nanovllm.text.prompts import parse_prompts

SEQS = 4
TEXTS = [f"{row} + {row % 7} =" for row in range(120)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), device="cpu", max_num_seqs=SEQS, max_model_len=256) as made:
        yield made


@pytest.fixture
def lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list is a long one."""
    monkeypatch.setattr(feed, "ENCODED_BYTES", 0)


def tokenised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts have been tokenised, after each call."""
    processor, counts = inside.processor(llm), [0]
    make = processor.make_requests

    def counted(prompts: Any, *args: Any) -> Any:
        counts.append(counts[-1] + len(prompts))
        return make(prompts, *args)

    monkeypatch.setattr(processor, "make_requests", counted)
    return counts


def seeded(rows: int) -> list[SamplingParams]:
    """Different lengths, and a seed for each row."""
    return [SamplingParams(max_tokens=1 + row % 9, ignore_eos=True, seed=row) for row in range(rows)]


def held_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """As `tokenised`, and how many of these prompts are unfinished after each step."""
    counts, held, done = tokenised(llm, monkeypatch), list[int](), [0]

    def on_step(stats: Any) -> None:
        done[0] += stats.num_finished
        held.append(counts[-1] - done[0])

    monkeypatch.setattr(llm, "on_step", on_step)
    return counts, held


@pytest.mark.usefixtures("lazily")
def test_a_step_runs_before_most_is_tokenised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few more prompts than the engine holds are tokenised at any time; all of them once."""
    counts, held = held_prompts(llm, monkeypatch)
    outputs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
    assert counts[-1] == len(TEXTS) and max(held) <= 3 * SEQS + 1
    assert [output.index for output in outputs] == list(range(len(TEXTS)))
    assert [output.prompt for output in outputs] == TEXTS


def test_answers_are_those_of_a_short_list(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, seeds and ids, whether a list is tokenised at once or not."""
    params = seeded(len(TEXTS))
    whole = llm.generate(TEXTS, params, use_tqdm=False)
    monkeypatch.setattr(feed, "ENCODED_BYTES", 0)
    parts = llm.generate(TEXTS, params, use_tqdm=False)
    assert [each["token_ids"] for each in parts] == [each["token_ids"] for each in whole]
    first = int(whole[0].request_id)
    assert [int(each.request_id) - first for each in whole] == list(range(len(TEXTS)))
    assert [int(each.request_id) - first for each in parts] == list(range(len(TEXTS), 2 * len(TEXTS)))


BAD: list[tuple[Any, str]] = [
    ("", r"prompts\[110\] is empty"),
    ("\ud800", r"prompts\[110\] has a lone surrogate"),
    ("9" * 400, "the prompt has 4"),
    ([3, 10**6], r"prompts\[110\]: token id 1000000"),
    (5.5, r"prompts\[110\]"),
]


@pytest.mark.usefixtures("lazily")
@pytest.mark.parametrize(("bad", "message"), BAD, ids=["empty", "surrogate", "long", "ids", "number"])
def test_a_bad_prompt_is_found_before_the_first_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, bad: Any, message: str
) -> None:
    steps: list[Any] = []
    monkeypatch.setattr(llm, "on_step", steps.append)
    prompts = [*TEXTS[:110], bad, *TEXTS[110:]]
    with pytest.raises((TypeError, ValueError), match=message):
        llm.generate(prompts, PARAMS, use_tqdm=False)
    params = seeded(len(TEXTS))
    params[100].temperature = -1.0
    with pytest.raises(ValueError, match=r"sampling_params\[100\]"):
        llm.generate(TEXTS, params, use_tqdm=False)
    assert steps == []
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, on_error="return")
    assert [row for row, output in enumerate(outputs) if output.error is not None] == [110]
    assert [output.index for output in outputs] == list(range(len(prompts)))


@pytest.mark.usefixtures("lazily")
def test_what_only_tokenising_shows_is_an_error_late(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tokenizer that drops a text against expectation: the row has an error, or the call raises."""
    processor = inside.processor(llm)
    make = processor.make_requests

    def dropping(prompts: Any, *args: Any) -> list[Any]:
        made = zip(prompts, make(prompts, *args), strict=True)
        return [ValueError(f"{p.where} has no tokens") if p.text == TEXTS[90] else each for p, each in made]

    monkeypatch.setattr(processor, "make_requests", dropping)
    outputs = llm.generate(TEXTS, PARAMS, use_tqdm=False, on_error="return")
    assert [(row, output.index) for row, output in enumerate(outputs) if output.error] == [(90, 90)]
    assert "has no tokens" in str(outputs[90].error) and outputs[90].request_id
    with pytest.raises(ValueError, match=r"prompts\[90\] has no tokens"):
        llm.generate(TEXTS, PARAMS, use_tqdm=False)
    assert len(llm.generate(TEXTS[:8], PARAMS, use_tqdm=False)) == 8  # the engine is empty and usable


@pytest.mark.usefixtures("lazily")
def test_a_request_that_waits_can_be_aborted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first = int(llm.generate("1 + 1 =", PARAMS, use_tqdm=False)[0].request_id) + 1
    aborted: list[Any] = []
    thread = Thread(target=lambda: aborted.append(llm.abort(str(first + 119))))

    def on_step(stats: Any) -> None:
        if thread.ident is None:
            thread.start()
            thread.join(0.2)  # it waits for the end of this step

    monkeypatch.setattr(llm, "on_step", on_step)
    outputs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
    thread.join()
    assert len(outputs) == len(TEXTS) and outputs[119]["finish_reason"] == "abort"
    assert aborted[0].request_id == outputs[119].request_id == str(first + 119)
    assert {output["finish_reason"] for output in outputs[:119]} == {"length"}


def test_a_long_list_of_strings_makes_its_prompts_late() -> None:
    texts = [f"text {row}" for row in range(5000)]
    found = parse_prompts(texts)
    assert isinstance(found, Texts) and len(found) == 5000
    assert found[4999] == parse_prompts([*texts[-1:]])[0] and [*found] == parse_prompts(iter(texts))
    assert found[-1].where == "prompts[4999]" and [each.text for each in found[3:5]] == texts[3:5]
    for bad in ("", "\udfff", 5):
        assert isinstance(parse_prompts([*texts, bad]), list)
    assert isinstance(parse_prompts(texts[:100]), list)


IDS = [[3 + row % 5, 4, 5 + row] for row in range(120)]


def test_token_ids_are_made_requests_late(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few more than the engine holds at any time, with the answers, ids and prompts of a list that is made
    requests of at once."""
    params = seeded(len(IDS))
    whole = llm.generate(iter(IDS), params, use_tqdm=False)
    counts, held = held_prompts(llm, monkeypatch)
    parts = llm.generate(IDS, [params[0]] * len(IDS), use_tqdm=False)
    assert counts[-1] == len(IDS) and max(held) <= 3 * SEQS + 1
    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "bc"]), max_tokens=9)
    held.clear()
    texts = {each["text"] for each in llm.generate(IDS, [choice] * len(IDS), use_tqdm=False)}
    assert texts <= {"a", "bc"} and max(held) <= 3 * SEQS + 1
    parts = llm.generate(IDS, params, use_tqdm=False)
    assert [each["token_ids"] for each in parts] == [each["token_ids"] for each in whole]
    assert [each.prompt_token_ids for each in parts] == IDS
    first = int(whole[0].request_id)
    assert [int(each.request_id) - first for each in parts] == list(range(3 * len(IDS), 4 * len(IDS)))
    assert [output.index for output in parts] == list(range(len(IDS)))


LONGEST = 255  # leaves room for one token


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([3, 10**6], r"prompts\[110\]: token id 1000000 at position 1 is outside"),
        ([3, -1], r"prompts\[110\]: token id -1 at position 1 is outside"),
        ([3, 2**40], r"prompts\[110\]: token id 1099511627776 at position 1 is outside"),
        ([3] * (LONGEST + 1), r"prompts\[110\]: the prompt has 256 tokens, and at most 255"),
        ([3, True], r"prompts\[110\]: token id at position 1 must be an integer, not True"),
        ([], r"prompts\[110\] is empty"),
    ],
    ids=["high", "negative", "huge", "long", "bool", "empty"],
)
def test_bad_token_ids_are_found_before_the_first_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, bad: Any, message: str
) -> None:
    """The first of them is named, and with on_error="return" each row as if it were alone."""
    steps: list[Any] = []
    monkeypatch.setattr(llm, "on_step", steps.append)
    prompts = [*IDS[:110], bad, *IDS[110:], [3] * LONGEST, [10**7]]
    with pytest.raises((TypeError, ValueError), match=message):
        llm.generate(prompts, PARAMS, use_tqdm=False)
    assert steps == []
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, on_error="return")
    errors = [(row, output.error) for row, output in enumerate(outputs) if output.error is not None]
    assert [row for row, _ in errors] == [110, 122] and [each.index for each in outputs] == [*range(123)]
    singly = llm.generate(iter(prompts), PARAMS, use_tqdm=False, on_error="return")
    assert errors == [(row, output.error) for row, output in enumerate(singly) if output.error is not None]
    ids = [[int(each.request_id) - int(some[0].request_id) for each in some] for some in (outputs, singly)]
    assert ids[0] == ids[1] == [*range(123)]


def test_ids_count_on_after_ctrl_c_while_requests_are_made(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps."""
    processor = inside.processor(llm)
    make, calls = processor.make_requests, [0]

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return make(*args)

    [before] = llm.generate(IDS[0], PARAMS, use_tqdm=False)
    monkeypatch.setattr(processor, "make_requests", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(IDS, PARAMS, use_tqdm=False)
    [after] = llm.generate(IDS[0], PARAMS, use_tqdm=False)
    assert int(after.request_id) == int(before.request_id) + 1 + len(IDS)


def test_long_answers_start_first(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a list; a stream keeps the order of arrival."""
    params = [
        SamplingParams(temperature=0, max_tokens=20 if row % 10 == 9 else 2, ignore_eos=True)
        for row in range(60)
    ]
    steps: list[int] = []
    monkeypatch.setattr(llm, "on_step", lambda stats: steps.append(stats.num_seqs))
    llm.generate(TEXTS[:60], params, use_tqdm=False)
    listed = len(steps)
    assert len(list(llm.stream(TEXTS[:60], params))) == 60
    assert listed < len(steps) - listed
