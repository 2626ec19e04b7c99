"""The figures of a job: its progress as one line that is redrawn in a terminal or notebook, else as plain
lines; and the statistics of all of its runs, kept in its journal.

Counts rows and tokens; measures and decides nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from datetime import timedelta
from time import monotonic, perf_counter
from typing import Any, TextIO

from nanovllm.answers import RequestOutput, unlisted
from nanovllm.batch import StepKind
from nanovllm.engine.stats import StepStats
from nanovllm.extras.outputs import EmbeddingRequestOutput
from nanovllm.jobs.journal import Journal
from nanovllm.jobs.labels import LabelCounts
from nanovllm.jobs.output import Output
from nanovllm.jobs.parsed import how_it_ended
from nanovllm.jobs.remaining import Remaining, Speed, Work
from nanovllm.jobs.sources import Source
from nanovllm.stats.progress import LINE_SECONDS, in_notebook
from nanovllm.stats.summary import EngineStats, TimelinePoint, coarser, counted, short

_DRAW_SECONDS = 0.2  # in a terminal
_LOOK_SECONDS, _NOTE_SECONDS = 0.1, 0.5  # between looks at the clock, and notes of the last minute
_NOTEBOOK_COLUMNS = 100  # of a line in a notebook, which has no width
_CLEAR = "\r\x1b[K"
_SAVE_SECONDS = 30.0
MAX_POINTS = 200  # of the timeline that the journal holds
# Fields of EngineStats that add up.
_ADDED = {"uptime", "prefill_seconds", "decode_seconds", "num_prefill_steps", "num_decode_steps"}
_ADDED |= {"num_computed_tokens", "num_cached_tokens", "num_decoded_tokens", "num_preemptions"}
_ADDED |= {"num_draft_tokens", "num_accepted_tokens"}


class Display:
    """One line that is redrawn in a terminal or a notebook, else a line now and then."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self._is_terminal = stream.isatty()
        self._redraws = self._is_terminal or in_notebook()
        self._due = clock() + (0 if self._redraws else LINE_SECONDS)

    def show(self, line: Callable[[], str]) -> None:
        """Show a line, if it is time for one."""
        if (now := self._clock()) < self._due:
            return
        self._due = now + (_DRAW_SECONDS if self._redraws else LINE_SECONDS)
        if self._is_terminal:
            self._write(_CLEAR + line()[: shutil.get_terminal_size().columns - 1])
        elif self._redraws:
            self._write("\r" + line()[:_NOTEBOOK_COLUMNS].ljust(_NOTEBOOK_COLUMNS))
        else:
            self._write(line() + "\n")

    def close(self) -> None:
        if self._redraws:
            self._write(_CLEAR if self._is_terminal else "\r" + " " * _NOTEBOOK_COLUMNS + "\r")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a terminal or pipe that was closed is no reason to stop
            self._stream.write(text)
            self._stream.flush()


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
        self._clock = clock
        self._display = Display(sys.stderr if stream is None else stream, clock)
        self._before = finished
        self._start = clock()
        self._next = self._start
        self._first_step: float | None = None  # when it began
        self._kv_usage = 0.0
        self._num_running = 0
        self._now = Speed(self._start, finished)
        self._minute = deque([self._now])  # the sums at times of the last minute
        self._remaining = Remaining()
        self.finished = finished
        self.errors = errors
        self.rows_read = self.rows_taken = 0  # all, and those without a line
        self.rows_planned = 0  # those of which it is known what they ask for
        self.prompt_tokens = self.output_tokens = 0
        self.reasons: Counter[str] = Counter()

    def step(self, stats: StepStats) -> None:
        """Count a step of the engine."""
        if self._first_step is None:
            self._first_step = self._clock() - stats.seconds
            self._minute = deque([Speed(self._first_step, self.finished)])
        now, is_prefill = self._now, stats.kind is StepKind.PREFILL
        self._now = now._replace(
            read=now.read + (stats.num_new_tokens if is_prefill else 0) + stats.num_cached_tokens,
            drawn=now.drawn + stats.num_drawn_tokens,
            prefill=now.prefill + (stats.seconds if is_prefill else 0.0),
            decode=now.decode + (0.0 if is_prefill else stats.seconds),
        )
        self._kv_usage, self._num_running = stats.kv_cache_usage, stats.num_running
        self.show()

    def asked(self, work: Work) -> None:
        self._remaining.ask(work)

    def refused(self, work: Work) -> None:
        self._remaining.refuse(work)

    def counted(self, size: float, tokens: int) -> None:
        """Take in the tokens of some first prompts, with their template; `size` as `Work` has it."""
        self._remaining.count(size, tokens)

    def planned(self, before: Work, work: Work) -> None:
        """Count what a row asks for, now that it is known better than `before`."""
        self.rows_planned += 1
        self._remaining.plan(before, work)

    def labelled(self, tokens: tuple[int, int], read: int, drawn: int, work: Work) -> None:
        """Count a row whose answer is a choice. tokens: of its prompt and its choice. read, drawn: for all
        choices."""
        self._remaining.end(work, read, drawn)
        self.prompt_tokens += tokens[0]
        self.output_tokens += tokens[1]
        self.reasons["choice"] += 1

    def answered(self, output: RequestOutput, work: Work) -> None:
        drawn = sum([len(each.token_ids) for each in output.outputs])
        self._remaining.end(work, len(unlisted(output, "prompt_token_ids")), drawn)
        self.prompt_tokens += len(unlisted(output, "prompt_token_ids"))
        self.output_tokens += drawn
        for each in output.outputs:
            self.reasons[how_it_ended(each.finish_reason, each.text, each.reasoning, each.tool_calls)] += 1

    def embedded(self, outputs: Sequence[EmbeddingRequestOutput], work: Work) -> None:
        read = sum(len(each.prompt_token_ids) for each in outputs)
        self._remaining.end(work, read, 0)
        self.prompt_tokens += read
        self.reasons["embedding"] += 1

    def written(self, is_error: bool) -> None:
        self.finished += 1
        self.errors += is_error
        self.show()

    def show(self) -> None:
        if (now := self._clock()) >= self._next:
            self._next = now + _LOOK_SECONDS
            self._take(now)
            self._display.show(self.line)

    def close(self) -> None:
        self._display.close()

    def _take(self, now: float) -> None:
        """Note the sums, now and then, and forget those of more than a minute ago."""
        drawn = max(self._now.drawn, self.output_tokens)
        self._now = self._now._replace(time=now, rows=self.finished, drawn=drawn)
        if now >= self._minute[-1].time + _NOTE_SECONDS:
            self._minute.append(self._now)
        while len(self._minute) > 2 and self._minute[1].time <= now - 60:
            self._minute.popleft()

    @property
    def rows_open(self) -> int:
        """The rows that this run has read and that have no line yet."""
        return self.rows_taken - (self.finished - self._before)

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second since the first step."""
        return max(self._now.drawn, self.output_tokens) / self._step_seconds

    @property
    def rows_per_second(self) -> float:
        """Rows that this run finished, per second since the first step."""
        return (self.finished - self._before) / self._step_seconds

    @property
    def _step_seconds(self) -> float:
        begin = self._start if self._first_step is None else self._first_step
        return max(self._clock() - begin, 1e-9)

    def seconds_left(self) -> float | None:
        """How long the job will still take, about; None if nothing tells yet."""
        share, now = self._share(), self._now
        if self._first_step is not None and self.rows_taken:
            more = self._unread_rows() / self.rows_taken
            begin, then = self._first_step, self._minute[0]
            left = self._remaining.seconds(now, then, begin, more, self._num_running)
            if left is not None:
                return left
        done = self.finished - self._before
        return (
            (now.time - self._start) * (1 - share) / (share * done / self.finished)
            if done and share
            else None
        )

    def line(self) -> str:
        """The line of progress."""
        then, num_rows = self._minute[0], self._source.num_rows
        rows = f"of {counted(num_rows, 'row')}" if num_rows else f"rows ({self._share():.0%})"
        seconds = max(self._now.time - then.time, 1e-9)
        parts = [
            f"{self.finished:,} {rows}",
            f"{short((self._now.rows - then.rows) / seconds)} rows/s",
            f"{short((self._now.read - then.read) / seconds)} tok/s read",
            f"{short((self._now.drawn - then.drawn) / seconds)} written",
        ]
        if (left := self.seconds_left()) is not None:
            parts.append(f"{timedelta(seconds=round(left))} left")
        return ", ".join([*parts, counted(self.errors, "error"), f"KV {self._kv_usage:.0%}"])

    def _share(self) -> float:
        """The finished share of the job, by the bytes of the rows read so far."""
        if not self.rows_read or not self._source.length:
            return 0.0
        read = self._source.position / self._source.length
        return min(1.0, read * self.finished / self.rows_read)

    def _unread_rows(self) -> float:
        """About how many rows without a line were not read yet."""
        total: float = self._source.num_rows or 0
        if self._source.num_rows is None:
            total = self.rows_read * self._source.length / max(1, self._source.position)
        passed = self.rows_read - self.rows_taken  # they had a line
        return max(0.0, total - self.rows_read - max(0, self._before - passed))


def summary_of(progress: JobProgress, num_rows: int | None, labels: LabelCounts) -> str:
    """Rows, errors, tokens and speed of a run, as text; of labels how often each came."""
    of = "" if num_rows is None else f"{progress.finished:,} of "
    rows = counted(progress.finished if num_rows is None else num_rows, "row")
    parts = [f"{of}{rows}, {progress.errors:,} of them with an error"]
    if progress.reasons:
        seconds, speed = progress.seconds, f"{short(progress.tokens_per_second)} tok/s"
        ends = ", ".join(f"{count:,} {reason}" for reason, count in progress.reasons.most_common())
        ended = f"ended by {ends}"
        if labels.number:
            speed, ended = f"{short(progress.rows_per_second)} rows/s", f"labels: {labels.summary()}"
        parts.append(
            f"this run: {counted(progress.prompt_tokens, 'token')} in, {progress.output_tokens:,} out, "
            f"{seconds:,.1f} s with loading, {speed} without"
        )
        parts.append(ended)
    return "; ".join(parts)


class History:
    """The statistics of earlier runs, to which those of this run are added.

    A run that ends by `kill -9` leaves those of its last save. The numbers of answers and of their tokens
    come from the output, so each answer counts once; with `by_rows` also where a row takes several requests.
    Requests that the end of a run gave up count as unfinished.
    marks: where the job was resumed, in seconds of its runs, without the time between them.
    """

    def __init__(
        self,
        journal: Journal,
        output: Output,
        clock: Callable[[], float] = monotonic,
        *,
        by_rows: Callable[[], int] | None = None,
    ) -> None:
        """Read the statistics of earlier runs, if the output has lines of one. by_rows: the rows without a
        line, so far as they are known, if a request is a row, and not what the engine gets for it."""
        self._journal, self._output, self._clock, self._by_rows = journal, output, clock, by_rows
        self._due = clock() + _SAVE_SECONDS
        found = journal.state.get("statistics") if output.finished or output.num_dropped else None
        self._before = None if found is None else _read(found["stats"])
        self.marks: list[float] = [] if found is None else found["resumed_at"]
        if output.finished or output.num_dropped:
            self.marks = [*self.marks, 0.0 if self._before is None else self._before.uptime]

    def whole(self, stats: EngineStats) -> EngineStats:
        """The statistics of all runs; `stats` are those of this one. Its time axis leaves out pauses."""
        output, before = self._output, self._before
        left = stats.num_requests - stats.num_finished_requests if self._by_rows is None else self._by_rows()
        if before is None and not self.marks and self._by_rows is None:
            same = left == stats.num_unfinished_requests
            return stats if same else replace(stats, num_unfinished_requests=left)
        stats = replace(
            stats,
            num_requests=output.num_requests + left,
            num_unfinished_requests=left,
            num_finished_requests=output.num_requests,
            num_prompt_tokens=output.prompt_tokens,
            num_output_tokens=output.output_tokens,
        )
        if before is None:
            return stats
        shifted = [replace(each, time=each.time + before.uptime) for each in stats.points]
        steps = before.num_decode_steps + stats.num_decode_steps
        rows = sum(each.decode_batch_size * each.num_decode_steps for each in (before, stats))
        return replace(
            stats,
            **{name: getattr(before, name) + getattr(stats, name) for name in _ADDED},
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
