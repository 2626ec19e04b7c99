"""The command `nanovllm check`: reports errors in files of rows, before a model is loaded.

Reads each file like a job. With a model it also renders and tokenises the prompts; else it imports no torch.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import xxhash

from nanovllm.checks import attempt
from nanovllm.doors import find
from nanovllm.jobs.errors import ANSWERED, ERROR_ROWS, REFUSED, JobRefusedError, caught_signals
from nanovllm.jobs.job import find_files, make_format, open_job
from nanovllm.jobs.progress import Display
from nanovllm.jobs.runner import portions
from nanovllm.jobs.sources import Input, SourceRow, Values
from nanovllm.jobs.tasks import RowFormat, Task
from nanovllm.params import SamplingParams
from nanovllm.stats.summary import counted
from nanovllm.text.prompts import parse_prompt

_MAX_SHOWN = 20  # printed problems of a file
_BATCH_ROWS = 256  # tokenised at once
_MANY_LINES = 100  # of a row of CSV; one with more may come from a stray quote
Problem: TypeAlias = "tuple[int, str, bool]"  # a row, what is wrong, and whether that is certain


class Checker(Protocol):
    """What a model says of rows: `PromptChecker` of `check_model.py`, which imports torch."""

    params: SamplingParams  # the model's own

    def format(self, row_format: RowFormat, sampling: Mapping[str, Any]) -> RowFormat:
        """How a run with the model reads its rows. JobRefusedError for a job that it cannot serve."""

    def refused(self, tasks: list[Task]) -> Iterator[Problem]:
        """The tasks whose prompts or parameters the model refuses."""


def check(args: argparse.Namespace) -> int:
    """Print the errors of each file; return 0 if there are none, 1 for bad rows, 2 for a bad file."""
    model: Checker | None = find("jobs.check_model:PromptChecker")(args) if args.model else None
    try:
        paths = find_files(args.inputs)
    except JobRefusedError as error:
        print(error)
        return REFUSED
    with caught_signals() as signals:
        return max([_check(args, path, model, signals.check) for path in paths])


def _check(
    args: argparse.Namespace, path: Path, model: Checker | None, check_signals: Callable[[], None]
) -> int:
    num_rows = num_bad = num_problems = 0
    ids = array("Q")  # their hashes

    def tasks(source: Input, row_format: RowFormat) -> Iterator[Task | Problem]:
        nonlocal num_rows
        for row in source.rows():
            num_rows += 1
            check_signals()
            values = attempt(row.values)
            if isinstance(values, Exception):
                yield row.index, str(values), True
                continue
            if row.num_lines > _MANY_LINES:
                yield row.index, f"{row.place}: {_spanning(values)}", False
            if (row_id := row_format.row_id(values)) is not None:
                ids.append(xxhash.xxh3_64_intdigest(repr(row_id).encode(errors="replace")))
            task = attempt(_task, row_format, row, values)
            yield (row.index, f"{row.place}: {task}", True) if isinstance(task, Exception) else task

    try:
        source, is_batch = open_job(args, [path])
        source.parts[0].name = str(path)
        row_format = make_format(args, is_batch, None if model is None else model.params, 0)
        row_format = row_format if model is None else model.format(row_format, args.sampling)
        progress = Display(sys.stderr, perf_counter)
        for some in portions(tasks(source, row_format), _BATCH_ROWS):
            share = source.position / (source.length or 1)
            progress.show(partial(_progress, path, share, num_rows, num_bad))
            problems = [each for each in some if not isinstance(each, Task)]
            if model is not None:
                problems += model.refused([each for each in some if isinstance(each, Task)])
            for _, message, is_bad in sorted(problems):
                num_bad += is_bad
                num_problems += 1
                if num_problems <= _MAX_SHOWN:
                    progress.close()
                    print(message, flush=True)
        progress.close()
    except JobRefusedError as error:
        print(error)
        return REFUSED
    if num_problems > _MAX_SHOWN:
        print(f"{path}: and {counted(num_problems - _MAX_SHOWN, 'row')} more")
    repeated = ""
    if twice := len(ids) - len(set(ids)):
        come = f"{counted(twice, 'id')} {'comes' if twice == 1 else 'come'} more than once"
        repeated = f"; {come}: answers are told apart by their index"
    kind = counted(num_rows, "row") + " of an OpenAI batch" * is_batch
    print(f"{path}: {kind}, {num_bad:,} bad{repeated}")
    return ERROR_ROWS if num_bad or twice or not num_rows else ANSWERED


def _progress(path: Path, share: float, num_rows: int, num_bad: int) -> str:
    return f"{path}: {share:.0%} read, {counted(num_rows, 'row')}, {num_bad:,} bad"


def _task(row_format: RowFormat, row: SourceRow, values: Values) -> Task:
    task = row_format.task(row, values)
    if task.kind == "generate" and not task.is_chat:
        parse_prompt(task.prompt, "the prompt")
    return task


def _spanning(values: Values) -> str:
    """What a row of CSV with many lines may mean: a quote that is text has taken up the rows after it."""
    lines, name = max((value.count("\n") + 1, name) for name, value in values.items())
    return (
        f"its field {name!r} spans {lines:,} lines, which are no rows then; if the quote before it is text, "
        "pass --quoting none"
    )
