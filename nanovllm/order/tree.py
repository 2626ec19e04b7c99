"""The order in which a list of prompts is computed: those that begin alike one after the other.

Knows token ids, neither requests nor blocks. An order changes how often a common beginning is computed, never
an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

WIDTH = 32  # tokens that are compared at once: prompts become neighbours if they share so many
_CHUNK = 2**14  # prompts whose tokens are copied at once
# The tokens [depth, depth + WIDTH) of prompts, int32 [prompts, WIDTH]. All of them have so many.
Window = Callable[[np.ndarray, int], np.ndarray]
# Odd factors: the sum of products modulo 2**64 is a hash (Dietzfelbinger, 1996). Where two are equal by
# chance, neighbours share nothing, which costs time only.
_FACTORS = np.random.default_rng(0).integers(0, 2**64, WIDTH // 2 + 1, np.uint64) | np.uint64(1)


def tree_order(lengths: np.ndarray, window: Window) -> np.ndarray:
    """The prompts in the order of a walk through the tree of their beginnings: indices, int32 [prompts].

    lengths: [prompts], in tokens. A branch is where its first prompt is, and within it prompts keep their
    order. So prompts that share nothing stay in place.
    """
    order = np.arange(len(lengths), dtype=np.int32)
    places = order.copy()  # in the order, of prompts that share their first `depth` tokens with another
    branches = np.zeros(len(lengths), np.int32)  # of these: the first place of their branch
    for depth in range(0, int(lengths.max(initial=0)) - WIDTH + 1, WIDTH):
        places, branches = _going_on(lengths[order[places]] >= depth + WIDTH, places, branches)
        if not len(places):
            break
        rows = order[places]
        hashes = _hashes(rows, depth, window)
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


def _hashes(rows: np.ndarray, depth: int, window: Window) -> np.ndarray:
    """A hash of the tokens of each row in the window at `depth`: uint64 [rows]."""
    hashes = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _CHUNK):
        tokens = window(rows[start : start + _CHUNK], depth)
        hashes[start : start + _CHUNK] = np.dot(tokens.view(np.uint64), _FACTORS[:-1])
    return hashes


class Prompted(Protocol):
    """A request."""

    @property
    def prompt_token_ids(self) -> array[int]: ...


T = TypeVar("T", bound=Prompted)


def by_prefix(requests: list[T]) -> list[T]:
    """Requests in `tree_order` of their prompts."""
    prompts = [each.prompt_token_ids for each in requests]
    lengths = np.fromiter(map(len, prompts), np.int32, len(prompts))
    return [requests[row] for row in tree_order(lengths, window_of(prompts)).tolist()]


def window_of(prompts: Sequence[array[int]]) -> Window:
    """The windows of prompts that are arrays of int32."""

    def window(rows: np.ndarray, depth: int) -> np.ndarray:
        parts = [prompts[row][depth : depth + WIDTH].tobytes() for row in rows.tolist()]
        return np.frombuffer(b"".join(parts), np.int32).reshape(-1, WIDTH)

    return window


def flat_window(token_ids: np.ndarray, offsets: np.ndarray) -> Window:
    """The windows of prompts that stand one after the other. token_ids: int32; offsets: of each prompt."""
    views = np.lib.stride_tricks.sliding_window_view(token_ids, WIDTH)
    return lambda rows, depth: views[offsets[rows] + depth]
