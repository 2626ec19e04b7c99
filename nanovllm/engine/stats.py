"""The engine's statistics: StepStats for every finished step, EngineStats for its life so far.

They hold only values that the host knows without asking the device. Recording a step takes a few
microseconds, and the number of stored intervals is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from time import perf_counter, time
from typing import Any

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


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """The steps that ended within one interval. Rates are per second of steps, without idle time."""

    time: float  # start of the interval, in seconds since the engine was ready
    seconds: float  # sum over its steps
    num_steps: int
    step_ms: float  # of the mean step
    output_tokens_per_s: float
    prefill_tokens_per_s: float  # prompt tokens that were computed
    batch_size: float  # sequences of the mean step
    num_running: float  # sequences, after the mean step
    num_waiting: float  # sequences, after the mean step
    kv_cache_usage: float  # share of the blocks that sequences hold, after the mean step
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    num_preemptions: int
    num_finished_requests: int
    num_computed_tokens: int  # prompt tokens that were computed
    num_attention_pairs: int  # pairs of a computed prompt token and a token that it attends to
    num_decode_steps: int
    num_decode_rows: int  # sum of sequences over decode steps
    num_context_tokens: int  # sum of context lengths over decode rows


@dataclass(slots=True, eq=False)
class _Interval:
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

    def point(self, length: float) -> TimelinePoint:
        """The point of the timeline, for intervals of `length` seconds."""
        steps = self.num_prefill_steps + self.num_decode_steps
        seconds = self.prefill_seconds + self.decode_seconds
        return TimelinePoint(
            time=self.index * length,
            seconds=seconds,
            num_steps=steps,
            step_ms=seconds / steps * 1e3,
            output_tokens_per_s=self.num_output_tokens / seconds,
            prefill_tokens_per_s=self.num_computed_tokens / seconds,
            batch_size=(self.num_prefill_rows + self.num_decode_rows) / steps,
            num_running=self.running / steps,
            num_waiting=self.waiting / steps,
            kv_cache_usage=self.usage / steps,
            **self.sums_of(TimelinePoint),
        )

    def sums_of(self, kind: type[TimelinePoint | EngineStats]) -> dict[str, Any]:
        """The sums that are fields of `kind`."""
        return {each.name: getattr(self, each.name) for each in fields(kind) if each.name in _SUMMED}


def pairs_of(batch: Batch) -> int:
    """The pairs of a step; in decode each row has one new token."""
    if batch.kind is StepKind.DECODE:
        return int(batch.context_lens.sum())
    return attention_pairs(batch.query_lens, batch.context_lens)


def attention_pairs(query_lens: np.ndarray, context_lens: np.ndarray) -> int:
    """Pairs of a new token and a token it attends to. `query_lens`: new tokens at the end of each context."""
    q, c = query_lens.astype(np.int64), context_lens.astype(np.int64)
    return int((q * c - q * (q - 1) // 2).sum())


_SUMMED = [field.name for field in fields(_Interval) if field.name != "index"]


def joined(intervals: Iterable[_Interval], index: int = 0) -> _Interval:
    """The sum of some intervals."""
    whole = _Interval(index)
    for each in intervals:
        for name in _SUMMED:
            setattr(whole, name, getattr(whole, name) + getattr(each, name))
    return whole


@dataclass(frozen=True)
class EngineStats:
    """Totals of an engine's life, up to the call of `stats()`. Seconds are the time of steps."""

    start_time: float  # when the engine was ready, in seconds since 1970
    uptime: float  # seconds since then
    num_requests: int  # queued so far
    num_finished_requests: int  # neither aborted nor dropped by an exception
    num_unfinished_requests: int  # now
    num_running: int  # sequences, now
    num_waiting: int  # sequences, now
    num_prompt_tokens: int  # of the requests
    num_output_tokens: int
    num_prefill_steps: int
    prefill_seconds: float
    num_computed_tokens: int  # by prefill, including tokens computed again after a preemption
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    num_decode_steps: int
    decode_seconds: float
    num_decoded_tokens: int  # output tokens except first tokens, which prefill draws
    decode_batch_size: float  # sequences of the mean decode step
    num_preemptions: int
    kv_cache_usage: float  # share of the blocks that sequences hold, now
    peak_kv_cache_usage: float
    points: tuple[TimelinePoint, ...]
    interval: float  # seconds of a point

    @property
    def prefill_tokens_per_s(self) -> float:
        """Computed prompt tokens per second of prefill; 0 before the first prefill."""
        return self.num_computed_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens per second of decode; 0 before the first decode."""
        return self.num_decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The share of prompt tokens found in the prefix cache; 0 before the first prompt."""
        return self.num_cached_tokens / ((self.num_cached_tokens + self.num_computed_tokens) or 1)

    def timeline(self) -> list[TimelinePoint]:
        """One point for each interval of time in which a step ended, oldest first.

        Intervals are 0.1 s long at first. Their length doubles whenever there are more than 600.
        """
        return list(self.points)

    def __repr__(self) -> str:
        return f"""\
EngineStats after {self.uptime:,.1f} s
  requests: {self.num_requests:,}, {self.num_finished_requests:,} finished, \
{self.num_unfinished_requests:,} unfinished ({counted(self.num_running, "sequence")} running, \
{self.num_waiting:,} waiting)
  tokens: {self.num_prompt_tokens:,} of prompts, {self.num_output_tokens:,} of outputs
  prefill: {counted(self.num_prefill_steps, "step")}, {self.prefill_seconds:,.2f} s, \
{counted(self.num_computed_tokens, "token")}, {short(self.prefill_tokens_per_s)} tok/s; \
{self.num_cached_tokens:,} more ({self.prefix_cache_hit_rate:.0%}) from the prefix cache
  decode: {counted(self.num_decode_steps, "step")}, {self.decode_seconds:,.2f} s, \
{counted(self.num_decoded_tokens, "token")}, {short(self.decode_tokens_per_s)} tok/s, \
{self.decode_batch_size:,.1f} sequences a step
  KV cache: {self.kv_cache_usage:.0%} in use, {self.peak_kv_cache_usage:.0%} at most; \
{counted(self.num_preemptions, "preemption")}"""


class Counters:
    """Counts steps and requests. One thread counts; any thread may take a snapshot."""

    def __init__(self) -> None:
        self._origin, self._start_time = perf_counter(), time()
        self._length = INTERVAL_SECONDS
        self._intervals: list[_Interval] = []
        self._end = 0.0  # end of the last interval, in seconds since the origin
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._peak_usage = 0.0

    def queued(self, num_prompt_tokens: int) -> None:
        self._num_requests += 1
        self._num_prompt_tokens += num_prompt_tokens

    def planned(self, kv_cache_usage: float) -> None:
        """Record the KV cache usage after a step is planned, when it is highest."""
        self._peak_usage = max(self._peak_usage, kv_cache_usage)

    def record(self, step: StepStats, now: float) -> None:
        """Count a step that ended at `now` (perf_counter)."""
        now -= self._origin
        if now >= self._end:
            self._begin_interval(now)
        self._intervals[-1].add(step)

    def _begin_interval(self, now: float) -> None:
        intervals = self._intervals
        if len(intervals) >= MAX_INTERVALS:
            while len(intervals) > MAX_INTERVALS // 2:
                self._length *= 2
                groups: dict[int, list[_Interval]] = {}
                for each in intervals:
                    groups.setdefault(each.index // 2, []).append(each)
                intervals = [joined(group, index) for index, group in groups.items()]
        index = int(now / self._length)
        if not intervals or intervals[-1].index != index:
            intervals = [*intervals, _Interval(index)]
        self._intervals, self._end = intervals, (index + 1) * self._length

    def snapshot(self, requests: int, running: int, waiting: int, kv_cache_usage: float) -> EngineStats:
        """The totals so far. The arguments are the current numbers of unfinished requests and of running and
        waiting sequences, and the share of the blocks that they hold."""
        intervals, length = list(self._intervals), self._length
        sums = joined(intervals)
        return EngineStats(
            start_time=self._start_time,
            uptime=perf_counter() - self._origin,
            num_requests=self._num_requests,
            num_unfinished_requests=requests,
            num_running=running,
            num_waiting=waiting,
            num_prompt_tokens=self._num_prompt_tokens,
            decode_batch_size=sums.num_decode_rows / (sums.num_decode_steps or 1),
            kv_cache_usage=kv_cache_usage,
            peak_kv_cache_usage=self._peak_usage,
            points=tuple(e.point(length) for e in intervals if e.prefill_seconds + e.decode_seconds),
            interval=length,
            **sums.sums_of(EngineStats),
        )


def counted(number: int, noun: str) -> str:
    """A number and its noun: 1 row, 2,000 rows."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def short(rate: float) -> str:
    """A rate in at most five characters: 7.53, 981, 4.57k, 123k, 1.23M."""
    for unit in ("", "k", "M"):
        if rate < 999.5:
            return f"{rate:#.3g}".rstrip(".") + unit
        rate /= 1000
    return f"{rate:.0f}G"
