"""The `stats` callback: what it is told of every finished step, and what an exception in it does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from checked_llm import BLOCK, make_tiny
from tiny_models import write_tiny_model

from nanovllm import SamplingParams
from nanovllm.batch import StepKind
from nanovllm.engine.stats import StepStats

PREFILL, DECODE = StepKind.PREFILL, StepKind.DECODE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_every_finished_step_is_reported(model: Path, run_ahead: bool) -> None:
    steps: list[StepStats] = []
    with make_tiny(model, async_scheduling=run_ahead) as llm:
        llm.stats = steps.append
        llm.generate([[5] * 20, [5] * 20, [6] * 9], [params(2), params(4), params(3)], use_tqdm=False)
        assert [step.kind for step in steps] == [PREFILL, DECODE, DECODE, DECODE]
        assert [step.num_seqs for step in steps] == [3, 3, 2, 1]
        assert [step.num_new_tokens for step in steps] == [20 + 20 - 2 * BLOCK + 9, 3, 2, 1]
        assert [step.num_drawn_tokens for step in steps] == [3, 3, 2, 1]
        assert [step.num_cached_tokens for step in steps] == [2 * BLOCK, 0, 0, 0]
        assert [step.num_finished for step in steps] == [0, 1, 1, 1]
        assert [step.num_running for step in steps] == [3, 2, 1, 0]
        steps.clear()
        llm.stats = None
        llm.generate([[5]], params(2), use_tqdm=False)
        assert not steps


@pytest.mark.parametrize("run_ahead", [True, False])
def test_seconds_are_those_of_the_calls(model: Path, run_ahead: bool) -> None:
    steps: list[StepStats] = []
    with make_tiny(model, async_scheduling=run_ahead) as llm:
        llm.stats = steps.append
        for _ in range(2):  # the time between the two belongs to no step
            steps.clear()
            start = time.perf_counter()
            llm.add_request([7] * 30, params(4))
            while not llm.is_finished():
                llm.step()
            assert len(steps) == 4 and min(step.seconds for step in steps) > 0
            assert sum(step.seconds for step in steps) <= time.perf_counter() - start
            time.sleep(0.1)


def test_what_waits_and_what_is_held(model: Path) -> None:
    steps: list[StepStats] = []
    with make_tiny(model, async_scheduling=False, num_kvcache_blocks=16, max_num_seqs=2) as llm:
        llm.stats = steps.append
        llm.generate([[5] * 20, [5] * 20, [6] * 9], [params(2), params(4), params(3)], use_tqdm=False)
    assert [step.kind for step in steps] == [PREFILL, DECODE, PREFILL, DECODE, DECODE]
    assert [step.num_waiting for step in steps] == [1, 1, 0, 0, 0]
    assert [step.num_running for step in steps] == [2, 1, 2, 2, 0]
    # Of the three blocks of the first two prompts, two are shared.
    assert [step.kv_cache_usage for step in steps] == [4 / 16, 3 / 16, 5 / 16, 5 / 16, 0]


def test_an_exception_in_the_callback_empties_the_engine(model: Path) -> None:
    def fail(stats: StepStats) -> None:
        raise InterruptedError

    with make_tiny(model) as llm:
        llm.stats = fail
        with pytest.raises(InterruptedError):
            llm.generate([[5], [6]], params(2), use_tqdm=False)
        llm.stats = None
        assert llm.is_finished()
        assert [len(out["token_ids"]) for out in llm.generate([[5], [6]], params(2), use_tqdm=False)] == [
            2,
            2,
        ]
