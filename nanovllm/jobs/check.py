"""`nanovllm check`: reports errors in files of rows, before any model is loaded.

Reads each file like a job. With a model it also renders and tokenises the prompts; it computes nothing.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from nanovllm.config import Config
from nanovllm.engine.generation_config import overridden, read_generation_config, recommended_params
from nanovllm.engine.startup import find_model, find_tokenizer, resolve_max_model_len
from nanovllm.engine.stats import counted
from nanovllm.errors import BadRow, attempt
from nanovllm.jobs.arguments import engine_options
from nanovllm.jobs.errors import ANSWERED, ERROR_ROWS, REFUSED, JobRefusedError, refusing
from nanovllm.jobs.job import make_format, open_job
from nanovllm.jobs.rendering import Renderer
from nanovllm.jobs.sources import Source, SourceRow, Values
from nanovllm.jobs.tasks import RowFormat, Task
from nanovllm.jobs.window import portions
from nanovllm.models.loader import load_model_config
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Prompt, parse_prompt

MAX_SHOWN = 20  # printed problems of a file
BATCH_ROWS = 256  # tokenised at once
MANY_LINES = 100  # of a row of CSV; one with more may come from a stray quote


class Problem(NamedTuple):
    """An error in row number `row`, or with `is_bad` False what may be one."""

    row: int
    message: str
    is_bad: bool = True


class Lengths:
    """Checks the prompts and parameters of tasks with a model's tokenizer."""

    params: SamplingParams  # the defaults from the model's generation_config.json

    def __init__(self, args: argparse.Namespace) -> None:
        """args: of the command line. JobRefusedError if there is no such model, or an option is wrong."""
        with refusing():
            config = Config.from_kwargs(args.model, **engine_options(args))
            path = find_model(config)
            generation = read_generation_config(config.generation_config, path)
            model_config = load_model_config(path, generation, config.hf_overrides)
            changes = config.override_generation_config or {}
            self.params = recommended_params(overridden(generation, config.generation_config, changes))
            self.limit = resolve_max_model_len(config.max_model_len, model_config)
            tokenizer = find_tokenizer(config, path)
        self._renderer = Renderer(tokenizer, args.chat_template_kwargs, args.messages_column is not None)
        self._processor = Processor(
            tokenizer, model_config.vocab_size, model_config.eos_token_ids, config.max_logprobs
        )
        self._processor.max_model_len = self.limit

    def problems(self, tasks: list[Task]) -> Iterator[Problem]:
        tasks = [task for task in tasks if task.kind == "generate"]
        prompts: list[Prompt | BadRow] = [
            each if isinstance(each, Exception) else attempt(parse_prompt, each, "the prompt")
            for each in self._renderer.prompts(tasks)
        ]
        where = ["the prompt"] * len(tasks)
        requests = self._processor.make_requests(prompts, [task.params for task in tasks], where, 0)
        for task, request in zip(tasks, requests, strict=True):
            if isinstance(request, Exception):
                yield Problem(task.index, f"{task.place}: {request}")
            elif (length := len(request.prompt_token_ids)) >= self.limit:
                yield Problem(
                    task.index,
                    f"{task.place}: the prompt has {length} tokens, and at most {self.limit - 1} leave "
                    f"room for one more (max_model_len={self.limit})",
                )


def main(args: argparse.Namespace) -> int:
    """Print the errors of each file; return 0 if there are none, 1 for bad rows, 2 for a bad file."""
    lengths = Lengths(args) if args.model else None
    params = None if lengths is None else lengths.params
    args.input = ""
    return max([_check(args, path, params, lengths) for path in args.inputs])


def _check(
    args: argparse.Namespace, path: Path, params: SamplingParams | None, lengths: Lengths | None
) -> int:
    try:
        source, is_batch = open_job(args, path)
        source.name = str(path)
        row_format = make_format(args, is_batch, params, 0)
        found = _Findings()
        for problem in _problems(source, row_format, lengths, found):
            found.num_bad += problem.is_bad
            found.num_problems += 1
            if found.num_problems <= MAX_SHOWN:
                print(problem.message)
    except JobRefusedError as error:
        print(error)
        return REFUSED
    if found.num_problems > MAX_SHOWN:
        print(f"{path}: and {counted(found.num_problems - MAX_SHOWN, 'row')} more")
    twice = found.ids_that_come_twice()
    kind = counted(found.num_rows, "row") + " of an OpenAI batch" * is_batch
    print(f"{path}: {kind}, {found.num_bad:,} bad" + twice)
    return ERROR_ROWS if found.num_bad or twice or not found.num_rows else ANSWERED


class _Findings:
    """Counts of a file. Stores 8 bytes for each id."""

    def __init__(self) -> None:
        self.num_rows = self.num_bad = self.num_problems = 0
        self._ids = array("Q")

    def add_id(self, row_id: Any) -> None:
        if row_id is not None:
            self._ids.append(xxhash.xxh3_64_intdigest(repr(row_id).encode(errors="replace")))

    def ids_that_come_twice(self) -> str:
        twice = len(self._ids) - len(set(self._ids))
        if not twice:
            return ""
        come = f"{counted(twice, 'id')} {'comes' if twice == 1 else 'come'} more than once"
        return f"; {come}: answers are told apart by their index"


def _problems(
    source: Source, row_format: RowFormat, lengths: Lengths | None, found: _Findings
) -> Iterator[Problem]:
    """Yield the errors in the rows of a file while it is read."""

    def make(row: SourceRow, values: Values) -> Task:
        task = row_format.task(row, values)
        task.num_bytes = row.num_bytes
        if task.kind == "generate" and not task.is_chat:
            parse_prompt(task.prompt, "the prompt")
        return task

    def tasks() -> Iterator[Task | Problem]:
        for row in source.rows():
            found.num_rows += 1
            values: Any = attempt(row.values)
            if isinstance(values, Exception):
                yield Problem(row.index, str(values))
                continue
            if row.num_lines > MANY_LINES:
                yield Problem(row.index, f"{row.place}: {_spanning(values)}", is_bad=False)
            found.add_id(row_format.row_id(values))
            task = attempt(make, row, values)
            yield Problem(row.index, f"{row.place}: {task}") if isinstance(task, Exception) else task

    for some in portions(tasks(), BATCH_ROWS):
        problems = [each for each in some if isinstance(each, Problem)]
        if lengths is not None:
            problems += lengths.problems([each for each in some if isinstance(each, Task)])
        yield from sorted(problems)


def _spanning(values: Values) -> str:
    """What a row of CSV with many lines may mean: a quote that is text has taken up the rows after it."""
    lines, name = max((value.count("\n") + 1, name) for name, value in values.items())
    return (
        f"its field {name!r} spans {lines:,} lines, which are no rows then; if the quote before it is text, "
        "pass --quoting none"
    )
