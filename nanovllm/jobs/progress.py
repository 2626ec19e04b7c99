"""The figures of a job: its progress as one line that is redrawn in a terminal, else as plain lines; and the
statistics of all of its runs, kept in its journal.

Counts rows and tokens; measures and decides nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from datetime import timedelta
from time import monotonic, perf_counter
from typing import Any, TextIO

from nanovllm.engine.progress import LINE_SECONDS
from nanovllm.engine.stats import EngineStats, StepStats, TimelinePoint, counted, short
from nanovllm.jobs.journal import Journal
from nanovllm.jobs.output import Output
from nanovllm.jobs.sources import Source
from nanovllm.outputs import EmbeddingRequestOutput, RequestOutput

_DRAW_SECONDS = 0.2  # in a terminal
_SAVE_SECONDS = 30.0
MAX_POINTS = 200  # of the timeline that the journal holds
# Fields of EngineStats that add up, and those of TimelinePoint that are means over seconds and over steps.
_ADDED = {"uptime", "prefill_seconds", "decode_seconds", "num_prefill_steps", "num_decode_steps"}
_ADDED |= {"num_computed_tokens", "num_cached_tokens", "num_decoded_tokens", "num_preemptions"}
_OVER_SECONDS = {"output_tokens_per_s", "prefill_tokens_per_s"}
_OVER_STEPS = {"step_ms", "batch_size", "num_running", "num_waiting", "kv_cache_usage"}


class JobProgress:
    """The progress of one run of a job.

    finished: rows with a line in the output, including those of earlier runs. errors: error rows among them.
    """

    def __init__(
        self,
        source: Source,
        finished: int,
        errors: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """stream: a terminal or not; standard error by default. clock: seconds."""
        self._source = source
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._before = finished
        self._start = clock()
        self._due = self._start + (0 if self._is_terminal else LINE_SECONDS)
        self._first_step: float | None = None  # when it began
        self._kv_usage = 0.0
        self._drawn_tokens = 0
        self.finished = finished
        self.errors = errors
        self.rows_read = 0
        self.prompt_tokens = self.output_tokens = 0
        self.reasons: Counter[str] = Counter()

    def step(self, stats: StepStats) -> None:
        """Count a step of the engine."""
        if self._first_step is None:
            self._first_step = self._clock() - stats.seconds
        self._drawn_tokens += stats.num_drawn_tokens
        self._kv_usage = stats.kv_cache_usage
        self.show()

    def answered(self, output: RequestOutput) -> None:
        self.prompt_tokens += len(output.prompt_token_ids)
        for each in output.outputs:
            self.output_tokens += len(each.token_ids)
            self.reasons[each.finish_reason or ""] += 1

    def embedded(self, outputs: Sequence[EmbeddingRequestOutput]) -> None:
        self.prompt_tokens += sum(len(each.prompt_token_ids) for each in outputs)
        self.reasons["embedding"] += 1

    def written(self, is_error: bool) -> None:
        self.finished += 1
        self.errors += is_error
        self.show()

    def show(self) -> None:
        now = self._clock()
        if now < self._due:
            return
        self._due = now + (_DRAW_SECONDS if self._is_terminal else LINE_SECONDS)
        line = self.line(now - self._start)
        if self._is_terminal:
            self._write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
        else:
            self._write(line + "\n")

    def close(self) -> None:
        """Remove the line from a terminal."""
        if self._is_terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a terminal or pipe that was closed is no reason to stop
            self._stream.write(text)
            self._stream.flush()

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second since the first step."""
        begin = self._start if self._first_step is None else self._first_step
        return max(self._drawn_tokens, self.output_tokens) / max(self._clock() - begin, 1e-9)

    def line(self, seconds: float) -> str:
        """The line of progress, `seconds` after the start."""
        share, num_rows = self._share(), self._source.num_rows
        rows = f"of {counted(num_rows, 'row')}" if num_rows else f"rows ({share:.0%})"
        parts = [f"{self.finished:,} {rows}", f"{short(self.tokens_per_second)} tok/s"]
        done = self.finished - self._before
        if done and share:
            left = seconds * (1 - share) / (share * done / self.finished)
            parts.append(f"{timedelta(seconds=round(left))} left")
        parts += [counted(self.errors, "error"), f"KV {self._kv_usage:.0%}"]
        return ", ".join(parts)

    def _share(self) -> float:
        """The finished share of the job, by the bytes of the rows read so far."""
        if not self.rows_read or not self._source.size:
            return 0.0
        read = self._source.position / self._source.size
        return min(1.0, read * self.finished / self.rows_read)


class History:
    """The statistics of earlier runs, to which those of this run are added.

    A run that ends by `kill -9` leaves those of its last save. The numbers of answers and of their tokens
    come from the output, so each answer counts once.
    marks: where the job was resumed, in seconds of its runs, without the time between them.
    """

    def __init__(self, journal: Journal, output: Output, clock: Callable[[], float] = monotonic) -> None:
        """Read the statistics of earlier runs, if the output has lines of one."""
        self._journal, self._output, self._clock = journal, output, clock
        self._due = clock() + _SAVE_SECONDS
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
            **{name: getattr(before, name) + getattr(stats, name) for name in _ADDED},
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
        self._due = self._clock() + _SAVE_SECONDS


def coarser(points: Iterable[TimelinePoint], length: float) -> list[TimelinePoint]:
    """The timeline with one point for each interval of `length` seconds."""
    groups: dict[int, list[TimelinePoint]] = {}
    for each in points:
        groups.setdefault(int(each.time / length), []).append(each)
    return [_joined(group, index * length) for index, group in groups.items()]


def _joined(group: list[TimelinePoint], time: float) -> TimelinePoint:
    values: dict[str, Any] = {}
    for name in (each.name for each in fields(TimelinePoint)):
        weight = "seconds" if name in _OVER_SECONDS else "num_steps" if name in _OVER_STEPS else None
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
