"""The search: successive halving over settings, in bounded time.

Every setting runs three times, the faster half again, and so on; the last ones several times on more rows (K.
Jamieson and A. Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS
2016). Where two passes are so alike that chance costs less than 2 %, two tell the last ones. Asks a function
to measure, and a clock; knows neither models nor processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, variance
from typing import NamedTuple, TypeAlias

from nanovllm.tune.settings import Setting, least_rows

PROBE_ROWS = 8  # of the first trial, which tells how long trials take
_PROBE_SHARE = 0.05  # of the time, for the second one
FINALISTS = 3  # beside the job's own setting
_PASSES = 3  # of a round: so often each setting runs
_QUIET_PASSES = 2  # of the only round of a quiet machine
_CHANCE = 0.02  # two standard errors of a gain, at most, on such a machine
_REPEATS, _MOST_REPEATS = 3, 7  # of the finalists: planned, and while two of them are close
_SLOWER = 3.0  # than the best so far, for each row: such a trial is cut off
_SPARE_SECONDS = 20.0  # of a trial, for a start that takes longer than the first one
_PLANNED = 0.8  # of the time that is left: some settings are slower than the job's own
_LEAD = 1.02  # over the job's own setting: less may be chance
_EARLY_LEAD = 1.1  # before a setting has run in _PASSES passes, where one trial may be disturbed
_MANY_MORE = 1.5  # times as many rows: then the finalists begin again
_CLOSE = 1.03  # finalists that differ by less are tried once more, if there is time


@dataclass(frozen=True, slots=True)
class Measured:
    """A trial that ran. seconds: from the loaded model to the last row, of the pass that counts. others: of
    its other passes. loading: the rest, of its process. read, written: tokens."""

    rows: int
    seconds: float
    loading: float
    read: int
    written: int
    others: float = 0.0

    @property
    def seconds_per_row(self) -> float:
        return self.seconds / self.rows

    @property
    def running(self) -> float:
        """Seconds that grow with the rows: of a pass, and of the one that warms up."""
        return self.seconds + min(self.others, self.seconds)

    @property
    def start(self) -> float:
        """The other seconds."""
        return self.loading + self.others + self.seconds - self.running


@dataclass(frozen=True, slots=True)
class Failed:
    """A trial that did not run, or did not end. is_late: it was ended because its time was over."""

    reason: str
    is_late: bool = False


Outcome: TypeAlias = "Measured | Failed"
# Runs a setting on the first rows of the sample, for some seconds at most.
Measure: TypeAlias = Callable[[Setting, int, float], Outcome]


class Cost(NamedTuple):
    """Seconds of a trial: of its start, and of each row."""

    start: float
    row: float

    def of(self, rows: int) -> float:
        return self.start + rows * self.row


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
    _end: float = 0.0
    _cost: Cost = Cost(0.0, 0.0)  # noqa: RUF009
    _alive: list[Setting] = field(default_factory=list)  # beside the job's own
    _pass: int = 0
    _least: float = math.inf  # seconds of a row of the fastest trial of this pass
    _is_quiet: bool = False  # passes agreed so far, or likely will, as engines are warm
    _runs: dict[Setting, dict[int, float]] = field(default_factory=dict)  # seconds of a row by pass

    def run(self) -> None:
        """Search until the finalists are told apart, or the time is over.

        The first setting is the job's own: it is tried first, and runs in every pass, so that all are
        compared with it on the same rows. A pass has so many rows that each of its settings can show what it
        does (`least_rows`). A setting for which there is no time for that is left out.
        """
        self._end = self.clock() + self.seconds
        if not self._probe():
            return
        waiting = [each for each in self.settings[1:] if not isinstance(self.trials.get(each), Failed)]
        while waiting:
            # The start may have been slow, so there may be time for more than seemed: the best goes on.
            best = self.best()
            kept = [] if best is None or best == self.settings[0] or not self._pass else [best]
            left = self._admit(kept, waiting)
            if len(left) == len(waiting):
                return
            waiting = left
            rows = self._rows()
            if self._halve(rows):
                self._repeat(rows)

    def _admit(self, kept: list[Setting], waiting: list[Setting]) -> list[Setting]:
        """Go on with `kept` and as many others as there is time for; return those that are left out."""
        self._alive, left = [*kept, *waiting], []
        while len(self._alive) > len(kept) and self._rows() < max(map(self._least_rows, self._alive)):
            # Those that need the most rows go first, and of these the ones that differ in most options.
            place = max(range(len(kept), len(self._alive)), key=self._rank_of_need)
            left.append(self._alive.pop(place))
        return [each for each in waiting if each in left]

    def _halve(self, rows: int) -> bool:
        """Run all that are left and keep the faster half, until they are finalists. Return whether there was
        time for that."""
        while len(self._alive) > FINALISTS:
            before, self._is_quiet = self._pass, False
            while self._pass - before < _PASSES and not self._is_quiet:
                if not self._try_all(rows):
                    return False
                self._is_quiet = self._pass - before >= _QUIET_PASSES and self._chance(before) <= _CHANCE
            ranked = sorted(self._alive, key=lambda each: -(self.gain(each) or 0.0))
            self._alive = ranked[: FINALISTS if self._is_quiet else max(FINALISTS, len(ranked) // 2)]
        return True

    def _chance(self, before: int) -> float:
        """Two standard errors of the gains in the passes after pass `before`, which all settings that are
        left share: by how much one may seem faster than it is."""
        own = self._runs.get(self.settings[0], {})
        squares, free, fewest = 0.0, 0, math.inf
        for setting in self._alive:
            runs = self._runs[setting]
            gains = [
                math.log(own[each] / took) for each, took in runs.items() if each > before and each in own
            ]
            fewest = min(fewest, len(gains))
            if len(gains) > 1:
                squares += variance(gains) * (len(gains) - 1)
                free += len(gains) - 1
        return 2 * math.sqrt(squares / free / fewest) if free and fewest else math.inf

    @property
    def left_out(self) -> list[Setting]:
        """The settings for which no time was left."""
        return [each for each in self.settings if each not in self.trials]

    @property
    def own_ran(self) -> bool:
        """Whether the last trial of the job's own setting ran."""
        return isinstance(self.trials.get(self.settings[0]), Measured)

    def best(self) -> Setting | None:
        """The fastest setting that is left, or the job's own, if that is not 2 % slower. None if none ran."""
        own = self.settings[0]
        ran = [each for each in self._alive if self.gain(each) is not None]
        if not ran:
            ran = [each for each in self.trials if self.gain(each) is not None]
        if not ran:
            return None
        best = max(ran, key=lambda each: self.gain(each) or 0.0)
        lead = _LEAD if len(self._runs[best]) >= _PASSES else _EARLY_LEAD
        is_chance = own in self.trials and (self.gain(best) or 0.0) < lead
        return own if is_chance and isinstance(self.trials[own], Measured) else best

    def gain(self, setting: Setting) -> float | None:
        """How many times as fast a setting was as the job's own: the median of the passes of both. Of one
        pass or two by the fastest trial of each, because what disturbs a trial mostly makes it slower. None
        if it did not run. Where the job's own did not run, its rows a second."""
        if not isinstance(self.trials.get(setting), Measured):
            return None
        runs, own = self._runs[setting], self._runs[self.settings[0]] if self.own_ran else {}
        both = [number for number in runs if number in own]
        if len(both) >= _PASSES:
            return median(own[number] / runs[number] for number in both)
        return min((own[number] for number in both), default=1.0) / min(runs.values())

    def seconds_per_row(self, setting: Setting) -> float:
        """Of a setting that ran: the median of its passes; of one pass or two the fastest, as in `gain`."""
        runs = self._runs[setting].values()
        return median(runs) if len(runs) >= _PASSES else min(runs)

    # -- trials ---------------------------------------------------------------------------------------------

    def _probe(self) -> bool:
        """Try the job's own setting, or if it fails the first other one that runs, on a few rows and on more,
        which tells the cost of trials. Return whether one ran."""
        for setting in self.settings:
            few = self._try(setting, min(PROBE_ROWS, self.most_rows))
            if isinstance(few, Measured):
                break
            if self.clock() >= self._end:
                return False
        else:
            return False
        self._cost = Cost(few.start, few.running / few.rows)
        self._is_quiet = few.others > 0
        rows = min(self.most_rows, int(_PROBE_SHARE * self.seconds / self._cost.row))
        more = self._try(setting, rows) if rows >= 2 * few.rows else None
        if isinstance(more, Measured):
            slope, whole = (more.running - few.running) / (more.rows - few.rows), more.running / more.rows
            row = min(whole, max(slope, whole / 2))
            self._cost = Cost(more.start + more.running - more.rows * row, row)
        return True

    def _try_all(self, rows: int) -> bool:
        """A pass: the job's own setting and all that are left. Return whether there was time for all."""
        self._pass += 1
        self._least = math.inf
        own = self.settings[0]
        here = [own, *self._alive] if isinstance(self.trials[own], Measured) else [*self._alive]
        found = []
        for setting in here:
            if self.clock() >= self._end:
                return False
            outcome = self._try(setting, rows)
            if isinstance(outcome, Measured):
                found.append(outcome)
            elif setting in self._alive and isinstance(self.trials.get(setting), Failed):
                self._alive.remove(setting)  # and stays where only the end of the time cut it off
        if found:
            start = max(each.start for each in found)
            self._cost = Cost(start, sum(each.running / each.rows for each in found) / len(found))
        return bool(self._alive)

    def _repeat(self, rows: int) -> None:
        """Try the finalists again and again, each time beside the job's own setting: on more rows than
        before, if there is time for many more."""
        more = self._rows()
        before = self._pass
        rows = more if (is_anew := more >= _MANY_MORE * rows) else rows
        for number in range(_MOST_REPEATS):
            if not self._alive or rows < max(map(self._least_rows, self._alive)):
                return
            if self._end - self.clock() < (len(self._alive) + 1) * self._cost.of(rows):
                return
            if not self._try_all(rows):
                return
            if is_anew and number + 1 == _REPEATS:  # enough to forget those on fewer rows
                for setting in self._alive:
                    runs = self._runs[setting]
                    self._runs[setting] = {each: took for each, took in runs.items() if each > before}
            if number + 1 >= _REPEATS and (self._chance(before) <= _CHANCE or not self._are_close()):
                return

    def _are_close(self) -> bool:
        """Whether the best two, among finalists and the job's own, differ by so little that it may be
        chance."""
        own = [1.0] if self.settings[0] in self._runs else []
        gains = sorted([*own, *(self.gain(each) or 0.0 for each in self._alive)], reverse=True)
        return len(gains) > 1 and gains[0] < _CLOSE * gains[1]

    def _try(self, setting: Setting, rows: int) -> Outcome:
        """Measure a setting, and cut it off where it is much slower than the best so far in its pass."""
        limit = left = self._end - self.clock()
        if self._pass and self._least < math.inf:
            limit = min(left, _SPARE_SECONDS + 2 * self._cost.start + _SLOWER * rows * self._least)
        self.started(setting, rows)
        outcome = self.measure(setting, rows, limit)
        if isinstance(outcome, Failed) and outcome.is_late:
            if limit >= left:  # not slower than others, but the last one
                return outcome
            outcome = Failed(f"{outcome.reason}, more than {_SLOWER:g} times as long as the best")
        self.trials[setting] = outcome
        if isinstance(outcome, Measured):
            self._least = min(self._least, outcome.running / outcome.rows)
            self._runs.setdefault(setting, {})[self._pass] = outcome.seconds_per_row
        return outcome

    # -- rows -----------------------------------------------------------------------------------------------

    def _least_rows(self, setting: Setting) -> int:
        return min(self.most_rows, least_rows(setting))

    def _rank_of_need(self, place: int) -> tuple[int, int, int]:
        setting = self._alive[place]
        return self._least_rows(setting), len(setting), place

    def _rows(self) -> int:
        """The most rows of a trial with which there is time for all passes to come; 0 for none."""
        left = _PLANNED * (self._end - self.clock())
        least, most = 0, self.most_rows
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self._planned(middle) <= left else (least, middle - 1)
        return least

    def _planned(self, rows: int) -> float:
        """The seconds of all passes to come, if each trial has so many rows."""
        trials, here = 0, len(self._alive)
        while here > FINALISTS:
            trials += (_QUIET_PASSES if self._is_quiet else _PASSES) * (here + 1)
            here = FINALISTS if self._is_quiet else max(FINALISTS, here // 2)
        return (trials + _REPEATS * (here + 1)) * self._cost.of(rows)
