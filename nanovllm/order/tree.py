"""The order in which a list of prompts is computed: those that begin alike one after the other.

Knows token ids, neither requests nor blocks. An order changes how often a common beginning is computed, never
an answer.
"""

from __future__ import annotations

from array import array
from typing import Protocol, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

WIDTH = 32  # tokens that are compared at once: prompts become neighbours if they share so many
_CHUNK = 2**14  # prompts whose tokens are copied at once
MOST_TOKENS = 2**25  # of prompts that are ordered at once, which are copied for it: 128 MiB
# Odd factors: the sum of products modulo 2**64 is a hash (Dietzfelbinger, 1996). Where two are equal by
# chance, neighbours share nothing, which costs time only.
_FACTORS = np.random.default_rng(0).integers(0, 2**64, WIDTH // 2 + 1, np.uint64) | np.uint64(1)


def tree_order(token_ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The prompts in the order of a walk through the tree of their beginnings: indices, int32 [prompts].

    token_ids: int32, all prompts one after the other. offsets: int64 [prompts + 1], where each begins, and
    the end. A branch is where its first prompt is, and within it prompts keep their order. So prompts that
    share nothing stay in place.
    """
    starts, ends = offsets[:-1], offsets[1:]
    longest = int(np.diff(offsets).max(initial=0))
    windows = sliding_window_view(token_ids, WIDTH) if len(token_ids) >= WIDTH else token_ids
    order = np.arange(len(starts), dtype=np.int32)
    places = order.copy()  # in the order, of prompts that share their first `depth` tokens with another
    branches = np.zeros(len(starts), np.int32)  # of these: the first place of their branch
    for depth in range(0, longest - WIDTH + 1, WIDTH):
        rows = order[places]
        places, branches = _going_on(ends[rows] - starts[rows] >= depth + WIDTH, places, branches)
        if not len(places):
            break
        rows = order[places]
        hashes = _hashes(windows, offsets, rows, depth)
        begins = np.flatnonzero(np.concatenate(([True], branches[1:] != branches[:-1])))
        parts = np.maximum.reduceat(hashes, begins) != np.minimum.reduceat(hashes, begins)
        if parts.all():
            order[places], branches = _parted(rows, places, branches, hashes)
        elif parts.any():
            some = np.flatnonzero(np.repeat(parts, np.diff(begins, append=len(places))))
            order[places[some]], branches[some] = _parted(
                rows[some], places[some], branches[some], hashes[some]
            )
    return order


def _going_on(long: np.ndarray, places: np.ndarray, branches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those long enough that have a neighbour in the same branch."""
    if not long.all():
        places, branches = places[long], branches[long]
    equal = branches[1:] == branches[:-1]
    shared = np.zeros(len(places), bool)
    shared[1:] |= equal
    shared[:-1] |= equal
    return (places, branches) if shared.all() else (places[shared], branches[shared])


def _parted(
    rows: np.ndarray, places: np.ndarray, branches: np.ndarray, hashes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of branches that part here, in their new order at these places, and their new branches."""
    hashes += branches.astype(np.uint64) * _FACTORS[-1]
    sorting = np.argsort(hashes)
    hashes[:] = hashes[sorting]
    begins = np.flatnonzero(np.concatenate(([True], hashes[1:] != hashes[:-1]))).astype(np.int32)
    firsts = np.minimum.reduceat(sorting, begins).astype(np.int32)  # of each new branch
    sizes = np.diff(begins, append=np.int32(len(rows)))
    first = np.empty(len(rows), np.int32)  # of the branch of each row
    first[sorting] = np.repeat(firsts, sizes)
    del sorting, begins, firsts, sizes
    if (first[1:] >= first[:-1]).all():  # nothing moves
        return rows, places[first]
    walk = np.argsort(first, kind="stable")
    return rows[walk], places[first[walk]]


def _hashes(windows: np.ndarray, offsets: np.ndarray, rows: np.ndarray, depth: int) -> np.ndarray:
    """A hash of the WIDTH tokens of each row at `depth`: uint64 [rows]."""
    hashes = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _CHUNK):
        tokens = windows[offsets[rows[start : start + _CHUNK]] + depth]
        hashes[start : start + _CHUNK] = np.dot(tokens.view(np.uint64), _FACTORS[:-1])
    return hashes


class Prompted(Protocol):
    """A request."""

    @property
    def prompt_token_ids(self) -> array[int]: ...


T = TypeVar("T", bound=Prompted)


def by_prefix(requests: list[T]) -> list[T]:
    """Requests in `tree_order` of their prompts, in portions of MOST_TOKENS tokens."""
    ends = np.cumsum([0, *[len(each.prompt_token_ids) for each in requests]])
    ordered: list[T] = []
    while len(ordered) < len(requests):
        first = len(ordered)
        end = max(first + 1, int(np.searchsorted(ends, ends[first] + MOST_TOKENS, side="right")) - 1)
        flat = np.frombuffer(b"".join([each.prompt_token_ids for each in requests[first:end]]), np.int32)
        order = tree_order(flat, ends[first : end + 1] - ends[first])
        ordered += [requests[first + row] for row in order.tolist()]
    return ordered
