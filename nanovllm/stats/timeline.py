"""Timeline: sums of an engine's steps, in intervals of time, of which there are never many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from nanovllm.batch import StepKind
from nanovllm.engine.stats import StepStats

INTERVAL_SECONDS = 0.1  # of the timeline, at first
MAX_INTERVALS = 600  # above this, pairs of intervals are merged


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
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
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
            if step.num_new_tokens > step.num_seqs:
                self.num_draft_tokens += step.num_new_tokens - step.num_seqs
                self.num_accepted_tokens += step.num_drawn_tokens - step.num_seqs
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


SUMMED = [field.name for field in fields(Interval) if field.name != "index"]


def joined(intervals: Iterable[Interval], index: int = 0) -> Interval:
    """The sum of some intervals."""
    whole = Interval(index)
    for each in intervals:
        for name in SUMMED:
            setattr(whole, name, getattr(whole, name) + getattr(each, name))
    return whole


class Timeline:
    """Counts steps; see `History`."""

    def __init__(self) -> None:
        self.length = INTERVAL_SECONDS  # of an interval
        self.intervals: list[Interval] = []
        self._end = 0.0  # end of the last interval, in seconds since the origin

    def count(self, entry: tuple[float, StepStats]) -> None:
        """Count a step and when it ended, in seconds since the origin of the `History`."""
        now, step = entry
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
