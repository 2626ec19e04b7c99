"""`on_step`, which receives every finished step, and `stats()`, the totals since the engine's start."""

from __future__ import annotations

import time
from pathlib import Path

import inside
import pytest
from checked_llm import make_tiny, run

from nanovllm import SamplingParams
from nanovllm.batch import StepKind
from nanovllm.engine.stats import StepStats
from nanovllm.stats.summary import EngineStats

PREFILL, DECODE = StepKind.PREFILL, StepKind.DECODE


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_every_finished_step_is_reported(model: Path, run_ahead: bool) -> None:
    steps: list[StepStats] = []
    with make_tiny(model, async_scheduling=run_ahead) as llm:
        llm.on_step = steps.append
        llm.generate([[5] * 20, [5] * 20, [6] * 9], [params(2), params(4), params(3)], use_tqdm=False)
        assert [step.kind for step in steps] == [PREFILL, DECODE, DECODE, DECODE]
        assert [step.num_seqs for step in steps] == [3, 3, 2, 1]
        assert [step.num_new_tokens for step in steps] == [20 + 1 + 9, 3, 2, 1]
        assert [step.num_drawn_tokens for step in steps] == [3, 3, 2, 1]
        assert [step.num_cached_tokens for step in steps] == [19, 0, 0, 0]
        assert [step.num_finished for step in steps] == [0, 1, 1, 1]
        assert [step.num_running for step in steps] == [3, 2, 1, 0]
        steps.clear()
        llm.on_step = None
        llm.generate([[5]], params(2), use_tqdm=False)
        assert not steps


@pytest.mark.parametrize("run_ahead", [True, False])
def test_seconds_are_those_of_the_calls(model: Path, run_ahead: bool) -> None:
    steps: list[StepStats] = []
    with make_tiny(model, async_scheduling=run_ahead) as llm:
        llm.on_step = steps.append
        for _ in range(2):  # time between calls belongs to no step
            steps.clear()
            start = time.perf_counter()
            llm.add_request([7] * 30, params(4))
            run(llm)
            assert len(steps) == 4 and min(step.seconds for step in steps) > 0
            assert sum(step.seconds for step in steps) <= time.perf_counter() - start
            time.sleep(0.1)


@pytest.mark.parametrize("how", ["closed", "aborted"])
def test_idle_time_belongs_to_no_step_after_requests_that_ended_early(model: Path, how: str) -> None:
    """The last step of these was read, or still runs; the next call reports both."""
    steps: list[StepStats] = []
    with make_tiny(model) as llm:
        if how == "closed":
            stream = llm.stream([[5] * 4, [6] * 4], params(9), deltas=True)
            next(stream)
            stream.close()
        else:
            request = llm.add_request([5] * 4, params(9))
            assert not [out for _ in range(4) for out in llm.step()]
            llm.abort(request)
        time.sleep(0.1)
        llm.on_step, start = steps.append, time.perf_counter()
        llm.generate([7] * 3, params(3), use_tqdm=False)
        seconds, left = time.perf_counter() - start, steps[0].seconds
        assert [step.kind for step in steps] == [DECODE, DECODE, PREFILL, DECODE, DECODE]
        assert min(step.seconds for step in steps) > 0
        assert left < 0.1 and sum(step.seconds for step in steps) - left <= seconds


def test_waiting_requests_and_kv_cache_usage(model: Path) -> None:
    steps: list[StepStats] = []
    with make_tiny(model, async_scheduling=False, num_kvcache_blocks=16, max_num_seqs=2) as llm:
        llm.on_step = steps.append
        llm.enqueue([[5] * 20, [5] * 20, [6] * 9], [params(2), params(4), params(3)])  # keeps its order
        llm.wait_for_completion(use_tqdm=False)
    assert [step.kind for step in steps] == [PREFILL, DECODE, PREFILL, DECODE, DECODE]
    assert [step.num_waiting for step in steps] == [1, 1, 0, 0, 0]
    assert [step.num_running for step in steps] == [2, 1, 2, 2, 0]
    # The first two prompts have three blocks each and share two.
    assert [step.kv_cache_usage for step in steps] == [4 / 16, 3 / 16, 5 / 16, 5 / 16, 0]


def test_an_exception_in_the_callback_empties_the_engine(model: Path) -> None:
    def fail(stats: StepStats) -> None:
        raise InterruptedError

    with make_tiny(model) as llm:
        llm.on_step = fail
        with pytest.raises(InterruptedError):
            llm.generate([[5], [6]], params(2), use_tqdm=False)
        llm.on_step = None
        assert llm.is_finished()
        outputs = llm.generate([[5], [6]], params(2), use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == [2, 2]


# -- totals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [True, False])
def test_totals_are_those_of_the_steps(model: Path, run_ahead: bool) -> None:
    steps: list[StepStats] = []
    with make_tiny(model, async_scheduling=run_ahead, num_kvcache_blocks=16, max_num_seqs=2) as llm:
        fresh = llm.stats()
        assert (fresh.num_requests, fresh.num_prefill_steps, fresh.peak_kv_cache_usage) == (0, 0, 0)
        assert fresh.timeline() == [] and fresh.prefill_tokens_per_s == fresh.decode_tokens_per_s == 0
        llm.on_step = steps.append
        llm.generate([[5] * 20, [5] * 20, [6] * 9], [params(2), params(4), params(3)], use_tqdm=False)
        llm.abort(llm.add_request([5, 6], params(3)))
        llm.add_request([5, 6], params(3))
        found = llm.stats()
        assert (found.num_requests, found.num_finished_requests, found.num_unfinished_requests) == (5, 3, 1)
        assert (found.num_running, found.num_waiting, found.kv_cache_usage) == (0, 1, 0)
        assert (found.num_prompt_tokens, found.num_output_tokens) == (20 + 20 + 9 + 2 + 2, 2 + 4 + 3)
        assert (found.num_computed_tokens, found.num_cached_tokens) == (20 + 1 + 9, 19)
        assert found.prefix_cache_hit_rate == pytest.approx(19 / 49)
        prefill = [step for step in steps if step.kind is PREFILL]
        decode = [step for step in steps if step.kind is DECODE]
        assert (found.num_prefill_steps, found.num_decode_steps) == (len(prefill), len(decode))
        assert found.num_decoded_tokens == 6
        assert found.decode_batch_size == sum(step.num_seqs for step in decode) / len(decode)
        assert found.prefill_seconds == pytest.approx(sum(step.seconds for step in prefill))
        assert found.decode_seconds == pytest.approx(sum(step.seconds for step in decode))
        assert found.decode_tokens_per_s == pytest.approx(6 / found.decode_seconds)
        assert found.prefill_tokens_per_s == pytest.approx(30 / found.prefill_seconds)
        peak = 6 if run_ahead else 5  # ahead, the third starts before the first has freed its blocks
        assert max(step.kv_cache_usage for step in steps) <= found.peak_kv_cache_usage == peak / 16
        assert sum(point.num_steps for point in found.timeline()) == len(steps)
        text = repr(found)
        assert "5, 3 finished, 1 unfinished (0 sequences running, 1 waiting)" in text
        assert "53 of prompts, 9 of outputs" in text and "19 more (39%) from the prefix cache" in text


def test_preemptions_are_counted(model: Path) -> None:
    steps: list[StepStats] = []
    with make_tiny(model, num_kvcache_blocks=5) as llm:
        llm.on_step = steps.append
        llm.generate([[5] * 9, [6] * 9], params(20), use_tqdm=False)
        found = llm.stats()
        preempted = sum(seq.num_preemptions for seq in llm.sequences)
        assert found.num_preemptions == sum(step.num_preemptions for step in steps) == preempted > 0
        assert found.num_computed_tokens > 18 and found.peak_kv_cache_usage == 4 / 5
        assert sum(point.num_preemptions for point in found.timeline()) == preempted


def test_stats_from_any_thread(model: Path) -> None:
    asked: list[EngineStats] = []
    with make_tiny(model) as llm:
        llm.on_step = lambda step: asked.append(llm.stats())
        list(llm.stream([[5], [6]], params(3)))
        assert [stats.num_output_tokens for stats in asked] == [2, 4, 6]
    assert llm.stats().num_finished_requests == 2, "after close"


def test_sequences_of_many_requests_are_made_as_steps_need_them(model: Path) -> None:
    """They count as waiting, and abort finds all of them."""
    prompts = [[5, 6, 7 + i] for i in range(9)]
    with make_tiny(model, max_num_seqs=2, async_scheduling=True) as llm:
        expected = [output["token_ids"] for output in llm.generate(prompts, params(3), use_tqdm=False)]
        ids = [llm.add_request(prompt, params(3)) for prompt in prompts]
        assert llm.stats().num_unfinished_requests == llm.stats().num_waiting == 9
        outputs = llm.step()
        stats = llm.stats()
        assert (stats.num_unfinished_requests, stats.num_running, stats.num_waiting) == (9, 2, 7)
        assert not inside.scheduler(llm).waiting, "more sequences were made than a step admits"
        aborted = llm.abort(ids[-1])
        assert aborted is not None and aborted.outputs[0].finish_reason == "abort"
        assert aborted.prompt_token_ids == prompts[-1] and llm.abort(ids[-1]) is None
        assert llm.stats().num_unfinished_requests == 8
        while not llm.is_finished():
            outputs += llm.step()
        answers = {output.request_id: output["token_ids"] for output in outputs}
        assert answers == dict(zip(ids[:-1], expected, strict=False))
        llm.add_request(prompts[0], params(3))
        stream = llm.stream(prompts, params(3))
        with pytest.raises(RuntimeError, match=r"1 request\(s\) of add_request are unfinished"):
            next(stream)
