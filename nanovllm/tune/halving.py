"""The search: successive halving over settings, in bounded time.

Every setting runs a few rows, the faster half runs twice as many, and so on (K. Jamieson and A. Talwalkar,
"Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016). Asks a function to
measure, and a clock; knows neither models nor processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from nanovllm.tune.settings import Setting

LEAST_ROWS = 8  # of a trial: fewer say nothing
_SLOWER = 3.0  # than the best so far, for each row: such a trial is cut off
_SPARE_SECONDS = 20.0  # of a trial, for a start that takes longer than the first one
_PLANNED = 0.8  # of the time that is left: some settings are slower than the job's own
_LEAD = 1.03  # over the job's own setting: less may be chance


@dataclass(frozen=True, slots=True)
class Measured:
    """A trial that ran. seconds: from the loaded model to the last row. loading: the others, of its process.
    read, written: tokens."""

    rows: int
    seconds: float
    loading: float
    read: int
    written: int

    @property
    def seconds_per_row(self) -> float:
        return self.seconds / self.rows


@dataclass(frozen=True, slots=True)
class Failed:
    """A trial that did not run, or did not end. is_late: it was ended because its time was over."""

    reason: str
    is_late: bool = False


Outcome: TypeAlias = "Measured | Failed"
# Runs a setting on the first rows of the sample, for some seconds at most.
Measure: TypeAlias = Callable[[Setting, int, float], Outcome]


@dataclass
class Search:
    """What a search has found so far; `run` may be interrupted at any time.

    trials: the last outcome of each setting.
    """

    settings: Sequence[Setting]
    measure: Measure
    clock: Callable[[], float]
    seconds: float
    most_rows: int
    started: Callable[[Setting, int], object] = lambda setting, rows: None
    trials: dict[Setting, Outcome] = field(default_factory=dict)
    _alive: list[Setting] = field(default_factory=list)  # beside the job's own
    _round: int = 0
    _rounds_of: dict[Setting, int] = field(default_factory=dict)  # in which their last outcome came
    _own: dict[int, Measured] = field(default_factory=dict)  # the job's own setting, by round

    def run(self) -> None:
        """Search until one setting is left beside the job's own, or the time is over.

        The first setting is the job's own: it is tried first, which tells how long trials take, and runs in
        every round, so that all are compared with it on the same rows.
        """
        end = self.clock() + self.seconds
        own = self.settings[0]
        others = list(self.settings[1:])
        outcome = self._try(own, min(LEAST_ROWS, self.most_rows), self.seconds)
        first = outcome if isinstance(outcome, Measured) else self._first_that_runs(others, end)
        if first is None:
            return
        rounds = self._rounds(len(others))
        while others and not self._fits(len(others), rounds, end, first):
            others.pop()
            rounds = self._rounds(len(others))
        self._alive = others
        for left in range(rounds, 0, -1):
            alive = [each for each in others if not isinstance(self.trials.get(each), Failed)]
            found = self.trials.get(own)
            first = found if isinstance(found, Measured) else first  # its last trial tells best
            here = [own, *alive] if isinstance(found, Measured) else alive
            rows = self._rows(len(here), left, end, first) if alive else None
            if rows is None:
                return
            self._round += 1
            for setting in here:
                if self.clock() >= end:
                    return
                self._try(setting, rows, end - self.clock())
            ranked = sorted(alive, key=self._rank)
            self._alive = others = ranked[: max(1, len(ranked) // 2)]
            if len(alive) == 1 and rows == self.most_rows:
                return

    @property
    def left_out(self) -> list[Setting]:
        """The settings for which no time was left."""
        return [each for each in self.settings if each not in self.trials]

    def best(self) -> Setting | None:
        """The fastest setting that is left, or the job's own, if that is not 3 % slower. None if none ran."""
        own = self.settings[0]
        ran = [each for each in self._alive if self.gain(each) is not None]
        if not ran:
            ran = [each for each in self.trials if self.gain(each) is not None]
        if not ran:
            return None
        best = max(ran, key=lambda each: self.gain(each) or 0.0)
        is_chance = own in self.trials and (self.gain(best) or 0.0) < _LEAD
        return own if is_chance and isinstance(self.trials[own], Measured) else best

    def gain(self, setting: Setting) -> float | None:
        """How many times as fast a setting was as the job's own in the same round; None if it did not run.
        Where the job's own never ran, its rows a second."""
        outcome = self.trials.get(setting)
        if not isinstance(outcome, Measured):
            return None
        own = self._own.get(self._rounds_of[setting])
        return (1.0 if own is None else own.seconds_per_row) / outcome.seconds_per_row

    def _first_that_runs(self, others: list[Setting], end: float) -> Measured | None:
        """The first outcome of the other settings, if the job's own fails."""
        for setting in list(others):
            left = end - self.clock()
            if left <= 0:
                return None
            outcome = self._try(setting, min(LEAST_ROWS, self.most_rows), left)
            if isinstance(outcome, Measured):
                return outcome
            others.remove(setting)
        return None

    def _try(self, setting: Setting, rows: int, left: float) -> Outcome:
        """Measure a setting, and cut it off where it is much slower than the best so far."""
        limit = left
        ran = [found for found in self.trials.values() if isinstance(found, Measured)]
        if ran:
            fastest = min(found.seconds_per_row for found in ran)
            loading = max(found.loading for found in ran)
            limit = min(left, _SPARE_SECONDS + 2 * loading + _SLOWER * rows * fastest)
        self.started(setting, rows)
        outcome = self.measure(setting, rows, limit)
        if isinstance(outcome, Failed) and outcome.is_late:
            if limit >= left:  # not slower than others, but the last one
                return outcome
            outcome = Failed(f"{outcome.reason}, more than {_SLOWER:g} times as long as the best")
        self.trials[setting], self._rounds_of[setting] = outcome, self._round
        if setting == self.settings[0] and isinstance(outcome, Measured):
            self._own[self._round] = outcome
        return outcome

    @staticmethod
    def _rounds(num_others: int) -> int:
        return max(1, math.ceil(math.log2(max(1, num_others))) + 1) if num_others else 0

    def _fits(self, num_others: int, rounds: int, end: float, first: Measured) -> bool:
        """Whether all rounds can have LEAST_ROWS rows or more."""
        return self._affordable(num_others + 1, rounds, end, first) >= min(LEAST_ROWS, self.most_rows)

    def _rows(self, num_here: int, rounds: int, end: float, first: Measured) -> int | None:
        """The rows of each trial in this round; None if there is no time for a useful one."""
        rows = min(self.most_rows, int(self._affordable(num_here, rounds, end, first)))
        return rows if rows >= min(LEAST_ROWS, self.most_rows) else None

    def _affordable(self, num_here: int, rounds: int, end: float, first: Measured) -> float:
        """The rows of a trial in a round, if all rounds that are left take equally long, but for loading."""
        loading, here = 0.0, num_here
        for _ in range(rounds):
            loading += here * first.loading
            here = 1 + max(1, (here - 1) // 2)
        left = _PLANNED * (end - self.clock()) - loading
        return left / (rounds * num_here * first.seconds_per_row)

    def _rank(self, setting: Setting) -> float:
        outcome = self.trials.get(setting)
        return outcome.seconds_per_row if isinstance(outcome, Measured) else math.inf
