"""A job from its arguments: its source, its row format, its journal entry, and its files.

Refuses a job that cannot run, before anything is loaded or written. Runs nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import Field, fields
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm.config import Config, versions
from nanovllm.errors import attempt
from nanovllm.jobs.errors import JobRefusedError, refusing
from nanovllm.jobs.formats import check_can_write, is_exported, open_source
from nanovllm.jobs.journal import CHUNK, chunks, hash_file
from nanovllm.jobs.openai_batch import OpenAIFormat, looks_like_batch
from nanovllm.jobs.output import Output
from nanovllm.jobs.params import job_params
from nanovllm.jobs.sources import Source, SourceRow
from nanovllm.jobs.tasks import DEFAULTS, PlainFormat, RowFormat
from nanovllm.sampling_params import SamplingParams
from nanovllm.side_files import check_name, new_file, own_file

# Options of LLM that only set where and how a job runs. They may change when a job resumes.
_MAY_CHANGE = {
    "tensor_parallel_size",
    "data_parallel_size",
    "distributed_timeout_seconds",
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
_PROMPT_ARGUMENTS = ("prompt_column", "template", "messages_column", "id_column", "chat_template_kwargs")
_LONGEST = ".rows.jsonl.nanovllm.tmp"  # what a file beside the output has after the output's name
_INSPECTED_ROWS = 100  # rows of JSON to inspect, for an OpenAI batch or a missing column


def engine_fields() -> dict[str, Field[Any]]:
    """The options that are flags. The hub's token is not one: other users can see a command line."""
    return {field.name: field for field in fields(Config) if field.name not in ("model", "hf_token")}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `LLM` that were given."""
    return {name: value for name, value in vars(args).items() if name in engine_fields()}


@contextmanager
def input_file(args: argparse.Namespace) -> Iterator[Path]:
    """The file of rows. Standard input is copied beside the output first, because a job reads it twice."""
    if args.input != "-":
        yield Path(args.input)
        return
    rows = iter(lambda: sys.stdin.buffer.read(CHUNK), b"")
    with _copied(args.output, "stdin", "standard input", rows) as copy:
        yield copy


@contextmanager
def _copied(output: Path, use: str, name: str, content: Iterable[bytes]) -> Iterator[Path]:
    """A file beside the output with this content, for as long as the block runs."""
    copy = own_file(output, use)
    refused = f"{name} cannot be copied to {copy}"
    try:
        file = new_file(copy, output, rows_path(output))
    except OSError as error:
        raise JobRefusedError(f"{refused}: {error.strerror}") from None
    try:
        try:
            with file:
                file.writelines(content)
        except OSError as error:
            raise JobRefusedError(f"{refused}: {error.strerror}") from None
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def check_output(args: argparse.Namespace) -> None:
    """Raise JobRefusedError if the output path cannot be used. Resolves a symbolic link."""
    for option, path in (("-o", args.output), ("--report", args.report)):
        try:
            if path is not None:
                path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:  # its name is too long, for example
            raise JobRefusedError(f"{option} {path}: {error.strerror}; choose another {option}") from None
    if args.output.is_symlink():
        _check_link(args.output)
        args.output = Path(os.path.realpath(args.output))
    output: Path = args.output
    check_can_write(output, args.csv_safe)
    if not output.parent.is_dir():
        raise JobRefusedError(f"-o {output}: there is no folder {output.parent}; make it first")
    if output.is_symlink() or (output.exists() and not output.is_file()):
        raise JobRefusedError(f"-o {output} is a folder, a pipe, a device or a link to itself; name a file")
    with refusing("-o: "):
        check_name(output, _LONGEST)
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
    is_stdin = args.input == "-"
    name = "standard input" if is_stdin else ""
    format = "jsonl" if args.format == "auto" and is_stdin else args.format
    source = open_source(path, format, args.quoting, args.delimiter, name)
    source.name = name or source.name
    with refusing("--template: "):
        plain = _plain_format(args, SamplingParams(), 0)
    if source.columns is not None:
        _check_columns(source.columns, plain, f"{path} has")
        source.wanted = plain.columns
        return source, False
    columns, is_batch = _first_columns(source)
    is_batch = is_batch and not plain.needed
    if columns and not is_batch:
        _check_columns(columns, plain, f"{path}: the first {_INSPECTED_ROWS} rows have")
    return source, is_batch


def _plain_format(args: argparse.Namespace, params: SamplingParams, seed: int) -> PlainFormat:
    columns = {"prompt": args.prompt_column, "messages": args.messages_column, "id": args.id_column}
    return PlainFormat(params, seed, template=args.template, **columns)


def make_format(
    args: argparse.Namespace, is_batch: bool, recommended: SamplingParams | None, seed: int
) -> RowFormat:
    """Return the format of the rows. recommended: the model's sampling parameters. seed: the engine's."""
    params = job_params(args.sampling, recommended, default_params(is_batch))
    if is_batch:
        return OpenAIFormat(params, seed, Path(args.model or "").name, args.sampling)
    return _plain_format(args, params, seed)


def default_params(is_batch: bool) -> Mapping[str, Any]:
    """The sampling parameters of the rows, beneath `--sampling`."""
    return (OpenAIFormat if is_batch else PlainFormat).default_params


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
            "xxh3_128": hash_file(source.path, source.size),
        },
        "format": "openai" if is_batch else source.format,
        "model": {"path": args.model, "xxh3_128": model_hash},
        "options": {name: value for name, value in options.items() if name not in _MAY_CHANGE},
        "sampling": args.sampling,
        "prompt": {name: getattr(args, name) for name in _PROMPT_ARGUMENTS} | dict(source.reading),
        "other_options": {name: value for name, value in options.items() if name in _MAY_CHANGE},
        "versions": versions(),
    }


def extend(args: argparse.Namespace, source: Source, before: Mapping[str, Any], lines: Path) -> None:
    """Take up a job whose input has grown: check that its old rows are the same, and remove lines of others.

    before: the `input` of its journal. lines: its JSON Lines file; a job that ran while the input grew may
    have read a new row in part. JobRefusedError if the old rows are not the same, or without `--extend`.
    """
    name = "standard input" if args.input == "-" else args.input
    keep = (
        f"To keep the answers in {args.output}, put the new rows into a file of their own, and run that with "
        "another -o"
    )
    if source.num_rows is not None:
        raise JobRefusedError(
            f"{name} is not the file that the job began with. A Parquet file changes as a whole when rows "
            f"are added, so --extend cannot tell that the old rows are the same. {keep}"
        )
    if not has_grown(source.path, before):
        raise JobRefusedError(
            f"{name} is not the file that the job began with: its first {before['bytes']:,} bytes have "
            f"changed, so the answers there are may be of other rows. {keep}"
        )
    if not args.extend:
        raise JobRefusedError(
            f"{name} has grown since the job began, by {source.size - before['bytes']:,} bytes; run the same "
            "command with --extend, which keeps all answers and answers the new rows"
        )
    num_old = 0
    # A copy, because the end of a file can decide how a row is read: it ends a line, and leaves a quote open.
    content = chunks(source.path, before["bytes"])
    with _copied(args.output, "before" + source.path.suffix, str(source.path), content) as copy:
        old = open_job(args, copy)[0]
        old.name = source.name  # errors of equal rows are equal
        rows = source.rows()
        for row in old.rows():
            same = next(rows, None)
            if same is None or not _is_same(row, same):
                line = row.place.removeprefix(f"{source.name}: ")
                raise JobRefusedError(
                    f"{name} has grown, and with the new bytes {line} is another row than before. {keep}"
                )
            num_old = row.index + 1
    Output(lines, num_old, args.output).close()


def has_grown(path: Path, before: Mapping[str, Any]) -> bool:
    """Whether a file begins with the bytes of the input of a journal, and has more."""
    size = before["bytes"]
    return path.stat().st_size > size and hash_file(path, size) == before["xxh3_128"]


def _is_same(row: SourceRow, other: SourceRow) -> bool:
    """Whether two rows have the same values, or cannot be read for the same reason."""
    if isinstance(row.data, (bytes, dict)) and row.data == other.data:
        return True
    one, two = attempt(row.values), attempt(other.values)
    return str(one) == str(two) if isinstance(one, Exception) else one == two


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
    for row in islice(source.rows(), _INSPECTED_ROWS):
        with suppress(ValueError):
            values = row.values()
            is_batch = is_batch or (not columns and looks_like_batch(values))
            columns |= dict.fromkeys(values)
    return list(columns), is_batch
