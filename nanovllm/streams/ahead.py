"""Ahead: how many unfinished requests a stream has, and how many prompts it reads at once.

On a CPU it begins with few and goes up while that pays: a CPU reads prompts about as slowly as it writes, and
prompts run first, so with many at once the first answer of a job with short answers would come only after all
of them. Decides numbers; queues nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter

from nanovllm.answers import RequestOutput, unlisted

FIRST = 16  # requests at once on a CPU, for each replica
_SECONDS = 4.0  # in which as many answers should end as there are requests
_PART = 8  # one of so many requests that are missing is read between two steps
_SHORT = 64  # tokens of a prompt's answers, on average
_TOKENS = 4  # read in the time in which a CPU writes one with few rows, about


class Ahead:
    """The most unfinished requests of a stream, as `limit`."""

    def __init__(self, slots: int, first: int | None, clock: Callable[[], float] = perf_counter) -> None:
        """slots: rows that run at once. first: requests at the beginning; None, as on a GPU: twice `slots`,
        and three times while answers are short. clock: seconds."""
        self._slots, self._grows = slots, first is not None
        self.most = 2 * slots
        self.limit = self.most if first is None else min(first, self.most)
        self._clock = clock
        self._begin: float | None = None
        self._ended = self._read = self._drawn = 0

    def portion(self, unfinished: int) -> int:
        """The prompts to read now, beside so many unfinished requests.

        While the limit is low, a quarter of it, so that a step has some. Else a part of the requests that are
        missing, so that reading takes less time than a step; more while few wait.
        """
        missing, part = self.limit - unfinished, self.limit // 4
        if self.limit < self.most:
            return max(1, part) if missing >= max(1, part) else 0
        return min(max(-(-missing // _PART), missing - part), max(1, self.limit // 8))

    def answered(self, outputs: Iterable[RequestOutput]) -> None:
        """Count answers, and change the limit.

        A low one goes up as long as answers end quickly, and where they are long beside their prompts,
        because more rows then share each pass through the weights. On a GPU it is higher while answers are
        short, because many end at the same time, and lower while they are long, because earlier answers then
        help to order the prompts that are not read yet.
        """
        now = self._clock()
        if self._begin is None:
            self._begin = now
        for output in outputs:
            if not output.finished:
                continue
            self._ended += 1
            self._read += len(unlisted(output, "prompt_token_ids")) - (output.num_cached_tokens or 0)
            self._drawn += sum([len(unlisted(each, "token_ids")) for each in output.outputs])
        if self._ended < (self.limit if self._grows else 4 * self._slots):
            return
        if not self._grows:
            self.limit = self.most + self._slots * (self._drawn <= _SHORT * self._ended)
        elif now - self._begin < _SECONDS or _TOKENS * self._drawn > self._read:
            self.limit = min(2 * self.limit, self.most)
        self._begin, self._ended, self._read, self._drawn = now, 0, 0, 0
