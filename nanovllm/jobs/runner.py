"""JobRunner: the loop of a job. It feeds rows to `LLM.stream` and writes the answers as lines.

Holds only the rows in the order window and in the engine. Loads no model, opens no file.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby, islice
from typing import Any

from nanovllm.engine.stats import counted
from nanovllm.errors import BadRow, attempt
from nanovllm.jobs.errors import TooManyErrorsError
from nanovllm.jobs.output import Output
from nanovllm.jobs.progress import JobProgress
from nanovllm.jobs.rendering import Renderer, as_prompt
from nanovllm.jobs.sources import Source, SourceRow
from nanovllm.jobs.tasks import RowFormat, Task
from nanovllm.jobs.window import portions, reordered
from nanovllm.sampling_params import SamplingParams

EMBED_ROWS = 256  # rows in one call of `embed`
RENDER_ROWS = 64  # rows whose conversations are rendered at once


class JobRunner:
    """Runs the rows that have no line in the output yet."""

    num_rows: int | None = None  # of the input, once all have been read

    def __init__(
        self, args: argparse.Namespace, source: Source, output: Output, progress: JobProgress
    ) -> None:
        """args: of the command line; uses `max_errors`, `ordered` and `window`."""
        self._args = args
        self._source = source
        self._output = output
        self._progress = progress
        self._held: dict[int, dict[str, Any]] = {}  # lines that wait for earlier rows, with `ordered`
        self._next = 0  # the next row to write, with `ordered`

    def run(self, llm: Any, row_format: RowFormat, renderer: Renderer) -> None:
        """Answer all rows. TooManyErrorsError, JobFailedError or an engine's error ends it early."""
        self._format = row_format
        tasks = self._tasks()
        if not self._args.ordered:
            tasks = reordered(tasks, self._args.window)
        for kind, group in groupby(tasks, key=lambda task: task.kind):
            if kind == "embed":
                self._embed(llm, group)
            else:
                self._generate(llm, group, renderer)
        assert not self._held

    def pending(self) -> Iterator[SourceRow]:
        """The rows that have no line yet; all others are only counted."""
        num_rows = 0
        for row in self._source.rows():
            num_rows = self._progress.rows_read = row.index + 1
            if row.index not in self._output.finished:
                yield row
        self.num_rows = num_rows

    def check_errors(self) -> None:
        """Raise TooManyErrorsError if there are more error rows than `--max-errors`."""
        most = self._args.max_errors
        if most is not None and self._progress.errors > most:
            raise TooManyErrorsError(
                f"{counted(self._progress.errors, 'error row')}, and --max-errors is {most:,}; run "
                "the same command with a larger --max-errors, or with --retry-errors, or put corrected rows "
                "into a file of their own, and run that with another -o"
            )

    def _tasks(self) -> Iterator[Task]:
        """The tasks of the rows; a row without a valid task becomes an error row."""
        for row in self.pending():
            values: Any = attempt(row.values)
            if isinstance(values, Exception):
                self._refuse(row.index, None, str(values))
                continue
            task: Task | BadRow = attempt(self._format.task, row, values)
            if isinstance(task, Exception):
                self._refuse(row.index, self._format.row_id(values), f"{row.place}: {task}")
            else:
                task.num_bytes = row.num_bytes
                yield task

    def _generate(self, llm: Any, tasks: Iterator[Task], renderer: Renderer) -> None:
        running: dict[int, Task] = {}  # by the index of its prompt in the stream
        params: deque[SamplingParams] = deque()  # of prompts that the stream has read

        def prompts() -> Iterator[Any]:
            place = 0
            for some in portions(tasks, RENDER_ROWS):
                for task, prompt in zip(some, renderer.prompts(some), strict=True):
                    if isinstance(prompt, Exception):
                        self._refuse(task.index, task.id, f"{task.place}: {prompt}")
                        continue
                    running[place] = task
                    params.append(task.params)
                    place += 1
                    yield prompt

        def parameters() -> Iterator[SamplingParams]:
            while params:
                yield params.popleft()

        # The stream reads a prompt first, and then its parameters.
        with closing(llm.stream(prompts(), parameters(), on_error="return")) as outputs:  # type: ignore[type-var]
            for output in outputs:
                task = running.pop(output.index)
                if output.error is not None:
                    place = f"prompts[{output.index}]"
                    error = output.error.replace(place, "the prompt")
                    self._refuse(task.index, task.id, f"{task.place}: {error}")
                else:
                    self._progress.answered(output)
                    self._write(task.index, self._format.answer(task, output))

    def _embed(self, llm: Any, tasks: Iterator[Task]) -> None:
        for some in portions(tasks, EMBED_ROWS):
            prompts = [as_prompt(prompt) for task in some for prompt in task.prompt]
            outputs = iter(llm.embed(prompts, use_tqdm=False, on_error="return"))
            place = 0
            for task in some:
                found = list(islice(outputs, len(task.prompt)))
                errors = [(number, each.error) for number, each in enumerate(found, place) if each.error]
                place += len(found)
                if errors:
                    number, error = errors[0]
                    why = str(error).replace(f"prompts[{number}]", "the input")
                    self._refuse(task.index, task.id, f"{task.place}: {why}")
                else:
                    self._progress.embedded(found)
                    self._write(task.index, self._format.embeddings(task, found))

    def _refuse(self, index: int, row_id: Any, message: str) -> None:
        self._write(index, self._format.error(index, row_id, message))

    def _write(self, index: int, record: dict[str, Any]) -> None:
        """Write the line of a row; with `ordered`, after all earlier rows."""
        if not self._args.ordered:
            self._append(index, record)
            return
        self._held[index] = record
        while self._next in self._held or self._next in self._output.finished:
            if self._next in self._held:
                self._append(self._next, self._held.pop(self._next))
            self._next += 1

    def _append(self, index: int, record: dict[str, Any]) -> None:
        self._output.write(index, record)
        self._progress.written(is_error=record["error"] is not None)
        self.check_errors()
