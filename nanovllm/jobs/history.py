"""The statistics of a job over all of its runs, kept in its journal. Measures nothing itself.

A run that ends by `kill -9` leaves those of its last save. The numbers of answers and of their tokens come
from the output, so each answer counts once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from time import monotonic
from typing import Any

from nanovllm.engine.stats import EngineStats, TimelinePoint
from nanovllm.jobs.journal import Journal
from nanovllm.jobs.output import Output

SAVE_SECONDS = 30.0
MAX_POINTS = 200  # of the timeline that the journal holds
# Fields of EngineStats that add up, and those of TimelinePoint that are means over seconds and over steps.
ADDED = {"uptime", "prefill_seconds", "decode_seconds", "num_prefill_steps", "num_decode_steps"}
ADDED |= {"num_computed_tokens", "num_cached_tokens", "num_decoded_tokens", "num_preemptions"}
OVER_SECONDS = {"output_tokens_per_s", "prefill_tokens_per_s"}
OVER_STEPS = {"step_ms", "batch_size", "num_running", "num_waiting", "kv_cache_usage"}


class History:
    """The statistics of earlier runs, to which those of this run are added.

    marks: where the job was resumed, in seconds of its runs, without the time between them.
    """

    def __init__(self, journal: Journal, output: Output, clock: Callable[[], float] = monotonic) -> None:
        """Read the statistics of earlier runs, if the output has lines of one."""
        self._journal, self._output, self._clock = journal, output, clock
        self._due = clock() + SAVE_SECONDS
        found = journal.state.get("statistics") if output.finished or output.num_dropped else None
        self._before = None if found is None else _read(found["stats"])
        self.marks: list[float] = [] if found is None else found["resumed_at"]
        if output.finished or output.num_dropped:
            self.marks = [*self.marks, 0.0 if self._before is None else self._before.uptime]

    def whole(self, stats: EngineStats) -> EngineStats:
        """The statistics of all runs; `stats` are those of this one. Its time axis leaves out pauses."""
        output = self._output
        counts: dict[str, Any] = {
            "num_requests": output.num_requests + stats.num_unfinished_requests,
            "num_finished_requests": output.num_requests,
            "num_prompt_tokens": output.prompt_tokens,
            "num_output_tokens": output.output_tokens,
        }
        if self._before is None:
            return replace(stats, **counts) if self.marks else stats
        before = self._before
        shifted = [replace(each, time=each.time + before.uptime) for each in stats.points]
        steps = before.num_decode_steps + stats.num_decode_steps
        rows = sum(each.decode_batch_size * each.num_decode_steps for each in (before, stats))
        return replace(
            stats,
            **{name: getattr(before, name) + getattr(stats, name) for name in ADDED},
            **counts,
            start_time=stats.start_time - before.uptime,
            peak_kv_cache_usage=max(before.peak_kv_cache_usage, stats.peak_kv_cache_usage),
            decode_batch_size=rows / (steps or 1),
            points=(*before.points, *shifted),
            interval=max(before.interval, stats.interval),
        )

    def save_when_due(self, stats: Callable[[], EngineStats]) -> None:
        if self._clock() >= self._due:
            self.save(stats())

    def save(self, stats: EngineStats) -> None:
        """Write the statistics of all runs into the journal, if the disk allows it."""
        whole = self.whole(stats)
        while len(whole.points) > MAX_POINTS:
            length = 2 * whole.interval
            whole = replace(whole, points=tuple(coarser(whole.points, length)), interval=length)
        with suppress(OSError):
            self._journal.update(statistics={"resumed_at": self.marks, "stats": _written(whole)})
        self._due = self._clock() + SAVE_SECONDS


def coarser(points: Iterable[TimelinePoint], length: float) -> list[TimelinePoint]:
    """The timeline with one point for each interval of `length` seconds."""
    groups: dict[int, list[TimelinePoint]] = {}
    for each in points:
        groups.setdefault(int(each.time / length), []).append(each)
    return [_joined(group, index * length) for index, group in groups.items()]


def _joined(group: list[TimelinePoint], time: float) -> TimelinePoint:
    values: dict[str, Any] = {}
    for name in (each.name for each in fields(TimelinePoint)):
        weight = "seconds" if name in OVER_SECONDS else "num_steps" if name in OVER_STEPS else None
        if weight is None:
            values[name] = sum(getattr(each, name) for each in group)
        else:
            total = sum(getattr(each, weight) for each in group)
            values[name] = sum(getattr(each, name) * getattr(each, weight) for each in group) / total
    return TimelinePoint(**values | {"time": time})


def _written(stats: EngineStats) -> dict[str, Any]:
    """For the journal, with one line for each point."""
    points = [json.dumps([getattr(each, field.name) for field in fields(each)]) for each in stats.points]
    return {field.name: getattr(stats, field.name) for field in fields(stats)} | {"points": points}


def _read(found: Mapping[str, Any]) -> EngineStats | None:
    """The statistics of a journal; None if another version wrote it."""
    try:
        points = tuple(TimelinePoint(*json.loads(each)) for each in found["points"])
        return EngineStats(**{**found, "points": points})
    except (TypeError, ValueError, KeyError):
        return None
