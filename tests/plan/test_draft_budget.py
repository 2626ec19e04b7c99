"""How many drafts a step computes, by made-up seconds of steps: what they gain, and what they may lose."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from nanovllm.drafts.budget import Budget


def run(
    budget: Budget,
    gains: list[list[float]],
    plain: float,
    drafted: Callable[[int], float],
    steps: int = 400,
    look: float = 0.0,
    right: float = 1.0,
) -> tuple[list[int], float, int]:
    """The last choice, the seconds of all steps and their tokens, if a step without drafts takes `plain`, one
    of so many rows with drafts `drafted`, and a look beside a step without drafts `look`; `right` of the
    tokens that the gains promise are drawn."""
    chosen, seconds, tokens, seqs = [0] * len(gains), 0.0, 0, len(gains)
    width = max(map(len, gains))
    table = np.array([[*each, *[0.0] * (width - len(each))] for each in gains])
    for _ in range(steps):
        looked, counts = budget.may_look, np.zeros(seqs, int)
        if looked:
            counts = budget.choose(table)
            assert all(0 <= count <= len(each) for count, each in zip(counts, gains, strict=True))
            chosen = counts.tolist()
        if counts.any():
            drawn = seqs + round(right * sum(sum(each[:n]) for each, n in zip(gains, counts, strict=True)))
            rows = seqs + int(counts.sum())
            budget.drafted(seqs, rows, drawn, drafted(rows))
            seconds, tokens = seconds + drafted(rows), tokens + drawn
        else:
            budget.plain(seqs, plain + look * looked, looked)
            seconds, tokens = seconds + plain + look * looked, tokens + seqs
    return chosen, seconds, tokens


SURE, DOUBTFUL = [0.95, 0.9, 0.85, 0.8], [0.3, 0.1]


def chosen(budget: Budget, gains: list[list[float]], fixed: float) -> list[int]:
    """The last choice, if each step takes the time of `fixed` rows and of its own."""
    return run(budget, gains, (fixed + len(gains)) / 1000, lambda rows: (fixed + rows) / 1000)[0]


def test_the_budget_learns_what_a_step_costs() -> None:
    assert chosen(Budget(8, 56), [SURE, DOUBTFUL], fixed=1000) == [4, 2]  # rows cost nothing
    assert chosen(Budget(8, 56), [SURE, DOUBTFUL], fixed=1.5) == [2, 0]
    assert chosen(Budget(8, 56), [DOUBTFUL, DOUBTFUL], fixed=0) == [0, 0]  # each row costs a row
    assert chosen(Budget(8, 1), [SURE, DOUBTFUL], fixed=1000) == [1, 0]  # a step has no more drafts
    assert chosen(Budget(8, 56), [[0.01], []], fixed=1000) == [0, 0]  # never worth it


@pytest.mark.parametrize("seqs", [1, 30, 256])
def test_drafts_that_cost_more_than_they_gain_lose_little(seqs: int) -> None:
    """Steps that wait, looks, and drafts that are never right: beside steps without drafts at most 2 % and a
    few steps are lost. This holds whatever the drafts promise."""
    for promise in ([0.95] * 4, [0.3, 0.2], [0.0]):
        for wait, look, right in ((3.0, 0.0, 1.0), (1.0, 0.7, 0.0), (0.0, 0.3, 0.0), (9.0, 2.0, 0.0)):
            budget = Budget(seqs, 512)
            _, seconds, tokens = run(
                budget,
                [promise] * seqs,
                1.0,
                lambda rows: 1.0 + wait + rows / 1000,  # noqa: B023
                steps=2000,
                look=look,
                right=right,
            )
            without = tokens / seqs
            assert seconds - without < 0.02 * seconds + 14, (promise, wait, look, right)


def test_drafts_that_gain_are_computed() -> None:
    """Also where the first step of each size takes as long as twenty others."""
    sizes: set[int] = set()

    def drafted(rows: int) -> float:
        first = rows not in sizes
        sizes.add(rows)
        return 1.3 + 20.0 * first

    for look in (0.0, 0.2):
        sizes.clear()
        _, seconds, tokens = run(Budget(300, 300), [SURE] * 40, 1.0, drafted, 2000, look)
        assert tokens / 40 > 2.5 * (seconds - 20 * len(sizes)) and len(sizes) < 12


def test_the_budget_sees_that_steps_have_become_slower() -> None:
    """Longer texts: drafts pay again once a step without them takes as long."""
    budget = Budget(300, 300)
    assert run(budget, [SURE] * 8, 1.0, lambda rows: 9.0)[0] == [0] * 8
    assert run(budget, [SURE] * 8, 8.0, lambda rows: 9.0, steps=3000)[0] == [4] * 8
    assert run(budget, [SURE] * 8, 1.0, lambda rows: 9.0, steps=3000)[0] == [0] * 8


def test_rows_fill_steps_of_common_sizes() -> None:
    rng = random.Random(1)
    for _ in range(50):
        budget, seqs = Budget(300, 300), rng.randrange(20, 300)
        for _ in range(9):
            budget.plain(seqs, 1.0, False)
        gains = np.sort([[rng.random() for _ in range(4)] for _ in range(seqs)])[:, ::-1]
        rows = seqs + int(budget.choose(gains).sum())
        assert seqs < rows <= seqs + 300, "rows of drafts have slots of their own"
        assert rows % (8 if rows <= 64 else 16 if rows <= 128 else 64) == 0
