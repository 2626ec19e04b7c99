"""Answers that are made one step late, because the device has ended the step that ran meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from checked_llm import make_tiny, run

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.batch import StepKind
from nanovllm.engine.stats import StepStats
from nanovllm.runner.inputs import PendingOutput

MORE = {"device": "cpu", "async_scheduling": True}


def params(max_tokens: int, **values: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | values)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a device that is always faster than the host."""
    monkeypatch.setattr(PendingOutput, "waits_for_host", lambda self: True)


@pytest.mark.usefixtures("late")
def test_each_waits_for_one_step(model: Path) -> None:
    steps: list[StepStats] = []
    with make_tiny(model, **MORE) as llm:
        llm.on_step = steps.append
        prompts = [[5] * 20, [5] * 20, [6] * 9, [7] * 3]
        outputs = llm.generate(prompts, [params(n) for n in (2, 4, 3, 2)], use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == [2, 4, 3, 2]
        assert [step.kind for step in steps] == [StepKind.PREFILL] + [StepKind.DECODE] * 3
        # Two end in the second step, one in the third and in the fourth, after which nothing runs.
        assert [step.num_finished for step in steps] == [0, 0, 2, 2]
        times = [output.metrics.finished_time for output in outputs]
        assert times[0] == times[3] < times[2] < times[1]


@pytest.mark.usefixtures("late")
def test_many_are_made_over_several_steps(model: Path) -> None:
    """Sixteen in each, as long as a step runs; a device that has work waits for no more."""
    steps: list[StepStats] = []
    with make_tiny(model, max_num_seqs=64, num_kvcache_blocks=200, **MORE) as llm:
        llm.on_step = steps.append
        outputs = llm.generate([[5 + row] * 3 for row in range(41)], [params(2)] * 40 + [params(5)])
        assert [len(output["token_ids"]) for output in outputs] == [2] * 40 + [5]
        assert [step.num_finished for step in steps] == [0, 0, 16, 16, 9]
        assert len({output.metrics.finished_time for output in outputs}) == 2


@pytest.mark.parametrize("late_steps", [(), range(0, 999, 2), range(999)])
def test_answers_do_not_depend_on_it(
    late_steps: tuple[int, ...] | range, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1 + row % 7] * (1 + 5 * row % 23) for row in range(40)]
    several = [params(1 + row % 9, n=1 + row % 2, temperature=0.5 + row % 3, seed=row) for row in range(40)]
    with make_tiny(model, async_scheduling=False, max_num_seqs=6) as llm:
        expected = [[each.token_ids for each in out.outputs] for out in llm.generate(prompts, several)]
    calls = iter(range(10**6))
    monkeypatch.setattr(PendingOutput, "waits_for_host", lambda self: next(calls) % 1000 in late_steps)
    with make_tiny(model, max_num_seqs=6, **MORE) as llm:
        for _ in range(2):
            found = [[each.token_ids for each in out.outputs] for out in llm.generate(prompts, several)]
            assert found == expected
        whole = {out.index: [each.token_ids for each in out.outputs] for out in llm.stream(prompts, several)}
        assert [whole[row] for row in range(40)] == expected
        parts: dict[tuple[int, int], list[int]] = {}
        for out in llm.stream(prompts, several, deltas=True):
            for each in out.outputs:
                parts.setdefault((out.index, each.index), []).extend(each.token_ids)
        for row, ids in enumerate(expected):
            assert [parts[row, index] for index in range(len(ids))] == ids
        assert llm.is_finished()


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("deltas", [False, True])
def test_aborted_between_its_end_and_its_answer(model: Path, deltas: bool) -> None:
    with make_tiny(model, **MORE) as llm:
        expected = [out["token_ids"] for out in llm.generate([[5] * 4, [6] * 4], params(2), use_tqdm=False)]
        if deltas:
            stream = llm.stream([[5] * 4, [6] * 4], params(9), deltas=True)
            first = next(stream)
            aborted = llm.abort(first.request_id)
            assert aborted is not None and aborted["token_ids"][:2] == expected[first.index]
            seen = {out.index for out in stream if out.finished}
            assert 1 - first.index in seen
            return
        ids = [llm.add_request([5] * 4, params(2)), llm.add_request([6] * 4, params(5))]
        assert not [out for _ in range(3) for out in llm.step()]  # the third one reads the last token
        aborted = llm.abort(ids[0])
        assert aborted is not None
        assert (aborted["token_ids"], aborted["finish_reason"]) == (expected[0], "length")
        assert [out.request_id for out in run(llm)] == [ids[1]]


@pytest.mark.usefixtures("late")
def test_a_stop_string_is_found_when_its_token_is_read() -> None:
    """So an abort before the answer is made leaves what comes before the stop string."""
    values = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    with LLM(demo_model_path(), **MORE) as llm:
        [whole] = llm.generate("What is 17 + 25?", SamplingParams(**values), use_tqdm=False)
        stop = whole["text"][9:12]
        params = SamplingParams(**values, stop=stop)
        [expected] = llm.generate("What is 17 + 25?", params, use_tqdm=False)
        assert expected["finish_reason"] == "stop" and stop not in expected["text"]
        request = llm.add_request("What is 17 + 25?", params)
        for _ in range(len(expected["token_ids"]) + 1):  # the first one reads no token
            assert not llm.step()
        aborted = llm.abort(request)
        assert aborted is not None
        assert (aborted["text"], aborted["finish_reason"]) == (expected["text"], "stop")
        assert llm.is_finished()


@pytest.mark.usefixtures("late")
def test_after_a_call_that_ended_early(model: Path) -> None:
    """What was read before an exception is no part of the next call."""
    with make_tiny(model, **MORE) as llm:
        expected = [out["token_ids"] for out in llm.generate([[5] * 4, [6] * 4], params(3), use_tqdm=False)]
        steps: list[StepStats] = []

        def fail(step: StepStats) -> None:
            steps.append(step)
            if len(steps) == 2:
                raise KeyError("mine")

        llm.on_step = fail
        with pytest.raises(KeyError, match="mine"):
            llm.generate([[7] * 4] * 5, params(9), use_tqdm=False)
        llm.on_step = None
        assert llm.is_finished()
        again = llm.generate([[5] * 4, [6] * 4], params(3), use_tqdm=False)
        assert [out["token_ids"] for out in again] == expected
