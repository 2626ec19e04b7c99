"""A job from its arguments: its source, its row format, its journal entry, and its files.

Refuses a job that cannot run, before anything is loaded or written. Runs nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.jobs.arguments import engine_options
from nanovllm.jobs.errors import JobRefusedError, refusing
from nanovllm.jobs.formats import check_can_write, is_exported, open_source
from nanovllm.jobs.journal import hash_file
from nanovllm.jobs.openai_batch import OpenAIFormat, looks_like_batch
from nanovllm.jobs.params import ParamsMaker, job_params
from nanovllm.jobs.sources import Source
from nanovllm.jobs.tasks import DEFAULTS, Columns, PlainFormat, RowFormat
from nanovllm.sampling_params import SamplingParams
from nanovllm.side_files import check_name, new_file, own_file
from nanovllm.versions import versions

# Options of LLM that only set where and how a job runs. They may change when a job resumes.
MAY_CHANGE = {
    "tensor_parallel_size",
    "data_parallel_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
    "enforce_eager",
    "kvcache_block_size",
    "num_kvcache_blocks",
    "enable_prefix_caching",
    "attention_backend",
    "device",
    "async_scheduling",
    "kv_cache_memory_bytes",
    "download_dir",
}
PROMPT_ARGUMENTS = ("prompt_column", "template", "messages_column", "id_column", "chat_template_kwargs")
LONGEST = ".rows.jsonl.nanovllm.tmp"  # what a file beside the output has after the output's name
INSPECTED_ROWS = 100  # rows of JSON to inspect, for an OpenAI batch or a missing column


@contextmanager
def input_file(args: argparse.Namespace) -> Iterator[Path]:
    """The file of rows. Standard input is copied beside the output first, because a job reads it twice."""
    if args.input != "-":
        yield Path(args.input)
        return
    copy = own_file(args.output, "stdin")
    refused = f"standard input cannot be copied to {copy}"
    try:
        file = new_file(copy, args.output, rows_path(args.output))
    except OSError as error:
        raise JobRefusedError(f"{refused}: {error.strerror}") from None
    try:
        try:
            with file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        except OSError as error:
            raise JobRefusedError(f"{refused}: {error.strerror}") from None
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def check_output(args: argparse.Namespace) -> None:
    """Raise JobRefusedError if the output path cannot be used. Resolves a symbolic link."""
    if args.output.is_symlink():
        _check_link(args.output)
        args.output = Path(os.path.realpath(args.output))
    output: Path = args.output
    check_can_write(output)
    if not output.parent.is_dir():
        raise JobRefusedError(f"-o {output}: there is no folder {output.parent}; make it first")
    if output.is_symlink() or (output.exists() and not output.is_file()):
        raise JobRefusedError(f"-o {output} is a folder, a pipe, a device or a link to itself; name a file")
    with refusing("-o: "):
        check_name(output, LONGEST)
    for path in (output, output.parent):
        if path.exists() and not os.access(path, os.W_OK):
            raise JobRefusedError(f"-o {output}: no permission to write {path}; choose another -o")
    rows = Path(args.input)
    for option, path in (("-o", output), ("--report", args.report)):
        both = args.input != "-" and path is not None and path.exists() and rows.exists()
        if both and rows.samefile(path):
            raise JobRefusedError(f"{option} {path} is the input; choose another {option}")


def _check_link(path: Path) -> None:
    """Refuse what Linux does not follow by default: another user's link in a folder that everyone may write,
    unless it is of the folder's owner."""
    folder, link = path.absolute().parent.stat(), path.lstat()
    if folder.st_mode & stat.S_IWOTH and link.st_uid not in (os.geteuid(), folder.st_uid):
        raise JobRefusedError(
            f"-o {path} is a link of user {link.st_uid} in a folder that everyone may write; name a file"
        )


def rows_path(output: Path) -> Path:
    """The JSON Lines file that a job writes: the output itself, or the file that is exported at the end."""
    return output.with_name(output.name + ".rows.jsonl") if is_exported(output) else output


def open_job(args: argparse.Namespace, path: Path) -> tuple[Source, bool]:
    """Return the rows of a file, and whether they are an OpenAI batch.

    JobRefusedError if the file cannot be read, or lacks the columns that the arguments name.
    """
    source = open_source(path, "jsonl" if args.format == "auto" and args.input == "-" else args.format)
    with refusing("--template: "):
        plain = PlainFormat(ParamsMaker(SamplingParams(), 0), columns_of(args))
    if source.columns is not None:
        _check_columns(source.columns, plain, f"{path} has")
        source.wanted = plain.columns
        return source, False
    columns, is_batch = _first_columns(source)
    is_batch = is_batch and not plain.needed
    if columns and not is_batch:
        _check_columns(columns, plain, f"{path}: the first {INSPECTED_ROWS} rows have")
    return source, is_batch


def columns_of(args: argparse.Namespace) -> Columns:
    """The columns of prompts and ids, from the arguments."""
    return Columns(args.prompt_column, args.template, args.messages_column, args.id_column)


def row_format_of(is_batch: bool) -> type[RowFormat]:
    return OpenAIFormat if is_batch else PlainFormat


def make_format(
    args: argparse.Namespace, is_batch: bool, recommended: SamplingParams | None, seed: int
) -> RowFormat:
    """Return the format of the rows. recommended: the model's sampling parameters. seed: the engine's."""
    of_format = row_format_of(is_batch).default_params
    maker = ParamsMaker(job_params(args.sampling, recommended, of_format), seed)
    return (
        OpenAIFormat(maker, Path(args.model or "").name) if is_batch else PlainFormat(maker, columns_of(args))
    )


def describe(
    args: argparse.Namespace, source: Source, is_batch: bool, config: Config, model_hash: str
) -> dict[str, Any]:
    """The journal entry of a job."""
    options = {name: getattr(config, name) for name in engine_options(args)}
    is_stdin = args.input == "-"
    return {
        "command": shlex.join(["nanovllm", *sys.argv[1:]]),
        "output": args.output.name,
        "input": {
            "path": "standard input" if is_stdin else str(source.path.absolute()),
            "bytes": source.size,
            "xxh3_128": hash_file(source.path),
        },
        "format": "openai" if is_batch else type(source).__name__.removesuffix("Source").lower(),
        "model": {"path": args.model, "xxh3_128": model_hash},
        "options": {name: value for name, value in options.items() if name not in MAY_CHANGE},
        "sampling": args.sampling,
        "prompt": {name: getattr(args, name) for name in PROMPT_ARGUMENTS},
        "other_options": {name: value for name, value in options.items() if name in MAY_CHANGE},
        "versions": versions(),
    }


def _check_columns(columns: list[str], plain: PlainFormat, where: str) -> None:
    names = ", ".join(map(repr, columns)) or "none"
    for name in plain.needed:
        if name not in columns:
            raise JobRefusedError(f"{where} no column {name!r}, but {names}")
    if plain.needs_default and not DEFAULTS & set(columns):
        raise JobRefusedError(
            f"{where} no column 'prompt' or 'messages', but {names}: say which one with --prompt-column, "
            "--messages-column or --template"
        )


def _first_columns(source: Source) -> tuple[list[str], bool]:
    """The columns of the first rows that can be read, and whether the first one is of an OpenAI batch."""
    columns: dict[str, None] = {}
    is_batch = False
    for row in islice(source.rows(), INSPECTED_ROWS):
        with suppress(ValueError):
            values = row.values()
            is_batch = is_batch or (not columns and looks_like_batch(values))
            columns |= dict.fromkeys(values)
    return list(columns), is_batch
