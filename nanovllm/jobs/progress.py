"""The progress of a job: one line that is redrawn in a terminal, else plain lines.

Counts rows and tokens; decides nothing.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import perf_counter
from typing import TextIO

from nanovllm.engine.progress import LINE_SECONDS
from nanovllm.engine.stats import StepStats, counted, short
from nanovllm.jobs.sources import Source
from nanovllm.outputs import EmbeddingRequestOutput, RequestOutput

DRAW_SECONDS = 0.2  # in a terminal


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
        self._due = now + (DRAW_SECONDS if self._is_terminal else LINE_SECONDS)
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
