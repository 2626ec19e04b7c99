"""Budget: how many drafts a decode step computes, from how often drafts were right and from what steps cost.

It sees chances and seconds; it changes which tokens are computed ahead, and no answer. Needs no torch.
"""

from __future__ import annotations

import numpy as np

# Steps of up to so many rows have a multiple of these.
_UNITS, _LARGEST_UNIT = ((4, 1), (16, 4), (64, 8), (128, 16)), 64
_WEIGHT = 0.2  # of the newest step in a mean
_OUTLIER = 4.0  # times the mean: a step that takes longer counts as this
_USES = 50  # steps over which the first one of a size is reckoned
_FORGOTTEN = 200  # steps after which a size that no step had is tried again
LEAST_GAIN = 0.02  # a draft that is right less often is never computed
_ALLOWED = 0.02  # of the time: what looking and drafting may lose
_START, _MOST = 5.0, 20.0  # steps that may be lost at first, and after any gain
_FIRST = 0.03  # the share that counts of what the first step of a size loses: it pays for all that follow
_LEARNED = 6  # plain steps before the first look
_REFRESHED, _PLAIN = 256, 4  # so many steps with drafts, then so many without


class Costs:
    """Seconds that steps take, by their rows: a mean of each size, and a line through known ones."""

    def __init__(self) -> None:
        # By size: seconds, the number of the last step, and how many counted.
        self._means: dict[int, tuple[float, int, int]] = {}
        self._steps = 0
        self._begun: set[int] = set()  # sizes that steps had
        self._first = 0.0  # seconds that the first step of a size takes beyond others

    def observe(self, rows: int, seconds: float) -> bool:
        """Note a step; return whether it counts. The first one of a size counts apart, as it compiles,
        captures a graph or is recorded."""
        self._steps += 1
        size = _whole(rows)
        if size not in self._begun:
            self._begun.add(size)
            more = max(0.0, seconds - self.one(rows)) if self._means else 0.0
            self._first += _WEIGHT * (more - self._first)
            return False
        mean, last, number = self._means.get(size, (seconds, self._steps, 0))
        if self._steps - last > _FORGOTTEN:
            mean, number = seconds, 0
        mean += max(_WEIGHT, 1 / (number + 1)) * (min(seconds, _OUTLIER * mean) - mean)
        self._means[size] = mean, self._steps, number + 1
        return True

    def one(self, rows: int) -> float:
        """What a step of so many rows takes; 0.0 if nothing is known."""
        mean, last, _ = self._means.get(_whole(rows), (0.0, 0, 0))
        is_recent = mean > 0 and self._steps - last <= _FORGOTTEN
        return mean if is_recent else float(self.of(np.array([rows]))[0])

    def of(self, rows: np.ndarray) -> np.ndarray:
        """What steps of so many rows take; zeros if nothing is known."""
        known = {
            size: mean for size, (mean, last, _) in self._means.items() if self._steps - last <= _FORGOTTEN
        }
        if not known:
            return np.zeros(len(rows))
        sizes, means = np.array([*known], float), np.array([*known.values()])
        if len(known) == 1:
            return np.asarray(means * _guessed(rows, sizes))
        away = sizes - sizes.mean()
        slope = min(max(0.0, (away * means).sum() / (away * away).sum()), means.mean() / sizes.mean())
        line = means.mean() + slope * (rows - sizes.mean())
        begun, new = self._begun, self._first / _USES
        return np.array(
            [
                known.get(size, cost if size in begun else cost + new)
                for size, cost in zip(map(_whole, rows.tolist()), line, strict=True)
            ]
        )


def _guessed(rows: np.ndarray, known: np.ndarray) -> np.ndarray:
    """What steps cost beside one of `known` rows: up to twice as many rows are taken to cost the same, so
    they are tried."""
    return np.where(rows < known, rows / known, np.maximum(1, rows / (2 * known)))


class Budget:
    """Chooses drafts for the most tokens a second, if that is more than steps without any draw. What looking
    and drafting lost beside those, counted in steps, is at most `_ALLOWED` of all steps; while it is more, no
    text is looked at. What the first step of a size loses counts little: `_FIRST`."""

    def __init__(self, most_seqs: int, most_drafts: int) -> None:
        """most_seqs, most_drafts: of a step."""
        self.most_drafts = most_drafts
        sizes = range(1, most_seqs + most_drafts + 1)
        self._sizes = np.array([rows for rows in sizes if rows == _whole(rows)])
        self._plain, self._drafted = Costs(), Costs()
        self._balance = _START  # steps that may still be lost
        self._wait = _LEARNED  # steps without drafts that come first
        self._since = 0  # steps with drafts since the last ones without

    @property
    def may_look(self) -> bool:
        """Whether the next step may have drafts."""
        return self._balance > 0 and not self._wait

    def plain(self, seqs: int, seconds: float | None, looked: bool) -> None:
        """Note a step of so many sequences without drafts. seconds: since the last decode step, None if it
        followed none. looked: whether texts were looked at meanwhile, in which case they may be too many."""
        self._wait = max(0, self._wait - 1)
        if seconds is None:
            return
        cost = self._plain.one(seqs)
        if not looked or not cost or seconds < cost:
            self._plain.observe(seqs, seconds)
        if cost:
            self._earn(_ALLOWED + (1 - min(seconds / cost, _OUTLIER) if looked else 0.0))

    def drafted(self, seqs: int, rows: int, drawn: int, seconds: float | None) -> None:
        """Note a step with drafts, that drew so many tokens."""
        self._since += 1
        if self._since >= _REFRESHED:
            self._since, self._wait = 0, _PLAIN
        if seconds is None:
            return
        counts, cost = self._drafted.observe(rows, seconds), self._plain.one(seqs)
        if cost:
            gain = drawn / seqs - seconds / cost
            self._earn(_ALLOWED + (gain if counts or gain > 0 else _FIRST * gain))

    def _earn(self, steps: float) -> None:
        self._balance = min(_MOST, self._balance + steps)

    def choose(self, gains: np.ndarray) -> np.ndarray:
        """The number of drafts of each sequence, [M]. gains [M, K]: the chance of each draft that it and all
        before it are right, never rising."""
        seqs = len(gains)
        counts, cost = np.zeros(seqs, np.int64), self._plain.one(seqs)
        rows, _ = np.nonzero(gains >= LEAST_GAIN)
        if not cost or not len(rows):
            return counts
        found = gains[gains >= LEAST_GAIN]
        order = np.argsort(-found, kind="stable")
        numbers = self._numbers(seqs, len(found))
        if not len(numbers):
            return counts
        drawn = seqs + np.cumsum(found[order])[numbers - 1]
        seconds = self._drafted.of(seqs + numbers)
        if not seconds.all():
            seconds = cost * _guessed(seqs + numbers, np.array([seqs]))
        speeds = drawn / seconds
        best = len(speeds) - 1 - int(np.argmax(speeds[::-1]))
        if speeds[best] > seqs / cost:
            counts += np.bincount(rows[order[: numbers[best]]], minlength=seqs)
        return counts

    def _numbers(self, seqs: int, drafts: int) -> np.ndarray:
        """Numbers of drafts whose rows fill a step of a common size, or that are all. Steps have few sizes,
        because a graph or a recording is made for each."""
        most = min(drafts, self.most_drafts)
        sizes = self._sizes[(self._sizes > seqs) & (self._sizes <= seqs + most)] - seqs
        return sizes if len(sizes) else np.array([most] if most > 0 else [], np.int64)


def _whole(rows: int) -> int:
    """The number of rows to which a step is filled up."""
    unit = next((unit for most, unit in _UNITS if rows <= most), _LARGEST_UNIT)
    return -(-rows // unit) * unit
