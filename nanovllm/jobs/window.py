"""Window: the order in which the rows of a job run, a window of rows at a time.

Reads tasks while the engine works, and learns from answers. Renders and tokenises nothing, and knows no
engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from sys import getsizeof
from typing import Any

import numpy as np

from nanovllm.jobs.tasks import Task
from nanovllm.order.waiting import Asked, Seen, Slots, Waiting

WINDOW_ROWS = 8192
ROWS_A_SLOT = 16  # of a window, so that the last one is long enough for the longest answers
_AHEAD, _AHEAD_BYTES = 8, 2**16  # of the next window, that are read for each row that runs
WINDOW_BYTES = 64 * 2**20  # of rows in memory, approximately; a window has at least one row
_UNBOUNDED = 2**40  # tokens of an output without a limit


class Window:
    """The tasks of a job: those that begin alike one after the other, long answers first, embeddings last.

    Once all rows are read, what is left runs in the order in which all slots end at about the same time.
    """

    def __init__(self, tasks: Iterator[Task], slots: int, rows: int | None = None) -> None:
        """slots: answers that the engine computes at once. rows: of a window; None: WINDOW_ROWS, or
        ROWS_A_SLOT for each slot, if that is more."""
        self._tasks = tasks
        self._slots = Slots(slots, inf)
        self._rows = max(WINDOW_ROWS, ROWS_A_SLOT * slots) if rows is None else rows
        self._seen = Seen()
        self._present: list[Task] = []  # the window; embeddings behind the others
        self._waiting = self._ordered([])  # of these, those that are no embeddings
        self._embed = 0  # the next embedding, in `_present`
        self._coming: list[Task] = []  # the next window
        self._size = 0  # its bytes
        self._ended = False  # whether all tasks are read
        self._running: dict[int, tuple[Waiting, int]] = {}  # by the row of a task

    def __iter__(self) -> Iterator[Task]:
        """Yield all tasks. For each, a few of the next window are read, so that reading never takes long and
        the rows of the last window are known soon."""
        while True:
            while self._size < WINDOW_BYTES and len(self._coming) < self._rows and self._read():
                pass
            if not self._coming and not self._left:
                return
            self._begin(self._coming)
            while self._left:
                if not self._ended and not self._read_ahead():
                    self._begin([*self._rest(), *self._coming])
                yield self._next()

    def answered(self, row: int, length: int) -> None:
        """Learn from the answer to a task, by its index; `length` in tokens."""
        if (found := self._running.pop(row, None)) is not None:
            waiting, number = found
            waiting.answered(number, length)

    @property
    def _left(self) -> int:
        return len(self._waiting) + len(self._present) - self._embed

    def _read(self) -> bool:
        """Read a task; False if there is none."""
        task = None if self._ended else next(self._tasks, None)
        if task is None:
            self._ended = True
            return False
        self._coming.append(task)
        self._size += size_of(task)
        return True

    def _read_ahead(self) -> bool:
        """Read some tasks of the next window, of which only the last may be large; False at the end."""
        size, rows = min(WINDOW_BYTES, self._size + _AHEAD_BYTES), min(self._rows, len(self._coming) + _AHEAD)
        while self._size < size and len(self._coming) < rows:
            if not self._read():
                return False
        return True

    def _begin(self, tasks: list[Task]) -> None:
        """Make these tasks the window."""
        first = [task for task in tasks if task.kind != "embed"]
        self._embed = len(first)
        self._present = first + [task for task in tasks if task.kind == "embed"]
        self._waiting = self._ordered(first)
        self._coming, self._size = [], 0

    def _rest(self) -> list[Task]:
        """What is left of the window, in the order in which it was read."""
        numbers = sorted(self._waiting.take(len(self._waiting)))
        return [*map(self._present.__getitem__, numbers), *self._present[self._embed :]]

    def _next(self) -> Task:
        if not len(self._waiting):
            self._embed += 1
            return self._present[self._embed - 1]
        [number] = self._waiting.take(1)
        task = self._present[number]
        self._running[task.index] = self._waiting, number
        return task

    def _ordered(self, tasks: list[Task]) -> Waiting:
        sizes = np.zeros(len(tasks), np.int64)  # the memory of rows does not count here
        limits = np.array([output_limit(task) for task in tasks], np.int64)
        copies = np.array([task.params.n for task in tasks], np.int64)
        beginnings = [_beginning(task) for task in tasks]
        return Waiting(beginnings, Asked(sizes, limits, copies), self._slots, self._seen)


def _beginning(task: Task) -> bytes:
    """What is compared of a task: its text, or its token ids."""
    text = task.prompt
    if task.is_chat:
        text = "\0".join(text_of(message["content"]) for message in task.prompt)
    # A row with half of a surrogate pair is refused later, alone.
    return text.encode(errors="surrogatepass") if isinstance(text, str) else bytes(text.tobytes())


def text_of(content: str | list[dict[str, str]] | None) -> str:
    """The text of a message's content, which may have parts."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def output_limit(task: Task) -> int:
    """The tokens of an answer at most."""
    limit = {"choice": 1, "classify": 0}.get(task.kind, task.params.max_tokens)
    return _UNBOUNDED if limit is None else limit


def size_of(task: Task) -> int:
    """The bytes of a task in memory: its row's, or its prompt's, if they are more."""
    parts: Any = task.prompt if task.kind == "embed" else [task.prompt]
    if task.is_chat:
        parts = [text_of(message["content"]) for message in task.prompt]
    return max(task.num_bytes, sum(map(getsizeof, parts)))
