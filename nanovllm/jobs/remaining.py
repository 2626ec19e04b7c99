"""The time that a job still takes, from the tokens that are left and the cost of a token.

Holds sums, and no row; knows neither clocks nor engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_FEW = 0.1  # of the tokens that are left to read: so few to draw that their unknown cost matters little


class Work(NamedTuple):
    """What a row asks for: about the tokens of its prompt, and the most of its answers; None: not limited."""

    size: float
    most: int | None


class Speed(NamedTuple):
    """Sums up to a time: rows, tokens read from prompts and drawn, and the seconds of steps for each."""

    time: float
    rows: int = 0
    read: int = 0
    drawn: int = 0
    prefill: float = 0.0
    decode: float = 0.0


class Remaining:
    """Estimates how long a job will take, from the tokens that are left and the cost of a token.

    A prompt has as many tokens for its size as those of the rows that ended, and of the first prompts, which
    are counted with their template. An answer takes the share of its limit that those before took; without a
    limit it is as long as theirs. Longer answers that run double. Where rows ask for more than they seem to,
    as those with choices do, the rows that are not planned yet ask for as much more as those that are.
    """

    def __init__(self) -> None:
        self._asked, self._ended = _Sums(), _Sums()
        self._guessed, self._planned = _Sums(), _Sums()  # the same rows, before they were planned and after
        self._read = self._drawn = 0  # tokens of rows that ended
        self._of_unlimited = 0  # drawn tokens of rows without a limit
        self._counted = (0.0, 0)  # the size of the first prompts, and their tokens

    def count(self, size: float, tokens: int) -> None:
        """Take in the tokens of some first prompts, which have not ended; `size` as `Work` has it."""
        self._counted = size, tokens

    def ask(self, work: Work) -> None:
        """Count a row that was read."""
        self._asked.add(work)

    def plan(self, before: Work, work: Work) -> None:
        """Count what a row asks for, now that it is known better than `before`."""
        self._guessed.add(before)
        self._planned.add(work)
        self._asked.add(before, -1)
        self._asked.add(work)

    def refuse(self, work: Work) -> None:
        """Count a row as if it had not been read."""
        self._asked.add(work, -1)

    def end(self, work: Work, read: int, drawn: int) -> None:
        """Count a row that has its answer, with its tokens."""
        self._ended.add(work)
        self._read += read
        self._drawn += drawn
        self._of_unlimited += drawn if work.most is None else 0

    def seconds(self, now: Speed, then: Speed, begin: float, more: float, num_running: int) -> float | None:
        """The seconds that are left at `now`; None if nothing tells.

        then: an earlier time, from which on the cost of a token is taken. begin: of the first step. more: how
        many times as many rows are still unread as were read.
        """
        asked, ended = self._all_planned(), self._ended
        if not now.prefill + now.decode or (asked.unlimited and not ended.unlimited):
            return None
        size, tokens = ended.size + self._counted[0], self._read + self._counted[1]
        per_size = tokens / size if size else 1.0
        share = (self._drawn - self._of_unlimited) / ended.most if ended.most else 1.0
        length = self._of_unlimited / ended.unlimited if ended.unlimited else 0.0
        to_read = max(0.0, per_size * asked.size * (1 + more) - now.read)
        most = asked.most - ended.most  # of rows that were read
        open_tokens = share * most + length * (asked.unlimited - ended.unlimited)
        running = now.drawn - self._drawn
        left = open_tokens - running
        if left <= 0:  # the rows that run are longer than those that ended
            left = max(float(num_running), min(running, most - running))
        to_draw = left + more * (share * asked.most + length * asked.unlimited)
        scale = (now.time - begin) / (now.prefill + now.decode)
        to_read_cost = _cost(now, then, "read", "prefill")
        if now.decode:
            to_draw_cost = _cost(now, then, "drawn", "decode")
        elif to_draw <= _FEW * to_read:
            to_draw_cost = to_read_cost  # at least
        else:
            return None
        return scale * (to_read * to_read_cost + to_draw * to_draw_cost)

    def _all_planned(self) -> _Sums:
        """What all rows that were read will have asked for."""
        asked, guessed, planned = self._asked, self._guessed, self._planned
        larger = planned.size / guessed.size if guessed.size else 1.0
        more = planned.most / guessed.most if guessed.most else 1.0
        rest, most = (
            asked.size - planned.size,
            asked.most - planned.most,
        )  # below 0: planned rows were refused
        return _Sums(
            planned.size + rest * (larger if rest > 0 else 1.0),
            planned.most + most * (more if most > 0 else 1.0),
            asked.unlimited,
        )


@dataclass
class _Sums:  # of the work of rows
    size: float = 0.0
    most: float = 0
    unlimited: int = 0

    def add(self, work: Work, sign: int = 1) -> None:
        self.size += sign * work.size
        self.most += sign * (work.most or 0)
        self.unlimited += sign * (work.most is None)


def _cost(now: Speed, then: Speed, tokens: str, seconds: str) -> float:
    """The seconds of a token since `then`, or since the start."""
    for before in (then, Speed(0.0)):
        if number := getattr(now, tokens) - getattr(before, tokens):
            return (getattr(now, seconds) - getattr(before, seconds)) / number
    return 0.0
