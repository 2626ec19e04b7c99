"""`RequestOutput.metrics`: the timestamps of a request, and their order."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from checked_llm import make_tiny, run

from nanovllm import RequestMetrics, RequestOutput, SamplingParams

SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def moments(output: RequestOutput) -> RequestMetrics:
    """The metrics of a request that ended by itself, after checking them."""
    found = output.metrics
    assert found is not None and found.time_in_queue is not None
    assert found.first_scheduled_time is not None and found.first_token_time is not None
    assert found.last_token_time == found.finished_time
    assert found.time_in_queue == pytest.approx(found.first_scheduled_time - found.arrival_time, abs=1e-5)
    return found


@pytest.mark.parametrize("run_ahead", [True, False])
def test_timestamps_are_in_order(model: Path, run_ahead: bool) -> None:
    with make_tiny(model, async_scheduling=run_ahead, max_num_seqs=1) as llm:
        before = time.time()
        outputs = llm.generate([[5] * 9, [6] * 9], [LONG, SHORT], use_tqdm=False)
        after = time.time()
        first, second = map(moments, outputs)
        for each in (first, second):
            times = [each.arrival_time, each.first_scheduled_time, each.first_token_time, each.finished_time]
            assert times == sorted(times) and len(set(times)) == 4
            assert before - 1 < times[0] and times[-1] < after + 1, "seconds since 1970"
        assert first.arrival_time == second.arrival_time
        assert second.first_scheduled_time >= first.first_token_time, "there is one slot"
        assert second.time_in_queue > first.time_in_queue


def test_several_completions_and_one_token(model: Path) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=1)
    with make_tiny(model, max_num_seqs=1, async_scheduling=False) as llm:
        found = moments(llm.generate([5] * 9, params, use_tqdm=False)[0])
        assert found.first_token_time < found.last_token_time, "of the second completion"
        params.n = 1
        found = moments(llm.generate([5] * 9, params, use_tqdm=False)[0])
        assert found.first_token_time == found.last_token_time


def test_a_preempted_request_keeps_its_first_timestamps(model: Path) -> None:
    with make_tiny(model, num_kvcache_blocks=5, async_scheduling=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        outputs = llm.generate([[5] * 9, [6] * 9], params, use_tqdm=False)
        assert any(seq.num_preemptions for seq in llm.sequences)
        assert moments(outputs[0]).first_scheduled_time == moments(outputs[1]).first_scheduled_time
        assert moments(outputs[0]).first_token_time == moments(outputs[1]).first_token_time


def test_missing_timestamps_are_none(model: Path) -> None:
    with make_tiny(model, async_scheduling=False) as llm:
        waiting = llm.abort(llm.add_request([5], LONG))
        found = waiting.metrics
        assert (found.first_scheduled_time, found.first_token_time, found.time_in_queue) == (None,) * 3
        assert found.last_token_time is None and found.finished_time >= found.arrival_time
        request_id = llm.add_request([5], LONG)
        llm.step()
        found = llm.abort(int(request_id)).metrics
        assert found.first_token_time is not None and found.last_token_time is None
        assert llm.abort("nothing") is None and run(llm) == []
        [refused] = llm.generate([[]], LONG, use_tqdm=False, on_error="return")
        assert refused.metrics is None and refused.request_id == "2"


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_token_that_an_abort_returns_has_its_time(model: Path, run_ahead: bool) -> None:
    """Also with a step ahead, before answers were made of the step that drew it."""
    with make_tiny(model, async_scheduling=run_ahead) as llm:
        request = llm.add_request([5] * 4, LONG)
        for _ in range(1 + run_ahead):
            llm.step()
        before = time.time()
        time.sleep(0.01)
        aborted = llm.abort(request)
        assert aborted is not None and aborted.metrics is not None
        assert len(aborted["token_ids"]) == 1
        assert aborted.metrics.first_token_time is not None
        assert aborted.metrics.first_token_time <= before + 0.005 < aborted.metrics.finished_time


def test_an_abort_after_the_end_keeps_its_time(model: Path) -> None:
    """The last step was read, and its answer would have been made by the next call."""
    with make_tiny(model, async_scheduling=True) as llm:
        request = llm.add_request([5] * 4, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        assert not [output for _ in range(3) for output in llm.step()]
        before = time.time()
        time.sleep(0.01)
        ended = llm.abort(request)
        assert ended is not None and ended.metrics is not None
        assert ended["finish_reason"] == "length" and len(ended["token_ids"]) == 2
        assert ended.metrics.last_token_time == ended.metrics.finished_time <= before + 0.005
