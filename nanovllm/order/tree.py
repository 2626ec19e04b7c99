"""The order in which a list of prompts is computed: those that begin alike one after the other.

Knows token ids, neither requests nor blocks. An order changes how often a common beginning is computed, never
an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

WIDTH = 32  # tokens that are compared at once: prompts become neighbours if they share so many
TEXT_WIDTH = 64  # bytes of a text that are compared at once, about half as many tokens
_CHUNK = 2**14  # prompts whose tokens are copied at once, in windows of WIDTH
_WORD = 8  # bytes that are multiplied at once
MOST_TOKENS = 2**25  # of prompts that are ordered at once, which are copied for it: 128 MiB
# Odd factors: the sum of products modulo 2**64 is a hash (Dietzfelbinger, 1996). Where two are equal by
# chance, neighbours share nothing, which costs time only.
_FACTORS = np.random.default_rng(0).integers(0, 2**64, 2**14 + 1, np.uint64) | np.uint64(1)
_FINE = 512  # steps of a width, after which it doubles: branches are off by a 512th of what they share


class Tree(NamedTuple):
    """Prompts in the order of a walk through the tree of their beginnings, and their branches, by place in
    the order: int32 [prompts], but for `shared`."""

    order: np.ndarray  # which prompt
    units: np.ndarray  # ascending; the largest branch of at most `most` prompts; alone, if there is none
    families: np.ndarray  # the smallest branch of more than `most` prompts; 0: all
    shared: np.ndarray  # int32 [families]: the tokens that all of a family begin with


def tree_of(token_ids: np.ndarray, offsets: np.ndarray, width: int = WIDTH, most: int | None = None) -> Tree:
    """The prompts in the order of a walk through the tree of their beginnings, and its branches.

    token_ids: int32, or bytes of texts as uint8; all prompts one after the other. offsets: int64
    [prompts + 1], where each begins, and the end. A branch is where its first prompt is, and within it
    prompts keep their order. So prompts that share nothing stay in place. width: of the windows in which
    they are compared, the first _FINE of them; further on they are wider, up to a _FINE-th of the depth.
    most: units are of at most this many prompts, and families of more; None: there are no branches.
    """
    starts, ends = offsets[:-1], offsets[1:]
    longest = int(np.diff(offsets).max(initial=0))
    order = np.arange(len(starts), dtype=np.int32)
    labels = _Labels(len(starts), len(starts) if most is None else most)
    places = order.copy()  # in the order, of prompts that share their first `depth` tokens with another
    branches = np.zeros(len(starts), np.int32)  # of these: the first place of their branch
    depth, most_width = 0, (len(_FACTORS) - 1) * _WORD // token_ids.itemsize
    while depth + width <= longest:
        rows = order[places]
        places, branches = _going_on(ends[rows] - starts[rows] >= depth + width, places, branches)
        if not len(places):
            break
        rows = order[places]
        hashes = _hashes(sliding_window_view(token_ids, width), offsets, rows, depth)
        begins = np.flatnonzero(run_starts(branches))
        parts = np.maximum.reduceat(hashes, begins) != np.minimum.reduceat(hashes, begins)
        if parts.all():
            order[places], branches = _parted(rows, places, branches, hashes)
        elif parts.any():
            some = np.flatnonzero(np.repeat(parts, np.diff(begins, append=len(places))))
            order[places[some]], branches[some] = _parted(
                rows[some], places[some], branches[some], hashes[some]
            )
        depth += width
        labels.note(places, branches, depth)
        if depth >= _FINE * width and 2 * width <= most_width:
            width *= 2
    return labels.tree(order)


def run_starts(values: np.ndarray) -> np.ndarray:
    """Where a run of equal values begins, bool of the same size."""
    begins = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=begins[1:])
    return begins


class _Labels:
    """The branches by place, `units` and `families` of a `Tree`."""

    def __init__(self, count: int, most: int) -> None:
        self._most = most
        self._are_wanted = most < count
        self._units = np.arange(count, dtype=np.int32)
        self._families = np.zeros(count if self._are_wanted else 0, np.int32)
        self._shared = [0]

    def note(self, places: np.ndarray, branches: np.ndarray, depth: int) -> None:
        """Note branches one level further down. places: ascending within each. branches: equal in
        each. depth: the tokens that each begins with."""
        if not self._are_wanted:
            return
        begins = np.flatnonzero(run_starts(branches))
        sizes = np.diff(begins, append=len(places))
        some = np.repeat((sizes > 1) & (sizes <= self._most), sizes)
        some[some] = self._units[places[some]] == places[some]  # in none yet
        self._units[places[some]] = np.repeat(places[begins], sizes)[some]
        large = np.flatnonzero(sizes > self._most)
        for begin, size in zip(begins[large].tolist(), sizes[large].tolist(), strict=True):
            self._families[places[begin : begin + size]] = len(self._shared)
            self._shared.append(depth)

    def tree(self, order: np.ndarray) -> Tree:
        shared = np.array(self._shared, np.int32)
        if not self._are_wanted:
            return Tree(order, self._units, np.zeros(len(order), np.int32), shared)
        walk = np.argsort(self._units, kind="stable")
        return Tree(order[walk], self._units[walk], self._families[walk], shared)


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
    """The rows of branches that part here, in their new order at these places, and their new branches: the
    first place of each, which no other branch has."""
    hashes += branches.astype(np.uint64) * _FACTORS[-1]
    sorting = np.argsort(hashes)
    hashes[:] = hashes[sorting]
    begins = np.flatnonzero(run_starts(hashes)).astype(np.int32)
    firsts = np.minimum.reduceat(sorting, begins).astype(np.int32)  # of each new branch
    sizes = np.diff(begins, append=np.int32(len(rows)))
    first = np.empty(len(rows), np.int32)  # of the branch of each row
    first[sorting] = np.repeat(firsts, sizes)
    del sorting, begins, firsts, sizes
    if (first[1:] >= first[:-1]).all():  # nothing moves
        return rows, places[first]
    walk = np.argsort(first, kind="stable")
    starts = np.flatnonzero(run_starts(first[walk]))
    return rows[walk], np.repeat(places[starts], np.diff(starts, append=len(rows)))


def _hashes(windows: np.ndarray, offsets: np.ndarray, rows: np.ndarray, depth: int) -> np.ndarray:
    """A hash of the window of each row at `depth`: uint64 [rows]."""
    hashes = np.empty(len(rows), np.uint64)
    chunk = max(1, _CHUNK * WIDTH // windows.shape[1])
    for start in range(0, len(rows), chunk):
        tokens = windows[offsets[rows[start : start + chunk]] + depth]
        hashes[start : start + chunk] = np.dot(words := tokens.view(np.uint64), _FACTORS[: words.shape[1]])
    return hashes


def tree_of_list(beginnings: Sequence[bytes] | Sequence[array[int]], most: int | None = None) -> Tree:
    """As `tree_of`, in portions of MOST_TOKENS tokens, or of as many bytes; no branch is in two portions.

    beginnings: all token ids as int32, or all texts as bytes.
    """
    is_text = len(beginnings) > 0 and isinstance(beginnings[0], bytes)
    dtype, width = (np.uint8, TEXT_WIDTH) if is_text else (np.int32, WIDTH)
    ends = np.cumsum(np.fromiter(chain([0], map(len, beginnings)), np.int64, len(beginnings) + 1))
    nothing = np.zeros(0, np.int32)
    found: list[Tree] = [Tree(nothing, nothing, nothing, np.zeros(1, np.int32))]
    first, num_families = 0, 1
    while first < len(beginnings):
        end = max(first + 1, int(np.searchsorted(ends, ends[first] + MOST_TOKENS, side="right")) - 1)
        joined = b"".join(beginnings[first:end])
        offsets = ends[first : end + 1] - ends[first]
        part = tree_of(np.frombuffer(joined, dtype), offsets, width, most)
        families = np.where(part.families > 0, part.families + (num_families - 1), 0).astype(np.int32)
        found.append(Tree(part.order + first, part.units + first, families, part.shared[1:]))
        num_families += len(part.shared) - 1
        first = end
    return Tree(
        np.concatenate([each.order for each in found]).astype(np.int32, copy=False),
        np.concatenate([each.units for each in found]).astype(np.int32, copy=False),
        np.concatenate([each.families for each in found]),
        np.concatenate([each.shared for each in found]),
    )
