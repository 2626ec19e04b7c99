"""JobRunner: the loop of a job. It feeds rows to `LLM.stream` and writes the answers as lines.

The rows of a `Window` run in the order that is fastest. Holds only the rows in the window and in the engine.
Loads no model, opens no file.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import closing
from itertools import groupby, islice
from typing import Any, TypeAlias, TypeVar

from nanovllm.checks import BadRow, attempt
from nanovllm.jobs.choices import Plan
from nanovllm.jobs.errors import TOO_MANY_ERRORS, JobFailedError, Signals
from nanovllm.jobs.labels import LabelCounts, Labeller
from nanovllm.jobs.output import Output
from nanovllm.jobs.progress import JobProgress
from nanovllm.jobs.remaining import Work
from nanovllm.jobs.sources import Input, SourceRow
from nanovllm.jobs.tasks import Renderer, RowFormat, Task, as_prompt
from nanovllm.jobs.window import Window, size_of, text_of
from nanovllm.params import SamplingParams
from nanovllm.pooling_heads.jobs import classified, format_for, line_of
from nanovllm.stats.summary import counted
from nanovllm.text.processor import LONG_TEXT, encode
from nanovllm.text.prompts import Prompt, parse_prompt

_EMBED_ROWS = 256  # rows in one call of `embed` or `classify`
_COUNTED_ROWS = 16  # whose tokens are counted before any has ended, to know how long the job takes
_RENDER_ROWS = 64  # rows whose conversations are rendered at once
PORTION_BYTES = 2**22  # of rows that are rendered or tokenised at once; at least one row
_Line: TypeAlias = "tuple[dict[str, Any], str]"  # a record, and the columns that it repeats
_Item = TypeVar("_Item")
_CHARS = 4  # of a token, about, until prompts are tokenised


class JobRunner:
    """Runs the rows that have no line in the output yet."""

    _window: Window | None = None  # where rows may run in any order
    num_rows: int | None = None  # of the input, once all have been read
    answers: Any = None  # of all runs, for the report
    _earlier: AbstractSet[int] = frozenset()  # rows that the report shows, and whose lines have no prompt
    prompts: dict[int, str] | None = (
        None  # that the model read, by row, until the line is written; for it, too
    )

    def __init__(self, args: argparse.Namespace, source: Input, output: Output, signals: Signals) -> None:
        """args: of the command line; uses `max_errors`, `ordered`, `sampling`, `window`. signals: end it."""
        self.args = args
        self.source = source
        self.output = output
        self.signals = signals
        self.progress = JobProgress(source, len(output.finished), output.num_errors)
        self.labels = LabelCounts(args.choice)
        self._held: dict[int, _Line] = {}  # lines that wait for earlier rows, with `ordered`
        self._next = source.first  # the next row to write, with `ordered`

    def run(self, llm: Any, row_format: RowFormat, renderer: Renderer) -> None:
        """Answer all rows. JobFailedError or an engine's error ends it early."""
        self._format = format_for(llm.model_config.head, row_format, self.args.sampling)
        self._earlier = set() if self.prompts is None else self.answers.without_prompts()
        tasks = self._tasks()
        if not self.args.ordered:
            slots = llm.config.max_num_seqs * llm.config.data_parallel_size
            self._window = Window(tasks, slots, self.args.window)
            tasks = iter(self._window)
        for kind, group in groupby(tasks, key=lambda task: task.kind):
            if kind == "embed":
                self._embed(llm, group)
            elif kind == "generate":
                self._generate(llm, group, renderer)
            elif kind == "choice":
                self._label(llm, group, renderer)
            elif kind == "classify":
                self._classify(llm, group, renderer)
            else:
                raise ValueError(f"a task of an unknown kind, {kind!r}")
        assert not self._held

    def pending(self) -> Iterator[SourceRow]:
        """The rows that have no line yet; all others are only counted."""
        num_rows = self.progress.rows_taken = 0
        for row in self.source.rows():
            self.signals.check()
            num_rows = self.progress.rows_read = row.index + 1 - self.source.first
            if row.index not in self.output.finished:
                self.progress.rows_taken += 1
                yield row
            elif row.index in self._earlier:
                self._show_prompt(row)
        self.num_rows = num_rows

    def _show_prompt(self, row: SourceRow) -> None:
        """Give the report the prompt of a row that an earlier run answered, as the input has it."""
        task: Task | BadRow = attempt(lambda: self._format.task(row, row.values()))
        if not isinstance(task, Exception):
            is_text = isinstance(task.prompt, str)
            prompt = task.prompt if is_text else {"messages": task.prompt} if task.is_chat else ""
            self.answers.fill(row.index, prompt)

    @property
    def rows_left(self) -> int:
        """The rows without a line; those that were read if nobody knows how many rows there are."""
        known = self.source.num_rows
        return self.progress.rows_open if known is None else known - len(self.output.finished)

    def rows(self) -> str:
        """How many rows the job has, and how many have a line, as text."""
        done, left, errors = len(self.output.finished), self.rows_left, self.output.num_errors
        finished = f"{done:,} finished, {errors:,} of them with an error"
        if self.num_rows is None and self.source.num_rows is None:
            return f"{finished}; at least {left:,} unfinished: the input was not read to its end"
        return f"{done + left:,}: {finished}; {left:,} unfinished"

    def check_errors(self) -> None:
        """Raise JobFailedError if there are more error rows than `--max-errors`."""
        most = self.args.max_errors
        if most is not None and self.progress.errors > most:
            raise JobFailedError(
                f"{counted(self.progress.errors, 'error row')}, and --max-errors is {most:,}; run "
                "the same command with a larger --max-errors, or with --retry-errors, or put corrected rows "
                "into a file of their own, and run that with another -o",
                TOO_MANY_ERRORS,
            )

    def _tasks(self) -> Iterator[Task]:
        """The tasks of the rows; a row without a valid task becomes an error row."""
        for row in self.pending():
            values: Any = attempt(row.values)
            if isinstance(values, Exception):
                self._refuse(row.index, None, str(values), "")
                continue
            task: Task | BadRow = attempt(self._format.task, row, values)
            if isinstance(task, Exception):
                columns = self._format.copied(values)
                self._refuse(row.index, self._format.row_id(values), f"{row.place}: {task}", columns)
            else:
                task.work = _work(task)
                self.progress.asked(task.work)
                yield task

    def _generate(self, llm: Any, tasks: Iterator[Task], renderer: Renderer) -> None:
        running: dict[int, Task] = {}  # by the index of its prompt in the stream
        params: deque[SamplingParams] = deque()  # of prompts that the stream has read

        def prompts() -> Iterator[Any]:
            place = 0
            for some in portions(tasks, _RENDER_ROWS):
                rendered = renderer.prompts(some)
                if not place and llm.tokenizer is not None:
                    self.progress.counted(*_counted(llm.tokenizer, some, rendered))
                for task, prompt in zip(some, rendered, strict=True):
                    if isinstance(prompt, Exception):
                        self._refuse_task(task, prompt)
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
                    self._refuse_task(task, output.error.replace(place, "the prompt"))
                else:
                    self.progress.answered(output, task.work)
                    if self._window is not None:
                        self._window.answered(task.index, max(len(x.token_ids) for x in output.outputs))
                    self._note_prompt(task, output.prompt)
                    self._write(task.index, self._format.answer(task, output), task.columns)

    def _label(self, llm: Any, tasks: Iterator[Task], renderer: Renderer) -> None:
        def planned(some: list[tuple[Task, Plan]]) -> None:
            if not self.progress.rows_planned:
                size = sum(task.work.size for task, _ in some)
                self.progress.counted(size, sum(plan.num_prompt_tokens for _, plan in some))
            for task, plan in some:
                work = Work(task.work.size * len(plan.queries), len(plan.queries))
                self.progress.planned(task.work, work)
                task.work = work

        labeller = Labeller(self.args.choice, llm, renderer)
        with closing(labeller.labels(portions(tasks, _RENDER_ROWS), planned)) as labels:  # type: ignore[type-var]
            for task, label in labels:
                if isinstance(label, Exception):
                    self._refuse_task(task, label)
                    continue
                self.progress.labelled(label.tokens, label.read, label.drawn, task.work)
                self.labels.add(label)
                self._note_prompt(task, label.prompt)
                self._write(task.index, label.line(task), task.columns)

    def _embed(self, llm: Any, tasks: Iterator[Task]) -> None:
        for some in portions(tasks, _EMBED_ROWS):
            prompts = [as_prompt(prompt) for task in some for prompt in task.prompt]
            outputs = iter(llm.embed(prompts, use_tqdm=False, on_error="return"))
            place = 0
            for task in some:
                found = list(islice(outputs, len(task.prompt)))
                errors = [(number, each.error) for number, each in enumerate(found, place) if each.error]
                place += len(found)
                if errors:
                    number, error = errors[0]
                    self._refuse_task(task, str(error).replace(f"prompts[{number}]", "the input"))
                else:
                    self.progress.embedded(found, task.work)
                    self._write(task.index, self._format.embeddings(task, found), task.columns)

    def _classify(self, llm: Any, tasks: Iterator[Task], renderer: Renderer) -> None:
        for some in portions(tasks, _EMBED_ROWS):
            for task, found in classified(llm, some, renderer.prompts(some)):
                if isinstance(found, Exception):
                    self._refuse_task(task, found)
                    continue
                read = len(found.prompt_token_ids)
                self.progress.labelled((read, 0), read, 0, task.work)
                self._note_prompt(task, found.prompt)
                self._write(task.index, line_of(task, found), task.columns)

    def _note_prompt(self, task: Task, prompt: str | None) -> None:
        if self.prompts is not None and prompt is not None:
            self.prompts[task.index] = prompt

    def _refuse_task(self, task: Task, why: object) -> None:
        self.progress.refused(task.work)
        self._refuse(task.index, task.id, f"{task.place}: {why}", task.columns)

    def _refuse(self, index: int, row_id: Any, message: str, columns: str) -> None:
        self._write(index, self._format.error(index, row_id, message), columns)

    def _write(self, index: int, record: dict[str, Any], columns: str) -> None:
        """Write the line of a row; with `ordered`, after all earlier rows."""
        if not self.args.ordered:
            self._append(index, record, columns)
            return
        self._held[index] = record, columns
        while self._next in self._held or self._next in self.output.finished:
            if self._next in self._held:
                self._append(self._next, *self._held.pop(self._next))
            self._next += 1

    def _append(self, index: int, record: dict[str, Any], columns: str) -> None:
        self.output.write(index, record, columns)
        self.progress.written(is_error=record["error"] is not None)
        self.check_errors()
        self.signals.check()


def portions(items: Iterator[_Item], rows: int) -> Iterator[list[_Item]]:
    """Tasks, and what may be among them, in lists of up to `rows`, and of about PORTION_BYTES."""
    some: list[_Item] = []
    size = 0
    for item in items:
        some.append(item)
        size += size_of(item) if isinstance(item, Task) else 0
        if len(some) == rows or size >= PORTION_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _work(task: Task) -> Work:
    """What a task asks for."""
    parts = task.prompt if task.kind == "embed" else [task.prompt]
    if task.is_chat:
        parts = [text_of(message["content"]) for message in task.prompt]
    limit = {"embed": 0, "classify": 0, "choice": 1, "generate": task.params.max_tokens}[task.kind]
    size = 0.0
    for part in parts:
        size += len(part) / _CHARS if isinstance(part, str) else len(part)
    return Work(size, None if limit is None else limit * task.params.n)


def _counted(tokenizer: Any, tasks: list[Task], prompts: list[Any]) -> tuple[float, int]:
    """The size of some first rows as `Work` has it, and the tokens of their prompts with the template."""
    size, tokens = 0.0, 0
    for task, prompt in islice(zip(tasks, prompts, strict=True), _COUNTED_ROWS):
        parsed = attempt(parse_prompt, prompt, "the prompt") if not isinstance(prompt, Exception) else prompt
        if isinstance(parsed, Prompt) and parsed.token_ids is not None:
            size, tokens = size + task.work.size, tokens + len(parsed.token_ids)
        elif isinstance(parsed, Prompt) and len(str(parsed.text)) < LONG_TEXT:
            [ids] = encode(tokenizer, [str(parsed.text)], parsed.add_special_tokens)
            size, tokens = size + task.work.size, tokens + len(ids)
    return size, tokens
