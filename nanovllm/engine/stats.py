"""What the engine notes of its work: StepStats for every finished step, and what it answered. Doors count it,
and show the progress of a call.

They hold only values that the host knows without asking the device. Noting a step takes a microsecond, and
what waits to be counted is bounded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any, TypeAlias

import numpy as np

from nanovllm.answers import RequestMetrics, RequestOutput, unlisted
from nanovllm.batch import StepKind
from nanovllm.doors import COUNTS, PROGRESS, Table

# Of an output or a part of one: the request's id, whether this is all, the times, the prompt's length, and of
# each completion its index, why it ended, and the number of its tokens here.
Answered: TypeAlias = "tuple[str, bool, RequestMetrics | None, int, list[tuple[int, str | None, int]]]"
_COUNTS: Table[Any] = Table(COUNTS)
_PROGRESS: Table[Any] = Table(PROGRESS)

MANY = 1024  # entries that wait to be counted


@dataclass(frozen=True, slots=True, eq=False)
class StepStats:
    """One finished step. Running and waiting sequences are counted after it, without those that it ended."""

    kind: StepKind
    num_seqs: int
    num_new_tokens: int  # whose K/V it computed: of prompts; in decode one of each sequence, and drafts
    num_attention_pairs: int  # pairs of a new token and a token that it attends to
    seconds: float  # since the end of the previous step; for the first step, since its request arrived
    num_drawn_tokens: int  # without those of surplus rows
    num_cached_tokens: int  # found in the prefix cache for the sequences admitted for this step
    num_finished: int  # requests
    num_running: int  # sequences
    num_waiting: int  # sequences
    kv_cache_usage: float  # share of the blocks that sequences hold
    num_preemptions: int = 0  # sequences that gave up their blocks for this step


def attention_pairs(query_lens: np.ndarray, context_lens: np.ndarray) -> int:
    """Pairs of a new token and a token it attends to. `query_lens`: new tokens at the end of each context."""
    q, c = query_lens.astype(np.int64), context_lens.astype(np.int64)
    return int((q * c - q * (q - 1) // 2).sum())


class Noted:
    """Entries that wait until somebody asks for their counts, or until there are MANY. One thread adds; any
    thread may ask."""

    def __init__(self, name: str) -> None:
        """name: in `doors.COUNTS`."""
        self._name = name
        self._waiting: deque[Any] = deque()
        self._counts: Any = None  # made for the first entries
        self._lock = threading.RLock()  # a signal handler may ask, too

    def add(self, entries: Iterable[Any]) -> None:
        self._waiting.extend(entries)
        if len(self._waiting) >= MANY:
            with self.counted():
                pass

    @contextmanager
    def counted(self) -> Iterator[Any]:
        """Yield what has counted all entries; it changes only after the block."""
        with self._lock:
            if self._counts is None:
                self._counts = _COUNTS[self._name]()
            while self._waiting:
                self._counts.count(self._waiting.popleft())
            yield self._counts


class History:
    """What an engine has done since its start."""

    def __init__(self) -> None:
        self.origin, self.start_time = perf_counter(), time()  # seconds of two clocks
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.steps = Noted("steps")  # (seconds since the origin, StepStats)
        self.answers = Noted("answers")  # `Answered`

    def step_ended(self, step: StepStats) -> None:
        self.steps.add([(perf_counter() - self.origin, step)])

    def answered(self, outputs: list[RequestOutput]) -> None:
        """Note outputs, whole or in parts."""
        self.answers.add([_answered(output) for output in outputs])


def _answered(output: RequestOutput) -> Answered:
    ends = [(each.index, each.finish_reason, len(each.token_ids)) for each in output.outputs]
    prompt = len(unlisted(output, "prompt_token_ids"))
    return output.request_id, output.finished, output.metrics, prompt, ends


class Progress:
    """Is told of steps and shows nothing."""

    def update(self, stats: StepStats) -> None: ...

    def refused(self, count: int) -> None:
        """Count requests that cannot run as done."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None: ...


def progress_of(total: int, use_tqdm: bool | Callable[..., Any]) -> Progress:
    """What shows the progress of `total` requests: nothing for a single one, unless `use_tqdm` is a class
    like tqdm.tqdm. TypeError for what is no bool and no such class."""
    if not callable(use_tqdm) and not isinstance(use_tqdm, bool):
        raise TypeError(f"use_tqdm must be True, False or a class like tqdm.tqdm, not {use_tqdm!r}")
    if not use_tqdm or (use_tqdm is True and total <= 1):
        return Progress()
    shown: Progress = _PROGRESS["shown"](total, use_tqdm)
    return shown
