"""Where the last tokens of texts occurred before: in the texts themselves, or in earlier answers.

Finds equal runs, for many texts at once; guesses nothing. Needs no torch.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

END = -1  # between two answers; no token
_NONE = -2  # before a text; no token, and no END
MOST_TOKENS = 2**19  # of earlier answers, whatever their number
_PLACE_BITS = 20  # of a key of `Answers`: a place, which is below 2 * MOST_TOKENS
_FACTOR = 0x9E3779B97F4A7C15  # of the hash of two tokens: 2 ** 64 divided by the golden ratio
_SORTED_SHARE = 1.5  # answers are sorted anew when they have grown by this


class Lines(NamedTuple):
    """The tokens of M texts, one after the other."""

    ids: np.ndarray  # [N] int32
    starts: np.ndarray  # [M + 1] int64: where each begins, and the last one ends

    @classmethod
    def of(cls, texts: Sequence[tuple[array[int], ...]]) -> Lines:
        """Of texts in parts, int32, such as a prompt and an output."""
        starts = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([sum(map(len, parts)) for parts in texts], out=starts[1:])
        return cls(np.frombuffer(b"".join([part for parts in texts for part in parts]), np.int32), starts)

    def tails(self, count: int) -> np.ndarray:
        """The last tokens of each, [M, count] int32, the last one first."""
        at = self.starts[1:, None] - 1 - np.arange(count)
        inside = at >= self.starts[:-1, None]
        return np.where(inside, self.ids[np.where(inside, at, 0)] if len(self.ids) else _NONE, _NONE)


class Places(NamedTuple):
    """Up to P places for each of M texts where its last tokens occurred before, the latest first. A place is
    the index of the last token of a run in `ids`."""

    ids: np.ndarray  # [N] int32, of all texts that are searched, one after the other
    at: np.ndarray  # [M, P] int64; -1: none
    lengths: np.ndarray  # [M, P] int64: tokens that match, up to a most; 0: none
    ends: np.ndarray | None  # [M] int64: where each text ends, which then repeats itself; None: END ends it

    def following(self, count: int) -> np.ndarray:
        """The tokens after each place, [M, P, count] int32; END where there are no more."""
        steps = np.arange(count)
        if self.ends is not None:  # where the text ends, it is taken to repeat what follows the place
            period = np.maximum(self.ends[:, None] - 1 - self.at, 1)
            return self.ids[(self.at + 1)[:, :, None] + steps % period[:, :, None]]
        found = self.ids[np.minimum((self.at + 1)[:, :, None] + steps, len(self.ids) - 1)]
        return np.where(np.logical_or.accumulate(found == END, axis=2), END, found)


def own_places(lines: Lines, width: int, longest: int, most: int) -> Places:
    """Up to `most` places of each text where its last `width` tokens or more ended before; up to `longest`
    matching tokens are counted."""
    ids, starts, tails = lines.ids, lines.starts, lines.tails(max(longest, 2))
    texts = np.repeat(np.arange(len(tails)), np.diff(starts))
    hits = ids == tails[texts, 0]
    is_text = np.diff(starts) > 0
    hits[starts[1:][is_text] - 1] = False
    if width > 1:
        hits[1:] &= ids[:-1] == tails[texts[1:], 1]
        hits[starts[:-1][is_text]] = False
    found = np.flatnonzero(hits)
    texts = texts[found]
    last = np.cumsum(np.bincount(texts, minlength=len(tails)))  # the end of each text's hits
    order = last[texts] - 1 - np.arange(len(found))
    near = order < most
    at = np.full((len(tails), min(most, int(order.max(initial=-1)) + 1)), -1, np.int64)
    at[texts[near], order[near]] = found[near]
    return _counted(ids, at, starts[:-1, None], tails[:, :longest], width, starts[1:])


def _counted(
    ids: np.ndarray,
    at: np.ndarray,
    starts: np.ndarray,
    tails: np.ndarray,
    width: int,
    ends: np.ndarray | None,
) -> Places:
    """The places `at` with what matches there: at least `width` tokens, else there is none. starts [M, 1]:
    where the searched text of each begins."""
    lengths, alive = np.zeros_like(at), at >= 0
    for back in range(tails.shape[1]):
        before = at - back
        alive &= before >= starts
        alive &= ids[np.where(alive, before, 0)] == tails[:, back, None] if len(ids) else False
        if not alive.any():
            break
        lengths += alive
    is_place = lengths >= width
    return Places(ids, np.where(is_place, at, -1), np.where(is_place, lengths, 0), ends)


class Answers:
    """The outputs of sequences that ended, the newest `most_answers` and MOST_TOKENS of them. Runs of two
    tokens are looked up in a sorted table, which lacks the newest answers."""

    def __init__(self, most_answers: int) -> None:
        self._most = most_answers
        self._outputs: deque[array[int]] = deque()
        self._tokens = 0  # of `_outputs`, with an END for each
        self._ids = np.empty(0, np.int32)  # of the sorted ones
        self._keys = np.empty(0, np.uint64)  # sorted: the hash of two tokens, then the place of the second

    def add(self, output: array[int]) -> None:
        """Add the output of a sequence, int32. When there are too many, the older half is forgotten."""
        if not self._most or len(output) < 2:
            return
        output = output[-MOST_TOKENS // 2 :]
        self._outputs.append(output)
        self._tokens += len(output) + 1
        if len(self._outputs) > self._most or self._tokens > MOST_TOKENS:
            while len(self._outputs) > 1 and (
                len(self._outputs) > (self._most + 1) // 2 or self._tokens > MOST_TOKENS // 2
            ):
                self._tokens -= len(self._outputs.popleft()) + 1
            self._sort()
        elif self._tokens > _SORTED_SHARE * len(self._ids):
            self._sort()

    def _sort(self) -> None:
        self._ids = np.full(self._tokens, END, np.int32)
        start = 0
        for output in self._outputs:
            self._ids[start : start + len(output)] = output
            start += len(output) + 1
        places = np.arange(1, len(self._ids), dtype=np.uint64)
        self._keys = _hashed(self._ids[:-1], self._ids[1:]) | places
        self._keys.sort()

    def places(self, lines: Lines, longest: int, most: int) -> Places:
        """Up to `most` places of the last two tokens or more of each text, as `own_places`."""
        tails = lines.tails(longest)
        key = _hashed(tails[:, 1], tails[:, 0])
        begin = np.searchsorted(self._keys, key)
        end = np.searchsorted(self._keys, key | np.uint64(2**_PLACE_BITS - 1), "right")
        at = end[:, None] - 1 - np.arange(most)
        known = at >= begin[:, None]
        at = at[:, : max(int(known.sum(1).max(initial=0)), 1)]
        known = known[:, : at.shape[1]]
        keys = self._keys[np.where(known, at, 0)] if len(self._keys) else np.zeros(at.shape, np.uint64)
        found = (keys & np.uint64(2**_PLACE_BITS - 1)).astype(np.int64)
        return _counted(self._ids, np.where(known, found, -1), np.zeros((1, 1), np.int64), tails, 2, None)


def _hashed(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Of two tokens, in the upper bits of uint64; the lower _PLACE_BITS are zeros."""
    pair = first.astype(np.uint64) << np.uint64(32) | second.astype(np.uint32)
    with np.errstate(over="ignore"):
        mixed = pair * np.uint64(_FACTOR)
    return mixed >> np.uint64(_PLACE_BITS) << np.uint64(_PLACE_BITS)
