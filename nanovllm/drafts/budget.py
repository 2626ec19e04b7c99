"""Budget: how many drafts a decode step computes, from how often drafts were right and from what steps cost.

It sees shares and seconds; it changes which tokens are computed ahead, and no answer. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Steps of up to so many rows have a multiple of these.
_UNITS, _LARGEST_UNIT = ((4, 1), (16, 4), (128, 8)), 16
_WEIGHT = 0.2  # of the newest step in a mean
_USES = 50  # steps over which the first one of a size is reckoned
_FORGOTTEN = 200  # steps after which a size that no step had is tried again
FIRST_TRUST = 0.6  # how often a draft is right before anything is known
TRUST_WEIGHT = 0.1
LEAST_GAIN = 0.02  # a draft that is right less often is never computed


class Trust:
    """How often the drafts of one text were right: a mean that forgets."""

    def __init__(self, start: float = FIRST_TRUST) -> None:
        self.value = start

    def learn(self, right: int, wrong: bool) -> None:
        """right: drafts that were drawn, in order; wrong: whether another one was not."""
        keep = (1 - TRUST_WEIGHT) ** right
        self.value = self.value * keep + (1 - keep)
        if wrong:
            self.value *= 1 - TRUST_WEIGHT

    def gains(self, shares: Sequence[float]) -> list[float]:
        """The chance of each draft of a text that it and all before it are right."""
        return [share * self.value ** (place + 1) for place, share in enumerate(shares)]


class Budget:
    """Chooses drafts for the most tokens a second. What steps of other sizes take follows from a line through
    those that are known. While one is known, twice its rows are taken to cost the same, so they are tried."""

    def __init__(self, most_rows: int) -> None:
        """most_rows: of a step."""
        self.most_rows = most_rows
        self._costs: dict[int, tuple[float, int]] = {}  # seconds, and the number of the last step, by size
        self._steps = 0
        self._begun: set[int] = set()  # sizes that steps had
        self._first = 0.0  # seconds that the first step of a size takes beyond others

    def observe(self, rows: int, seconds: float) -> None:
        """Note a decode step. The first one of a size counts apart, as it compiles, captures a graph or is
        recorded."""
        self._steps += 1
        size = _whole(rows)
        if size not in self._begun:
            self._begun.add(size)
            more = max(0.0, seconds - float(self._seconds(np.array([rows]))[0])) if self._costs else 0.0
            self._first += _WEIGHT * (more - self._first)
            return
        mean, last = self._costs.get(size, (seconds, self._steps))
        if self._steps - last > _FORGOTTEN:
            mean = seconds
        self._costs[size] = mean + _WEIGHT * (seconds - mean), self._steps

    def _seconds(self, rows: np.ndarray) -> np.ndarray:
        """What steps of so many rows take; zeros if nothing is known."""
        known = {size: mean for size, (mean, last) in self._costs.items() if self._is_recent(last)}
        if not known:
            return np.zeros(len(rows))
        sizes, means = np.array([*known], float), np.array([*known.values()])
        if len(known) == 1:
            return np.asarray(means * np.where(rows < sizes, rows / sizes, np.maximum(1, rows / (2 * sizes))))
        away = sizes - sizes.mean()
        slope = min(max(0.0, (away * means).sum() / (away * away).sum()), means.mean() / sizes.mean())
        line = means.mean() + slope * (rows - sizes.mean())
        begun, new = self._begun, self._first / _USES
        return np.array(
            [
                known.get(size, cost if size in begun else cost + new)
                for size, cost in zip(rows.tolist(), line, strict=True)
            ]
        )

    def _is_recent(self, last: int) -> bool:
        return self._steps - last <= _FORGOTTEN

    def choose(self, gains: Sequence[Sequence[float]]) -> list[int]:
        """The number of drafts of each sequence. gains: of its drafts, never rising; see `Trust.gains`."""
        counts = [0] * len(gains)
        found = [(-gain, row) for row, each in enumerate(gains) for gain in each if gain >= LEAST_GAIN]
        if not found:
            return counts
        found.sort()
        totals = len(gains) - np.cumsum([gain for gain, _ in found], dtype=float)
        numbers = np.array([0, *self._numbers(len(gains), len(found))])
        drawn = np.concatenate([[float(len(gains))], totals])[numbers]
        seconds = self._seconds(len(gains) + numbers)
        speed = drawn / seconds if seconds.all() else drawn
        best = int(numbers[len(speed) - 1 - int(np.argmax(speed[::-1]))])
        for _, row in found[:best]:
            counts[row] += 1
        return counts

    def _numbers(self, seqs: int, drafts: int) -> list[int]:
        """Numbers of drafts whose rows fill a step of a common size, or that are all. Steps have few sizes,
        because a graph or a recording is made for each."""
        most = min(drafts, self.most_rows - seqs)
        sizes = [rows - seqs for rows in range(seqs + 1, seqs + most + 1) if rows == _whole(rows)]
        return sizes or ([most] if most > 0 else [])


def _whole(rows: int) -> int:
    """The number of rows to which a step is filled up."""
    unit = next((unit for most, unit in _UNITS if rows <= most), _LARGEST_UNIT)
    return -(-rows // unit) * unit
