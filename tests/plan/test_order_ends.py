"""Rows of different lengths end together: in steps counted by a simulation of slots, and in order."""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nanovllm.order.ends import SHARE, end_together
from nanovllm.order.waiting import Asked, Seen, Slots, Waiting

SLOTS = 32
ROWS = 40 * SLOTS


def steps_of(lengths: list[int], slots: int) -> int:
    """The steps of rows that start in this order, each as soon as a slot is free."""
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def chats(seed: int) -> np.ndarray:
    """Lengths as chats have them, of a job of which the longest row is a part: int64 [ROWS]."""
    rng = np.random.default_rng(seed)
    return np.clip(200 * np.exp(rng.standard_normal(ROWS)), 10, 4000).astype(np.int64)


def waiting_of(
    beginnings: list[array[int]], limits: np.ndarray, seen: Seen | None = None, tokens: float = inf
) -> Waiting:
    ones = np.ones(len(limits), np.int64)
    return Waiting(beginnings, Asked(ones, limits, ones), Slots(SLOTS, tokens), seen or Seen())


def answered(waiting: Waiting, lengths: list[int]) -> tuple[list[int], int]:
    """Run the rows in slots, with as many more handed out. Return the order in which they started, and the
    steps."""
    ahead: deque[int] = deque()
    running: list[tuple[int, int]] = []
    order, now = [], 0
    while len(waiting) or ahead or running:
        ahead += waiting.take(2 * SLOTS - len(ahead) - len(running))
        while ahead and len(running) < SLOTS:
            row = ahead.popleft()
            order.append(row)
            heapq.heappush(running, (now + lengths[row], row))
        now, row = heapq.heappop(running)
        waiting.answered(row, lengths[row])
    return order, now


def unlike(count: int) -> list[array[int]]:
    return [array("i", [row] * 40) for row in range(count)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [inf, 0], ids=["fit", "do_not_fit"])
def test_known_lengths_are_as_fast_as_longest_first(seed: int, tokens: float) -> None:
    """Within 2 %, also where the cache is too small for the longest ones at once; the given order is not."""
    lengths = chats(seed)
    best = steps_of(np.sort(lengths)[::-1].tolist(), SLOTS)
    order, steps = answered(waiting_of(unlike(ROWS), lengths, tokens=tokens), lengths.tolist())
    assert sorted(order) == list(range(ROWS))
    assert steps <= 1.02 * best
    assert steps_of(lengths.tolist(), SLOTS) > 1.05 * best


@pytest.mark.parametrize("seed", range(3))
def test_lengths_of_groups_are_learned(seed: int) -> None:
    """Rows with the same instruction have similar lengths: as fast as if those of each group were known."""
    rng = np.random.default_rng(seed)
    groups = np.sort(rng.integers(0, 4, ROWS))
    medians = np.array([60, 120, 240, 1500])[groups]
    lengths = np.clip(medians * np.exp(0.2 * rng.standard_normal(ROWS)), 10, 4000).astype(np.int64)
    beginnings = [array("i", [int(group)] * 64 + [row] * 32) for row, group in enumerate(groups)]
    limits = np.full(ROWS, 4000)
    order, steps = answered(waiting_of(beginnings, limits), lengths.tolist())
    known = steps_of(lengths[np.argsort(-medians, kind="stable")].tolist(), SLOTS)
    assert steps <= 1.02 * known
    assert steps_of(lengths.tolist(), SLOTS) > 1.03 * known
    assert sum(groups[a] != groups[b] for a, b in pairwise(order)) < 100  # instructions stay together


def test_nothing_known_changes_nothing() -> None:
    lengths = chats(0)
    order, _ = answered(waiting_of(unlike(ROWS), np.full(ROWS, 4000)), lengths.tolist())
    assert order == list(range(ROWS))


def test_small_documents_stay_together_and_large_ones_are_parted_seldom() -> None:
    """Also where each row has another limit."""
    rng = np.random.default_rng(0)
    limits = chats(1)
    for size, most in [(4, 1), (ROWS // 8, 4)]:
        documents = rng.permutation(ROWS) // size
        beginnings = [array("i", [int(each)] * 64 + [row] * 32) for row, each in enumerate(documents)]
        for tokens in (0, inf):
            order = documents[waiting_of(beginnings, limits, tokens=tokens).take(ROWS)]
            parts = 1 + int((order[1:] != order[:-1]).sum())
            assert parts <= most * len(set(documents.tolist()))


def test_what_was_learned_holds_in_the_next_window() -> None:
    seen = Seen()
    beginnings = [array("i", [row % 2] * 64 + [row] * 32) for row in range(8 * SLOTS)]
    limits = np.full(len(beginnings), 1000)
    first = waiting_of(beginnings, limits, seen)
    for row in first.take(len(beginnings)):
        first.answered(row, 10 if row % 2 == 0 else 900)
    order = waiting_of(beginnings, limits, seen).take(len(beginnings))
    assert [row % 2 for row in order] == [1] * (4 * SLOTS) + [0] * (4 * SLOTS)


def test_rows_are_taken_once() -> None:
    waiting = waiting_of(unlike(10), np.arange(1, 11))
    waiting.remove(9)
    assert not waiting.has(9) and waiting.has(8) and len(waiting) == 9
    assert waiting.take(4) == [8, 7, 6, 5] and not waiting.has(5)
    assert waiting.take(100) == [4, 3, 2, 1, 0] and len(waiting) == 0 and waiting.take(1) == []
    assert waiting_of([], np.zeros(0, np.int64)).take(3) == []


@settings(suppress_health_check=[HealthCheck.too_slow])
@example([(1, 0)] * 3 + [(5, 0)] * 4, 3)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1)), min_size=1, max_size=200), st.integers(1, 12)
)
def test_units_stay_together_and_end_in_time(rows: list[tuple[int, int]], slots: int) -> None:
    """With rows of one unit each an end is later than all work divided by the slots by at most a share and
    the shortest ones, or it is that of longest first: four rows of 5 in three slots take 10 in any order."""
    lengths = np.array([length for length, _ in rows], float)
    units = np.cumsum([new for _, new in rows])
    order = end_together(lengths, lengths, units, slots)
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert len({*zip(units[order][1:].tolist(), units[order][:-1].tolist(), strict=True)}) <= 2 * len(rows)
    moved = units[order]
    assert int((moved[1:] != moved[:-1]).sum()) == len(set(units.tolist())) - 1
    alone = end_together(lengths, lengths, np.arange(len(rows)), slots)
    whole, longest = float(lengths.sum()) / slots, float(lengths.max())
    shortest = float(np.sort(lengths)[min(slots, len(rows)) - 1])
    latest = max(whole + max(SHARE * whole, shortest), longest) + shortest
    ends = [steps_of(each.astype(int).tolist(), slots) for each in (lengths[alone], -np.sort(-lengths))]
    assert ends[0] <= max(latest, ends[1])
