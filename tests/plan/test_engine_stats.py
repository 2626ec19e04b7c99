"""EngineStats: totals and the timeline, for any age of the engine."""

from __future__ import annotations

import random
from itertools import pairwise

import inside
import pytest

from nanovllm.batch import StepKind
from nanovllm.engine.executor import Load
from nanovllm.engine.stats import MANY, History, StepStats
from nanovllm.stats.summary import EngineStats, summary
from nanovllm.stats.timeline import INTERVAL_SECONDS, MAX_INTERVALS


def step(num_seqs: int = 2, decode: bool = True, seconds: float = 0.5) -> StepStats:
    kind, n = StepKind.DECODE if decode else StepKind.PREFILL, num_seqs
    return StepStats(kind, n, n, n, seconds, n, 3, 1, n, 7, 0.25, num_preemptions=2)


def recorded(steps: list[tuple[float, StepStats]]) -> EngineStats:
    """The stats after steps that end at the given seconds."""
    history = History()
    history.steps.add(steps)
    return summary(history, Load(0, 0, 0, 0.0, 0.0))


def test_a_point_holds_means_and_rates() -> None:
    found = recorded([(0.71, step(2)), (0.72, step(6)), (0.73, step(4, decode=False)), (9.05, step(1))])
    first, second = found.timeline()
    assert (first.time, second.time) == (pytest.approx(0.7), pytest.approx(9.0))
    assert (first.seconds, first.num_steps, first.step_ms) == (1.5, 3, 500)
    assert first.output_tokens_per_s == 12 / 1.5 and first.prefill_tokens_per_s == 4 / 1.5
    assert first.batch_size == first.num_running == 4 and first.num_waiting == 7
    assert (first.num_cached_tokens, first.num_preemptions, first.num_finished_requests) == (3, 6, 3)
    assert first.kv_cache_usage == 0.25 and (second.batch_size, second.num_steps) == (1, 1)
    assert (found.num_prefill_steps, found.num_decode_steps, found.num_output_tokens) == (1, 3, 13)
    assert found.decode_batch_size == 3 and found.num_decoded_tokens == 9


@pytest.mark.parametrize("gap", [0.01, 0.3, 50])
def test_a_long_life_has_a_bounded_timeline_and_exact_totals(gap: float) -> None:
    rng, time, steps = random.Random(3), 0.0, []
    for _ in range(5000):
        time += rng.expovariate(1 / gap)
        steps.append((time, step(rng.randrange(1, 9), rng.random() < 0.9, rng.random())))
    found = recorded(steps)
    points = found.timeline()
    assert MAX_INTERVALS // 4 < len(points) <= MAX_INTERVALS
    assert sum(point.num_steps for point in points) == len(steps)
    assert sum(point.seconds for point in points) == pytest.approx(sum(each.seconds for _, each in steps))
    assert found.num_output_tokens == sum(each.num_drawn_tokens for _, each in steps)
    starts = [point.time for point in points]
    length = min(b - a for a, b in pairwise(starts))
    assert length >= INTERVAL_SECONDS * 0.999 and starts == sorted(set(starts))
    for point, end in zip(points, [*starts[1:], float("inf")], strict=True):  # each step is in its interval
        within = [each for when, each in steps if point.time <= when + 1e-6 and when < end - 1e-6]
        assert abs(point.num_steps - len(within)) <= 1


def test_steps_count_alike_whenever_somebody_asks_and_few_wait() -> None:
    rng = random.Random(4)
    steps = [(index * 0.03, step(rng.randrange(1, 9))) for index in range(3 * MANY)]
    asked, unasked = History(), History()
    load = Load(0, 0, 0, 0.0, 0.0)
    for index, each in enumerate(steps):
        asked.steps.add([each])
        unasked.steps.add([each])
        assert inside.waiting(unasked.steps) < MANY
        if index % 7 == 0:
            assert summary(asked, load).num_decode_steps == index + 1 and inside.waiting(asked.steps) == 0
    assert summary(asked, load).points == summary(unasked, load).points
