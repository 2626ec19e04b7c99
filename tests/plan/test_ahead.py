"""How many requests a stream has at once: on a CPU few at first."""

from __future__ import annotations

import pytest

from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.streams.ahead import Ahead


def outputs_of(count: int, read: int, drawn: int, finished: bool = True) -> list[RequestOutput]:
    completion = CompletionOutput(0, "a", [5] * drawn, finish_reason="stop")
    return [RequestOutput("0", "a", [1] * read, None, [completion], finished) for _ in range(count)]


@pytest.mark.parametrize(
    ("read", "drawn", "seconds", "limits"),
    [
        (100, 3, 10.0, [16, 16, 16]),  # short answers that take long: rows end as they can
        (100, 3, 1.0, [32, 64, 100]),  # quick ones
        (100, 50, 10.0, [32, 64, 100]),  # long answers: more rows share a pass through the weights
    ],
)
def test_the_limit_goes_up_while_that_pays(read: int, drawn: int, seconds: float, limits: list[int]) -> None:
    now = 0.0
    ahead = Ahead(50, 16, lambda: now)
    ahead.answered([])  # the first step
    seen = []
    for _ in limits:
        before = ahead.limit
        for _ in range(before - 1):
            ahead.answered(outputs_of(1, read, drawn))
            assert ahead.limit == before
        now += seconds
        ahead.answered(outputs_of(3, read, drawn, finished=False))  # parts of answers are none
        assert ahead.limit == before
        ahead.answered(outputs_of(1, read, drawn))
        seen.append(ahead.limit)
    assert seen == limits


def test_on_a_gpu_all_run_from_the_start() -> None:
    ahead = Ahead(1024, None)
    assert ahead.limit == 2048
    assert (Ahead(4, 16).limit, Ahead(49, 16).limit) == (8, 16)


def test_on_a_gpu_more_short_rows_are_ready() -> None:
    """Where answers are long, fewer: later rows follow in an order that earlier answers show."""
    ahead = Ahead(10, None)
    for drawn, before, limit in [(64, 20, 30), (65, 30, 20), (32, 20, 30), (64, 30, 30)]:
        ahead.answered(outputs_of(39, 10, drawn))
        ahead.answered(outputs_of(39, 10, drawn, finished=False))
        assert ahead.limit == before
        ahead.answered(outputs_of(1, 10, drawn))
        assert ahead.limit == limit


@pytest.mark.parametrize(
    ("slots", "first", "portions"),
    [
        (1024, None, {0: 256, 1279: 256, 1400: 136, 1536: 64, 1848: 25, 2047: 1, 2048: 0}),
        (4, 16, {0: 1, 7: 1, 8: 0}),
        (49, 16, {0: 4, 12: 4, 13: 0}),
    ],
)
def test_how_many_are_read(slots: int, first: int | None, portions: dict[int, int]) -> None:
    """An eighth of what is missing, so that a step is longer than reading; more if a quarter is missing."""
    ahead = Ahead(slots, first)
    assert {unfinished: ahead.portion(unfinished) for unfinished in portions} == portions
