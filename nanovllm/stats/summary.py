"""EngineStats: what `llm.stats()` returns of an engine's life so far, and the points of its timeline.

Made of the `History` of `engine/stats.py` and its `Timeline`; counts nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

from nanovllm.engine.executor import Load
from nanovllm.engine.stats import History
from nanovllm.stats.timeline import SUMMED, Interval, joined

# Fields of TimelinePoint that are means over seconds and over steps.
_OVER_SECONDS = {"output_tokens_per_s", "prefill_tokens_per_s"}
_OVER_STEPS = {"step_ms", "batch_size", "num_running", "num_waiting", "kv_cache_usage"}


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
    num_draft_tokens: int = 0  # guessed tokens that decode steps computed, see `speculative_config`
    num_accepted_tokens: int = 0  # of these, the ones that were drawn

    @property
    def prefill_tokens_per_s(self) -> float:
        """Computed prompt tokens per second of prefill; 0 before the first prefill."""
        return self.num_computed_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens per second of decode; 0 before the first decode."""
        return self.num_decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """The share of drafts that were drawn; 0 before the first draft."""
        return self.num_accepted_tokens / (self.num_draft_tokens or 1)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The share of prompt tokens found in the prefix cache; 0 before the first prompt."""
        return self.num_cached_tokens / ((self.num_cached_tokens + self.num_computed_tokens) or 1)

    def timeline(self) -> list[TimelinePoint]:
        """One point for each interval of time in which a step ended, oldest first.

        Intervals are 0.1 s long at first. Their length doubles whenever there are more than 600.
        """
        return list(self.points)

    def _drafts(self) -> str:
        """A line, if there were drafts."""
        if not self.num_draft_tokens:
            return ""
        share = f"{self.num_accepted_tokens:,} accepted ({self.draft_acceptance_rate:.0%})"
        return f"\n  drafts: {counted(self.num_draft_tokens, 'token')}, {share}"

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
{self.decode_batch_size:,.1f} sequences a step{self._drafts()}
  KV cache: {self.kv_cache_usage:.0%} in use, {self.peak_kv_cache_usage:.0%} at most; \
{counted(self.num_preemptions, "preemption")}"""


def _point(sums: Interval, length: float) -> TimelinePoint:
    """The point of the timeline of an interval of `length` seconds."""
    steps = sums.num_prefill_steps + sums.num_decode_steps
    seconds = sums.prefill_seconds + sums.decode_seconds
    return TimelinePoint(
        time=sums.index * length,
        seconds=seconds,
        num_steps=steps,
        step_ms=seconds / steps * 1e3,
        output_tokens_per_s=sums.num_output_tokens / seconds,
        prefill_tokens_per_s=sums.num_computed_tokens / seconds,
        batch_size=(sums.num_prefill_rows + sums.num_decode_rows) / steps,
        num_running=sums.running / steps,
        num_waiting=sums.waiting / steps,
        kv_cache_usage=sums.usage / steps,
        **_sums_of(sums, TimelinePoint),
    )


def _sums_of(sums: Interval, kind: type[TimelinePoint | EngineStats]) -> dict[str, Any]:
    """The sums that are fields of `kind`."""
    return {each.name: getattr(sums, each.name) for each in fields(kind) if each.name in SUMMED}


def summary(history: History, load: Load) -> EngineStats:
    """The totals so far. load: the current one."""
    with history.steps.counted() as timeline:
        intervals, length = list(timeline.intervals), timeline.length
        sums = joined(intervals)
        points = tuple(_point(e, length) for e in intervals if e.prefill_seconds + e.decode_seconds)
    return EngineStats(
        start_time=history.start_time,
        uptime=perf_counter() - history.origin,
        num_requests=history.num_requests,
        num_unfinished_requests=load.num_requests,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_prompt_tokens=history.num_prompt_tokens,
        decode_batch_size=sums.num_decode_rows / (sums.num_decode_steps or 1),
        kv_cache_usage=load.kv_cache_usage,
        peak_kv_cache_usage=load.peak_kv_cache_usage,
        points=points,
        interval=length,
        **_sums_of(sums, EngineStats),
    )


def coarser(points: Iterable[TimelinePoint], length: float) -> list[TimelinePoint]:
    """The timeline with one point for each interval of `length` seconds."""
    groups: dict[int, list[TimelinePoint]] = {}
    for each in points:
        groups.setdefault(int(each.time / length), []).append(each)
    return [_joined_points(group, index * length) for index, group in groups.items()]


def _joined_points(group: list[TimelinePoint], time: float) -> TimelinePoint:
    values: dict[str, Any] = {}
    for name in (each.name for each in fields(TimelinePoint)):
        weight = "seconds" if name in _OVER_SECONDS else "num_steps" if name in _OVER_STEPS else None
        if weight is None:
            values[name] = sum(getattr(each, name) for each in group)
        else:
            total = sum(getattr(each, weight) for each in group)
            values[name] = sum(getattr(each, name) * getattr(each, weight) for each in group) / total
    return TimelinePoint(**values | {"time": time})


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
