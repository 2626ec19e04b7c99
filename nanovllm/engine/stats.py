"""What the engine counts: StepStats for every finished step, and sums of intervals. `stats/` sums these up.

They hold only values that the host knows without asking the device. Recording a step takes a few
microseconds, and the number of stored intervals is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from time import perf_counter, time

import numpy as np

from nanovllm.batch import Batch, StepKind

INTERVAL_SECONDS = 0.1  # of the timeline, at first
MAX_INTERVALS = 600  # above this, pairs of intervals are merged


@dataclass(frozen=True, slots=True, eq=False)
class StepStats:
    """One finished step. Running and waiting sequences are counted after it, without those that it ended."""

    kind: StepKind
    num_seqs: int
    num_new_tokens: int  # whose K/V it computed: prompts in prefill, one for each sequence in decode
    num_attention_pairs: int  # pairs of a new token and a token that it attends to
    seconds: float  # since the end of the previous step; for the first step, since its request arrived
    num_drawn_tokens: int  # without those of surplus rows
    num_cached_tokens: int  # found in the prefix cache for the sequences admitted for this step
    num_finished: int  # requests
    num_running: int  # sequences
    num_waiting: int  # sequences
    kv_cache_usage: float  # share of the blocks that sequences hold
    num_preemptions: int = 0  # sequences that gave up their blocks for this step


@dataclass(slots=True, eq=False)
class Interval:
    """Sums over the steps that ended within an interval."""

    index: int  # start time divided by the length of an interval
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_decoded_tokens: int = 0
    num_finished_requests: int = 0
    num_preemptions: int = 0
    num_attention_pairs: int = 0
    num_context_tokens: int = 0
    num_decode_rows: int = 0
    num_prefill_rows: int = 0
    running: int = 0  # this and the next fields are summed after each step
    waiting: int = 0
    usage: float = 0.0

    def add(self, step: StepStats) -> None:
        if step.kind is StepKind.DECODE:
            self.num_decode_steps += 1
            self.decode_seconds += step.seconds
            self.num_decoded_tokens += step.num_drawn_tokens
            self.num_decode_rows += step.num_seqs
            self.num_context_tokens += step.num_attention_pairs
        else:
            self.num_prefill_steps += 1
            self.prefill_seconds += step.seconds
            self.num_computed_tokens += step.num_new_tokens
            self.num_cached_tokens += step.num_cached_tokens
            self.num_prefill_rows += step.num_seqs
            self.num_attention_pairs += step.num_attention_pairs
        self.num_output_tokens += step.num_drawn_tokens
        self.num_finished_requests += step.num_finished
        self.num_preemptions += step.num_preemptions
        self.running += step.num_running
        self.waiting += step.num_waiting
        self.usage += step.kv_cache_usage


def pairs_of(batch: Batch) -> int:
    """The pairs of a step; in decode each row has one new token."""
    if batch.kind is StepKind.DECODE:
        return int(batch.context_lens.sum())
    return attention_pairs(batch.query_lens, batch.context_lens)


def attention_pairs(query_lens: np.ndarray, context_lens: np.ndarray) -> int:
    """Pairs of a new token and a token it attends to. `query_lens`: new tokens at the end of each context."""
    q, c = query_lens.astype(np.int64), context_lens.astype(np.int64)
    return int((q * c - q * (q - 1) // 2).sum())


SUMMED = [field.name for field in fields(Interval) if field.name != "index"]


def joined(intervals: Iterable[Interval], index: int = 0) -> Interval:
    """The sum of some intervals."""
    whole = Interval(index)
    for each in intervals:
        for name in SUMMED:
            setattr(whole, name, getattr(whole, name) + getattr(each, name))
    return whole


class Counters:
    """Counts steps and requests. One thread counts; any thread may read."""

    def __init__(self) -> None:
        self.origin, self.start_time = perf_counter(), time()  # seconds of two clocks
        self.length = INTERVAL_SECONDS  # of an interval
        self.intervals: list[Interval] = []
        self._end = 0.0  # end of the last interval, in seconds since the origin
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.peak_usage = 0.0

    def queued(self, num_prompt_tokens: int) -> None:
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens

    def planned(self, kv_cache_usage: float) -> None:
        """Record the KV cache usage after a step is planned, when it is highest."""
        self.peak_usage = max(self.peak_usage, kv_cache_usage)

    def record(self, step: StepStats, now: float) -> None:
        """Count a step that ended at `now` (perf_counter)."""
        now -= self.origin
        if now >= self._end:
            self._begin_interval(now)
        self.intervals[-1].add(step)

    def _begin_interval(self, now: float) -> None:
        intervals = self.intervals
        if len(intervals) >= MAX_INTERVALS:
            while len(intervals) > MAX_INTERVALS // 2:
                self.length *= 2
                groups: dict[int, list[Interval]] = {}
                for each in intervals:
                    groups.setdefault(each.index // 2, []).append(each)
                intervals = [joined(group, index) for index, group in groups.items()]
        index = int(now / self.length)
        if not intervals or intervals[-1].index != index:
            intervals = [*intervals, Interval(index)]
        self.intervals, self._end = intervals, (index + 1) * self.length


def short(rate: float) -> str:
    """A rate in at most five characters: 7.53, 981, 4.57k, 123k, 1.23M."""
    for unit in ("", "k", "M"):
        if rate < 999.5:
            return f"{rate:#.3g}".rstrip(".") + unit
        rate /= 1000
    return f"{rate:.0f}G"
