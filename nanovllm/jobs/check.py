"""The commands that compute nothing: `nanovllm check` reports errors in files of rows, before a model is
loaded; `nanovllm version` prints the facts for a bug report.

Reads each file like a job. With a model it also renders and tokenises the prompts.
"""

from __future__ import annotations

import argparse
import platform
import sys
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import torch
import xxhash

from nanovllm.attention.backends import BACKENDS
from nanovllm.checks import BadRow, attempt
from nanovllm.config import Config
from nanovllm.cpu import isa
from nanovllm.device import Device
from nanovllm.engine.startup import (
    find_model,
    make_processor,
    overridden,
    read_generation_config,
    recommended_params,
    resolve_max_model_len,
)
from nanovllm.jobs.errors import ANSWERED, ERROR_ROWS, REFUSED, JobRefusedError, caught_signals, refusing
from nanovllm.jobs.job import engine_options, find_files, make_format, open_job
from nanovllm.jobs.journal import versions
from nanovllm.jobs.progress import Display
from nanovllm.jobs.runner import portions
from nanovllm.jobs.sources import Input, SourceRow, Values
from nanovllm.jobs.tasks import Renderer, RowFormat, Task
from nanovllm.models.registry import load_model_config
from nanovllm.params import SamplingParams
from nanovllm.stats.summary import counted
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Prompt, parse_prompt

_MAX_SHOWN = 20  # printed problems of a file
_BATCH_ROWS = 256  # tokenised at once
_MANY_LINES = 100  # of a row of CSV; one with more may come from a stray quote
_Problem: TypeAlias = "tuple[int, str, bool]"  # a row, what is wrong, and whether that is certain
_Model: TypeAlias = (
    "tuple[SamplingParams, Renderer, Processor]"  # the model's defaults, and what checks prompts
)


def version(args: argparse.Namespace) -> int:
    """Print versions, devices and their attention backends."""
    for name, number in versions(("flash-attn", "llguidance", "numba", "pyarrow")).items():
        print(f"{name} {number}")
    print(f"system {platform.platform()}")
    print(f"torch's CUDA {torch.version.cuda or 'none'}")
    for device in Device.all():
        free, total = device.memory()
        capability = f", compute capability {'.'.join(map(str, device.capability))}" if device.is_cuda else ""
        print(f"{device.torch} {device.name}{capability}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        if not device.is_cuda:
            print(f"  kernels for CPUs: {isa.described(torch.get_num_threads())}")
        for backend in BACKENDS.values():
            try:
                dtype = device.resolve_dtype("auto", "bfloat16")
                reason = backend.unavailable(device, dtype, dtype)
            except ValueError as error:  # a wrong level of the CPU
                reason = str(error)
            print(f"  attention backend {backend.name}: {'can run' if reason is None else f'no: {reason}'}")
    return ANSWERED


def check(args: argparse.Namespace) -> int:
    """Print the errors of each file; return 0 if there are none, 1 for bad rows, 2 for a bad file."""
    model = _read_model(args) if args.model else None
    try:
        paths = find_files(args.inputs)
    except JobRefusedError as error:
        print(error)
        return REFUSED
    with caught_signals() as signals:
        return max([_check(args, path, model, signals.check) for path in paths])


def _read_model(args: argparse.Namespace) -> _Model:
    """JobRefusedError if there is no such model, or an option is wrong."""
    with refusing():
        config = Config.from_kwargs(args.model, **engine_options(args))
        path = find_model(config)
        generation = read_generation_config(config.generation_config, path)
        model_config = load_model_config(path, generation, config.hf_overrides, config.quantization)
        changes = config.override_generation_config or {}
        params = recommended_params(overridden(generation, config.generation_config, changes))
        limit = resolve_max_model_len(config.max_model_len, model_config)
        processor = make_processor(config, path, model_config)
    is_chat = args.chat or args.messages_column is not None
    renderer = Renderer(processor.tokenizer, args.chat_template_kwargs, is_chat)
    processor.max_model_len = limit
    return params, renderer, processor


def _check(
    args: argparse.Namespace, path: Path, model: _Model | None, check_signals: Callable[[], None]
) -> int:
    num_rows = num_bad = num_problems = 0
    ids = array("Q")  # their hashes

    def tasks(source: Input, row_format: RowFormat) -> Iterator[Task | _Problem]:
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
        row_format = make_format(args, is_batch, None if model is None else model[0], 0)
        progress = Display(sys.stderr, perf_counter)
        for some in portions(tasks(source, row_format), _BATCH_ROWS):
            share = source.position / (source.length or 1)
            progress.show(partial(_progress, path, share, num_rows, num_bad))
            problems = [each for each in some if not isinstance(each, Task)]
            if model is not None:
                problems += _refused([each for each in some if isinstance(each, Task)], *model[1:])
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


def _refused(tasks: list[Task], renderer: Renderer, processor: Processor) -> Iterator[_Problem]:
    """The tasks whose prompts or parameters the model refuses."""
    tasks = [task for task in tasks if task.kind == "generate"]
    prompts: list[Prompt | BadRow] = [
        each if isinstance(each, Exception) else attempt(parse_prompt, each, "the prompt")
        for each in renderer.prompts(tasks)
    ]
    limit = processor.max_model_len
    requests = processor.make_requests(prompts, [task.params for task in tasks], 0)
    for task, request in zip(tasks, requests, strict=True):
        if isinstance(request, Exception):
            yield task.index, f"{task.place}: {request}", True
        elif limit is not None and (length := len(request.prompt_token_ids)) >= limit:
            why = f"the prompt has {length} tokens, and at most {limit - 1} leave room for one more"
            yield task.index, f"{task.place}: {why} (max_model_len={limit})", True


def _spanning(values: Values) -> str:
    """What a row of CSV with many lines may mean: a quote that is text has taken up the rows after it."""
    lines, name = max((value.count("\n") + 1, name) for name, value in values.items())
    return (
        f"its field {name!r} spans {lines:,} lines, which are no rows then; if the quote before it is text, "
        "pass --quoting none"
    )
