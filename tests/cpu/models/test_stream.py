"""Invalid prompts, and `stream`: outputs come as they finish, prompts are read as needed."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import inside
import numpy as np
import pytest
from checked_llm import CheckedLLM, make_tiny, run
from invariants import check_scheduler
from threads import SECONDS, aborted_during, in_threads
from tiny_models import VOCAB_SIZE, write_tiny_model

from nanovllm import LLM, EngineClosedError, RequestOutput, SamplingParams, demo_model_path
from nanovllm.streams import reader

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
GOOD = [[5, 6, 7], [8] * 20, [9]]
BAD = {  # by a part of the error message
    "is empty; a prompt needs": [],
    "has 64 tokens, and at most 63": [5] * 64,
    "must be a string, a list of token ids": None,
    f"token id {VOCAB_SIZE} at position 1": [5, VOCAB_SIZE],
    "must be an integer, not 'x'": [5, "x"],
    "must have the key 'prompt'": {"text": "x"},
    "lone surrogate": "a\ud800",
    "is a string, and skip_tokenizer_init=True": "text",
}


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[CheckedLLM]:
    with make_tiny(model, max_num_seqs=4) as llm:
        yield llm
        assert_idle(llm)


def assert_idle(llm: CheckedLLM) -> None:
    """Check that no request is left, all blocks are free, and the engine answers."""
    assert llm.is_finished() and not inside.requests(llm)
    assert inside.block_manager(llm).pool.usage == 0
    check_scheduler(inside.scheduler(llm))
    [output] = llm.generate(GOOD[0], GREEDY, use_tqdm=False)
    assert len(output["token_ids"]) == 6


def mixed() -> list[Any]:
    """Valid and invalid prompts in turn."""
    good = iter(GOOD * 4)
    return [each for bad in BAD.values() for each in (next(good), bad)]


def check_mixed(llm: CheckedLLM, outputs: list[RequestOutput]) -> None:
    expected = [output["token_ids"] for output in llm.generate(GOOD, GREEDY, use_tqdm=False)]
    assert [output.index for output in outputs] == list(range(2 * len(BAD)))
    ids = [int(output.request_id) for output in outputs]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    for number, output in enumerate(outputs[::2]):
        assert output.error is None and output["token_ids"] == expected[number % 3]
    for (error, prompt), output in zip(BAD.items(), outputs[1::2], strict=True):
        assert error in (output.error or "") and f"prompts[{output.index}]" in (output.error or "")
        assert (output["finish_reason"], output["text"], output["token_ids"]) == ("error", "", [])
        assert output.prompt == ("text" if prompt == "text" else None)
        assert output.finished and output.outputs[0].finished()
        known = isinstance(prompt, list) and prompt != [5, "x"]
        assert output.prompt_token_ids == (prompt if known else [])


# -- on_error ------------------------------------------------------------------------------------------------


def test_bad_prompts_are_answered_at_their_places(llm: CheckedLLM) -> None:
    check_mixed(llm, llm.generate(mixed(), GREEDY, use_tqdm=False, on_error="return"))
    assert llm.generate([], GREEDY, use_tqdm=False, on_error="return") == []
    [output] = llm.generate("text", GREEDY, use_tqdm=False, on_error="return")
    assert output.error == "the prompt is a string, and skip_tokenizer_init=True; pass token ids"
    for error, prompt in BAD.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            llm.generate([*GOOD, prompt], GREEDY, use_tqdm=False)
        assert str(caught.value).startswith("prompts[3]") and error in str(caught.value)


def test_parameters_that_the_model_does_not_take_are_answered(llm: CheckedLLM) -> None:
    bad = SamplingParams(stop_token_ids=[VOCAB_SIZE])
    for call in (llm.generate, llm.stream):
        outputs = sorted(call(GOOD[:2], [GREEDY, bad], on_error="return"), key=lambda output: output.index)
        assert outputs[0].error is None and outputs[0]["finish_reason"] == "length"
        assert "prompts[1]: stop_token_ids: token id" in (outputs[1].error or "")
        with pytest.raises(ValueError, match=r"prompts\[1\]: stop_token_ids: token id"):
            list(call(GOOD[:2], [GREEDY, bad]))
        with pytest.raises(ValueError, match="on_error must be 'raise' or 'return', not 'ignore'"):
            call(GOOD, GREEDY, on_error="ignore")
        with pytest.raises(TypeError, match="prompts must be"):
            list(call(5, GREEDY, on_error="return"))


def test_bad_conversations_are_answered_at_their_places() -> None:
    user = {"role": "user", "content": "What is 2 + 3?"}
    image = {"role": "user", "content": [{"type": "image_url"}]}
    with LLM(demo_model_path(), device="cpu", max_model_len=64) as llm:
        [expected] = llm.chat([user], GREEDY, use_tqdm=False)
        bad = [[], [image], [{"role": "user", "content": "one " * 100}], ["Hi"]]
        outputs = llm.chat([[user], *bad, [user]], GREEDY, use_tqdm=False, on_error="return")
        assert [output.index for output in outputs] == list(range(6))
        assert outputs[0]["text"] == outputs[5]["text"] == expected["text"]
        errors = ["has no messages", "'image_url', which is not supported", "at most 63", "must be a dict"]
        for index, (error, output) in enumerate(zip(errors, outputs[1:5], strict=True), 1):
            assert error in (output.error or "") and f"conversation {index}" in (output.error or "")
            assert output["finish_reason"] == "error"
        wrong = llm.chat([[user], [user]], [GREEDY, "hot"], use_tqdm=False, on_error="return")  # type: ignore[list-item]
        assert wrong[0]["text"] == expected["text"]
        assert wrong[1].error == "sampling_params[1] must be SamplingParams, not 'hot' (str)"
        with pytest.raises(ValueError, match="conversation 1 has no messages"):
            llm.chat([[user], *bad], GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="on_error must be"):
            llm.chat([user], GREEDY, on_error="skip")


# -- stream --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [list, iter, lambda prompts: (each for each in prompts)])
def test_a_stream_answers_as_generate_does(llm: CheckedLLM, wrap: Any) -> None:
    outputs = list(llm.stream(wrap(mixed()), GREEDY, on_error="return"))
    check_mixed(llm, sorted(outputs, key=lambda output: output.index))
    for one in ([5, 6], iter([5, 6]), {"prompt_token_ids": [5, 6]}):
        [output] = llm.stream(one, GREEDY)
        assert output.prompt_token_ids == [5, 6] and output.index == 0
    assert list(llm.stream(wrap([]), GREEDY)) == []


def test_outputs_come_as_they_finish(llm: CheckedLLM) -> None:
    lens = [9, 2, 5, 1]
    params = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lens)
    outputs = list(llm.stream([[5]] * 4, params))
    assert [output.index for output in outputs] == [3, 1, 2, 0]
    assert [len(output["token_ids"]) for output in outputs] == [1, 2, 5, 9]


def test_on_a_cpu_the_first_answers_come_before_most_prompts_are_read(model: Path) -> None:
    """So a job that is killed loses little: prompts run first, and all 200 could run at once."""
    read = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal read
        for index in range(200):
            read += 1
            yield [5 + index % 50, 6]

    with make_tiny(model, max_num_seqs=200) as llm:
        stream = llm.stream(prompts(), SHORT)
        at = [read for _ in stream]
        assert read == len(at) == 200 and at[0] <= 20


@pytest.mark.parametrize("max_num_seqs", [1, 3, 32])
def test_how_far_ahead_prompts_are_read(model: Path, max_num_seqs: int) -> None:
    read = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal read
        for index in range(60):
            read += 1
            yield [] if index % 7 == 3 else [5 + index % 50, 6]

    with make_tiny(model, max_num_seqs=max_num_seqs) as llm:
        furthest = 0
        stream = llm.stream(prompts(), SHORT, on_error="return")
        assert read == 0
        for taken, _ in enumerate(stream, 1):
            furthest = max(furthest, read - taken)
        assert taken == read == 60 and min(max_num_seqs, 16) <= furthest <= 2 * max_num_seqs
        assert_idle(llm)


def test_a_slow_iterable_does_not_delay_ready_prompts(
    llm: CheckedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "READ_SECONDS", 0.0)
    read = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal read
        for read in range(1, 100):  # noqa: B007
            yield [5]

    with closing(llm.stream(prompts(), SamplingParams(max_tokens=1))) as stream:
        assert next(stream).index == 0 and read <= 3


def test_parameters_must_be_as_many(llm: CheckedLLM) -> None:
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts; pass one for all or one for each"):
        llm.stream(GOOD, [GREEDY] * 2)
    with pytest.raises(ValueError, match="sampling_params end after 2, but prompts do not"):
        list(llm.stream(iter(GOOD), iter([GREEDY] * 2)))
    with pytest.raises(ValueError, match="prompts end after 3, but sampling_params do not"):
        list(llm.stream(GOOD, iter([GREEDY] * 4)))
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams or an iterable"):
        llm.stream(GOOD, 5)
    with pytest.raises(TypeError, match=r"sampling_params\[2\] must be SamplingParams, not 5"):
        list(llm.stream(iter(GOOD), iter([GREEDY, GREEDY, 5])))
    for prompt in ([5, 6], [np.int64(5), np.int64(6)]):
        assert [output.prompt_token_ids for output in llm.stream(prompt, [GREEDY])] == [[5, 6]]
    assert_idle(llm)


def test_whatever_ends_a_stream_leaves_the_engine_usable(llm: CheckedLLM) -> None:
    def failing(count: int) -> Iterator[Any]:
        yield from [[5, 6]] * count
        raise InterruptedError

    for count in (0, 1, 30):
        with pytest.raises(InterruptedError):
            list(llm.stream(failing(count), GREEDY))
        assert_idle(llm)
    with pytest.raises(ValueError, match=r"prompts\[20\] is empty"):
        list(llm.stream([*[[5]] * 20, []], GREEDY))
    assert_idle(llm)

    def consume() -> None:
        for _ in llm.stream(iter([[5]] * 100), GREEDY):
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        consume()
    assert_idle(llm)
    stream = llm.stream([[5]] * 100, GREEDY)
    next(stream)
    stream.close()
    assert_idle(llm)
    assert list(stream) == []
    stream = llm.stream([[5]] * 100, GREEDY)
    next(stream)
    del stream
    gc.collect()
    assert_idle(llm)


def test_an_error_of_a_step_ends_the_stream(llm: CheckedLLM) -> None:
    def fail(stats: object) -> None:
        raise InterruptedError

    llm.on_step = fail
    with pytest.raises(InterruptedError):
        list(llm.stream(GOOD, GREEDY))
    llm.on_step = None
    assert_idle(llm)


def test_an_open_stream_has_the_engine_for_itself(llm: CheckedLLM) -> None:
    unused = llm.stream(GOOD, GREEDY)
    stream = llm.stream([[5]] * 30, [SHORT, GREEDY] * 15)
    assert next(stream).index == 0
    for call in (
        lambda: llm.generate(GOOD, GREEDY, use_tqdm=False),
        lambda: llm.add_request([5], GREEDY),
        llm.step,
        lambda: next(unused),
    ):
        with pytest.raises(
            RuntimeError, match=r"a stream of this engine is open; take all .* or close\(\) it"
        ):
            call()
    assert llm.reset_prefix_cache() is False
    assert sorted(output.index for output in stream) == list(range(30))[1:]
    llm.add_request([5], GREEDY)
    with pytest.raises(
        RuntimeError, match=r"1 request\(s\) of add_request are unfinished.*before stream\(\)"
    ):
        next(llm.stream(GOOD, GREEDY))
    run(llm)
    assert_idle(llm)


def test_another_threads_call_waits_for_the_end_of_a_stream(llm: CheckedLLM) -> None:
    expected = [output["token_ids"] for output in llm.generate(GOOD, GREEDY, use_tqdm=False)]
    stream = llm.stream([[5]] * 30, GREEDY)
    next(stream)
    answers: list[RequestOutput] = []
    calls = [
        threading.Thread(target=lambda: answers.extend(llm.generate(GOOD, GREEDY, use_tqdm=False))),
        threading.Thread(target=lambda: answers.extend(llm.stream(GOOD, GREEDY))),
    ]
    for call in calls:
        call.start()
    assert len(list(stream)) == 29 or answers, "the stream goes on while they wait"
    for call in calls:
        call.join(SECONDS)
    assert sorted(output["token_ids"] for output in answers) == sorted(expected * 2)
    kept = in_threads(1, lambda _: [each := llm.stream(GOOD, GREEDY), next(each)])[0][0]
    with pytest.raises(RuntimeError, match="a stream of this engine is open"):
        llm.generate(GOOD, GREEDY, use_tqdm=False)  # its thread has ended, so it would wait for ever
    kept.close()
    assert_idle(llm)


def test_leaving_the_loop_ends_a_stream_that_no_variable_keeps(llm: CheckedLLM) -> None:
    for _ in llm.stream([[5]] * 30, GREEDY):
        break
    assert llm.is_finished()
    kept = llm.stream([[5]] * 30, GREEDY)
    for _ in kept:
        break
    assert not llm.is_finished(), "the variable keeps it open"
    kept.close()
    assert llm.is_finished()
    with closing(llm.stream([[5]] * 30, GREEDY)) as kept:
        for _ in kept:
            break
    assert_idle(llm)


@pytest.mark.parametrize("count", [1, 3])
def test_another_thread_aborts_at_the_next_step_of_generate(llm: CheckedLLM, count: int) -> None:
    """The report of the first step does not end before another thread asks for the abort: by then two steps
    are read, and the next one is without it."""
    first = inside.next_id(llm)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs, aborted = aborted_during(llm, first, lambda: llm.generate([[5]] * count, long, use_tqdm=False))
    assert [output.index for output in outputs] == list(range(count))
    assert aborted == outputs[0] and outputs[0]["finish_reason"] == "abort"
    assert len(outputs[0]["token_ids"]) == 2, "it ends before the next step"
    assert [len(output["token_ids"]) for output in outputs[1:]] == [40] * (count - 1)
    assert llm.abort(first) is None
    assert_idle(llm)


def test_closing_the_engine_ends_a_stream(model: Path) -> None:
    llm = make_tiny(model)
    stream = llm.stream([[5]] * 30, [SHORT, GREEDY] * 15)
    next(stream)
    llm.close()
    with pytest.raises(EngineClosedError):
        list(stream)
    stream = make_tiny(model).stream([[5]], GREEDY)  # which holds a reference to its engine
    assert len(list(stream)) == 1


def test_texts() -> None:
    texts = [f"What is {i} + {i}?" for i in range(24)]
    with LLM(demo_model_path(), device="cpu", max_num_seqs=16) as llm:
        expected = llm.generate(texts, GREEDY, use_tqdm=False)
        outputs = sorted(llm.stream((text for text in texts), GREEDY), key=lambda output: output.index)
        assert [output["text"] for output in outputs] == [output["text"] for output in expected]
        assert [output.prompt for output in outputs] == texts


def test_many_requests_with_bad_rows_and_aborts(tmp_path: Path) -> None:
    """One output for each index, also for aborted requests; at the end all blocks are free."""
    count, rng = 3000, random.Random(7)
    kinds: list[str] = []

    def prompts() -> Iterator[list[int]]:
        for _ in range(count):
            kinds.append(rng.choices(["good", "empty", "long", "unknown"], [17, 1, 1, 1])[0])
            good = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
            yield {"good": good, "empty": [], "long": good * 64, "unknown": [*good, -1]}[kinds[-1]]

    def params() -> Iterator[SamplingParams]:
        for _ in range(count):
            yield SamplingParams(
                temperature=rng.choice([0, 1]),
                top_k=rng.choice([0, 5]),
                max_tokens=rng.randrange(1, 6),
                ignore_eos=rng.random() < 0.5,
            )

    reasons: dict[int, str] = {}
    model = write_tiny_model(tmp_path, num_hidden_layers=1)
    with LLM(model, device="cpu", skip_tokenizer_init=True, max_model_len=64, kvcache_block_size=8) as llm:
        for output in llm.stream(prompts(), params(), on_error="return"):
            assert output.index not in reasons
            reasons[output.index] = output["finish_reason"]
            assert (output["finish_reason"] == "error") == (kinds[output.index] != "good")
            if rng.random() < 0.05:
                first = int(output.request_id) - output.index
                llm.abort(first + rng.randrange(len(kinds)))
        assert sorted(reasons) == list(range(count))
        assert set(reasons.values()) == {"stop", "length", "error", "abort"}
        assert llm.is_finished() and inside.block_manager(llm).pool.usage == 0
        check_scheduler(inside.scheduler(llm))
