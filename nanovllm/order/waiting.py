"""Waiting: the rows of a call or of a window that wait, and which of them run next.

Rows are numbers with a beginning, a limit and a length that earlier answers let expect. It learns from
answers and changes no row: `feed.py` and `jobs/runner.py` own requests and tasks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from nanovllm.order.ends import end_together
from nanovllm.order.tree import run_starts, tree_of_list

_LEAST_UNIT = 16  # prompts; a smaller branch is a unit, however few slots there are
_SAMPLES = 16  # answers that say enough of a family
_FAMILIES = 32  # whose first rows run before all others, so that it is known how long their answers are
_TURN = 64  # rows of a family that run before those of the next, as long as nothing is known of both
_KEPT = 256  # lengths, the newest of a family
_CHANGE = 0.1  # of what is expected, which is worth a new order
_HIGH = 0.9  # the share of answers that are no longer than what is expected at most


class Slots(NamedTuple):
    """Where rows run."""

    seqs: int  # rows at once
    tokens: float  # of the KV cache, for all of them


class Asked(NamedTuple):
    """What rows ask for: int64 [rows]."""

    sizes: np.ndarray  # tokens of the prompt, about
    limits: np.ndarray  # tokens that an answer has at most
    copies: np.ndarray  # answers


class Seen:
    """How long the answers of a call or a job were, as a share of their limits, by family and limit."""

    def __init__(self) -> None:
        self.count = 0
        self._shares: dict[tuple[int, int], deque[float]] = {}

    def add(self, key: tuple[int, int], share: float) -> None:
        self.count += 1
        self._shares.setdefault(key, deque(maxlen=_KEPT)).append(share)

    def knows(self, key: tuple[int, int]) -> bool:
        return len(self._shares.get(key, ())) >= _SAMPLES // 2

    def expected(self, key: tuple[int, int]) -> tuple[float, float]:
        """The mean, and what few answers exceed; the limit, as long as too few are known."""
        if not self.knows(key):
            return 1.0, 1.0
        shares = self._shares[key]
        return sum(shares) / len(shares), sorted(shares)[int(_HIGH * (len(shares) - 1))]


class Waiting:
    """The rows that wait, in an order that is made again where answers let expect other lengths."""

    def __init__(
        self,
        beginnings: Sequence[bytes] | Sequence[array[int]],
        asked: Asked,
        slots: Slots,
        seen: Seen,
        sharing: bool = True,
    ) -> None:
        """beginnings: of rows, as in `tree_of_list`. sharing: whether a prefix cache makes it worth
        while that rows with the same beginning run one after the other."""
        count = len(beginnings)
        self._slots, self._seen = slots, seen
        tree = tree_of_list(beginnings, max(_LEAST_UNIT, slots.seqs // 4))
        self._order = tree.order if sharing else np.arange(count, dtype=np.int32)
        self._units = tree.units if sharing else self._order
        families = tree.families
        if not sharing:
            families = np.empty_like(families)
            families[tree.order] = tree.families
        self._lengths = np.stack(asked)[:, self._order].astype(np.float64)  # [3, rows], by place
        hashes = self._hashes(beginnings, self._order, families, tree.shared)
        bits = np.frexp(self._lengths[1])[1]
        unique, self._keys = _numbered(families.astype(np.int64) * 128 + bits)  # by place
        self._names = [(hashes[pair // 128], pair % 128) for pair in unique.tolist()]
        self._families = _firsts(families) if sharing else np.zeros(count, np.int32)  # by place
        self._waits = np.ones(count, bool)  # by place
        self._places = np.empty(count, np.int32)  # by row
        self._places[self._order] = np.arange(count, dtype=np.int32)
        self._left = count  # that wait
        self._queue = np.zeros(0, np.int32)  # places, of which some may not wait any more
        self._next = 0  # in the queue
        self._looked = 0  # the number of known answers when it was last looked whether to plan again
        self._expected = self._expect()  # for each name: as in `Seen.expected`, when it was planned
        self._plan()
        if count > 4 * slots.seqs:
            self._sample_first(families)

    def __len__(self) -> int:
        return self._left

    def take(self, most: int) -> list[int]:
        """Remove and return the next rows, at most so many."""
        if self._left and self._seen.count >= max(2 * self._looked, _SAMPLES):
            self._looked, expected = self._seen.count, self._expect()
            if not np.allclose(expected, self._expected, rtol=_CHANGE):
                self._expected = expected
                self._plan()
        rows: list[int] = []
        while self._left and len(rows) < most:
            places = self._queue[self._next : self._next + most - len(rows)]
            self._next += len(places)
            places = places[self._waits[places]]
            self._waits[places] = False
            self._left -= len(places)
            rows += self._order[places].tolist()
        return rows

    def has(self, row: int) -> bool:
        """Whether a row waits."""
        return bool(self._waits[self._places[row]])

    def remove(self, row: int) -> None:
        """Remove a row that waits."""
        self._waits[self._places[row]] = False
        self._left -= 1

    def answered(self, row: int, length: int) -> None:
        """Learn from an answer of `length` tokens."""
        place = self._places[row]
        limit = self._lengths[1, place]
        if limit > 0:
            self._seen.add(self._names[self._keys[place]], min(length / limit, 1.0))

    def _expect(self) -> np.ndarray:
        return np.array([self._seen.expected(name) for name in self._names]).reshape(-1, 2)

    def _plan(self) -> None:
        """Put all that wait into the order that ends soonest, by what is expected of each."""
        places = np.flatnonzero(self._waits)
        means, highs = self._expected.T
        sizes, limits, copies = self._lengths[:, places]
        keys = self._keys[places]
        longest = np.maximum(limits * highs[keys], 1.0)
        if len(places) > 1 and np.ptp(longest) > 0:
            lengths = np.maximum(limits * means[keys], 1.0) * copies
            units = self._units[places]
            learned = bool((self._expected != 1.0).any())
            if learned or self._all_fit(sizes + longest, copies):
                families, turns = self._families[places], np.zeros(len(places))
                if learned:  # those of which nothing is known take turns
                    unknown = ~np.array([self._seen.knows(name) for name in self._names])[keys]
                    turns[unknown] = _ranks(families[unknown]) // _TURN
                walk = _longest_first(longest, units, families, turns, learned)
                places, lengths, longest, units = places[walk], lengths[walk], longest[walk], units[walk]
            units = np.cumsum(run_starts(units)) - 1
            places = places[end_together(lengths, longest, units, self._slots.seqs)]
        self._queue, self._next = places.astype(np.int32), 0

    def _all_fit(self, tokens: np.ndarray, copies: np.ndarray) -> bool:
        """Whether the KV cache holds the longest rows at once; `tokens` of each."""
        walk = np.argsort(-tokens)
        some = walk[: int(np.searchsorted(np.cumsum(copies[walk]), self._slots.seqs)) + 1]
        return float((tokens[some] * copies[some]).sum()) <= self._slots.tokens

    def _sample_first(self, families: np.ndarray) -> None:
        """Put the first rows of large families of which too little is known at the front. families: by
        place."""
        sizes = np.bincount(families)
        large = np.flatnonzero(sizes >= max(4 * _SAMPLES, len(families) // _FAMILIES))
        if len(large) < 2:
            return
        known = np.array([self._seen.knows(name) for name in self._names])[self._keys]
        some = [np.flatnonzero((families == family) & ~known)[:_SAMPLES] for family in large.tolist()]
        first = np.sort(np.concatenate(some)).astype(np.int32)
        rest = np.ones(len(families), bool)
        rest[first] = False
        self._queue = np.concatenate((first, self._queue[rest[self._queue]]))

    @staticmethod
    def _hashes(
        beginnings: Sequence[bytes] | Sequence[array[int]],
        order: np.ndarray,
        families: np.ndarray,
        shared: np.ndarray,
    ) -> list[int]:
        """A number for what each family begins with, the same in all windows of a job."""
        some = np.unique(families, return_index=True)
        hashes = [0] * len(shared)
        for family, place in zip(*map(np.ndarray.tolist, some), strict=True):
            beginning = beginnings[order[place]][: int(shared[family])]
            hashes[family] = xxhash.xxh3_64_intdigest(beginning)
        return hashes


def _numbered(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different values, and which of them each one is, int32."""
    if not len(values) or (values == values[0]).all():
        return values[:1], np.zeros(len(values), np.int32)
    unique, inverse = np.unique(values, return_inverse=True)
    return unique, inverse.astype(np.int32)


def _firsts(families: np.ndarray) -> np.ndarray:
    """The first place of the family of each place."""
    unique, inverse = _numbered(families)
    first = np.full(len(unique), len(families), np.int32)
    np.minimum.at(first, inverse, np.arange(len(families), dtype=np.int32))
    return first[inverse]


def _ranks(families: np.ndarray) -> np.ndarray:
    """The number of each row within its family."""
    walk = np.argsort(families, kind="stable")
    begins = np.flatnonzero(run_starts(families[walk]))
    ranks = np.empty(len(walk), np.int64)
    ranks[walk] = np.arange(len(walk)) - np.repeat(begins, np.diff(begins, append=len(walk)))
    return ranks


def _longest_first(
    longest: np.ndarray, units: np.ndarray, families: np.ndarray, turns: np.ndarray, among: bool
) -> np.ndarray:
    """An order of rows: units with the longest rows come first in each family, and so do the longest rows in
    each unit. among: and so do families with the longest rows, by `turns` first; else they stay where they
    are."""
    most, turn = np.zeros(int(units.max()) + 1), np.zeros(int(units.max()) + 1)
    np.maximum.at(most, units, longest)
    np.maximum.at(turn, units, turns)
    of_family = np.zeros(int(families.max()) + 1)
    np.maximum.at(of_family, families, longest * among)
    return np.lexsort((-longest, units, -most[units], families, turn[units], -of_family[families]))
