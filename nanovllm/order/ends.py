"""The order that ends together: rows that would end after all others are moved to the front, the rest stays.

Knows rows by their expected lengths and the branches that they belong to, neither requests nor tokens. Makes
an order and computes nothing.
"""

from __future__ import annotations

import numpy as np

from nanovllm.order.tree import run_starts

SHARE = 0.005  # of the whole time, by which an end may be late
_ROUNDS = 3  # in each of which a large branch is parted once more


def end_together(lengths: np.ndarray, longest: np.ndarray, units: np.ndarray, slots: int) -> np.ndarray:
    """An order of rows in which `slots` of them run at once and all slots end at about the same time: int64
    [rows].

    lengths: float64 [rows], the steps that each takes of a slot, in the order that is best otherwise.
    longest: float64 [rows], the steps that it takes at most. units: int [rows], ascending; rows of a unit
    stay together.

    A row starts as soon as a slot is free, so not after the work before it divided by the slots (Graham,
    1966). From the last unit on: one of which each row ends in time stays, any other goes to the front. What
    is moved is looked at in the same way, and what is moved thrice is sorted, longest first. An end is in
    time up to SHARE after the whole work divided by the slots, or as late as longest first ends anyway: with
    the longest row, or one of the `slots` shortest.
    """
    if len(lengths) <= slots:
        return np.arange(len(lengths))
    begins = np.flatnonzero(run_starts(units))
    work, most = np.add.reduceat(lengths, begins), np.maximum.reduceat(longest, begins)
    whole = float(work.sum()) / slots
    shortest = float(np.partition(longest, slots - 1)[slots - 1])
    latest = max(whole + max(SHARE * whole, shortest), float(most.max()))
    left, after, parts = np.arange(len(begins)), 0.0, []
    for _ in range(_ROUNDS):
        stays, after = _in_time(work[left] / slots, most[left], latest - whole, after)
        parts.append(left[stays])
        left = left[~stays]
        if not len(left):
            break
    parts.append(left[np.argsort(-most[left], kind="stable")])
    walk = np.concatenate(parts[::-1])
    sizes = np.diff(begins, append=len(lengths))[walk]
    first = np.cumsum(sizes) - sizes  # of each unit, in the new order
    return np.repeat(begins[walk] - first, sizes) + np.arange(len(lengths))


def _in_time(work: np.ndarray, most: np.ndarray, late: float, after: float) -> tuple[np.ndarray, float]:
    """Which units stay, bool [units], and the work of these and of what is `after` them.

    work: of each unit and slot. most: steps that a row of it takes. late: steps by which an end may be later
    than that of all work. Units in a row with equal `most` are decided together.
    """
    stays = np.ones(len(work), bool)
    begins = np.flatnonzero(run_starts(most))
    sums = np.concatenate(([0.0], np.cumsum(work)))
    end, longest = len(work), float(most.max(initial=0.0))
    for begin in begins[::-1].tolist():
        if longest - after <= late:
            return stays, after + float(sums[end])
        if most[begin] - after <= late:
            after += float(sums[end] - sums[begin])
        else:
            stays[begin:end] = False
        end = begin
    return stays, after
