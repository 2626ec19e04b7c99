"""A job from its arguments: its source, its row format, its journal entry, and its files.

Refuses a job that cannot run, before anything is loaded or written. Runs nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field, fields
from glob import glob, has_magic
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import xxhash

from nanovllm.config import Config
from nanovllm.jobs.errors import JobRefusedError, refusing
from nanovllm.jobs.formats import ENDINGS, check_can_write, endings, is_exported, open_source
from nanovllm.jobs.journal import CHUNK, hash_file, versions
from nanovllm.jobs.labels import LabelFormat
from nanovllm.jobs.openai_batch import OpenAIFormat, looks_like_batch
from nanovllm.jobs.params import job_params
from nanovllm.jobs.side_files import check_name, new_file, own_file
from nanovllm.jobs.sources import Input, Source
from nanovllm.jobs.tasks import DEFAULTS, PlainFormat, RowFormat
from nanovllm.params import SamplingParams

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
    "num_threads",
    "download_dir",
}
# The journal has those that are given.
_PROMPT_ARGUMENTS: tuple[str, ...] = ("prompt_column", "template", "messages_column", "id_column")
_PROMPT_ARGUMENTS += ("chat_template_kwargs", "columns", "chat", "system", "choice")
COPIED = "all"  # columns of the input, if --columns is not given
_LONGEST = ".rows.jsonl.nanovllm.tmp"  # what a file beside the output has after the output's name
STDIN = "standard input"
_INSPECTED_ROWS = 100  # rows of JSON to inspect, for an OpenAI batch or a missing column


def engine_fields() -> dict[str, Field[Any]]:
    """The options that are flags. The hub's token is not one: other users can see a command line. Nor are
    routed experts: a job writes none."""
    others = ("model", "hf_token", "return_routed_experts")
    return {field.name: field for field in fields(Config) if field.name not in others}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `LLM` that were given."""
    return {name: value for name, value in vars(args).items() if name in engine_fields()}


@contextmanager
def standard_output(args: argparse.Namespace) -> Iterator[None]:
    """For `-o -`: the files of the job are in a temporary folder, and its lines go to standard output too."""
    if str(args.output) != "-":
        yield
        return
    for flag, given in (("--extend", args.extend), ("--retry-errors", args.retry_errors)):
        if given:
            raise JobRefusedError(
                f"-o - keeps no answers, so {flag} has no job to resume; leave it out, or name a file with -o"
            )
    with TemporaryDirectory(prefix="nanovllm-") as folder:
        args.output, args.echo = Path(folder, "out.jsonl"), sys.stdout.buffer
        yield


def output_name(args: argparse.Namespace) -> str:
    """The output in messages."""
    return str(args.output) if args.echo is None else "standard output"


@contextmanager
def input_files(args: argparse.Namespace) -> Iterator[list[Path]]:
    """The files of rows. Standard input is copied beside the output first, because a job reads it twice."""
    if args.inputs != ["-"]:
        yield find_files(args.inputs, args.output)
        return
    rows = iter(lambda: sys.stdin.buffer.read(CHUNK), b"")
    with copied(args.output, "stdin", STDIN, rows) as copy:
        yield [copy]


def find_files(given: Iterable[str], output: Path | None = None) -> list[Path]:
    """The files that arguments name, in their order; those of a folder or a pattern by name.

    Of a folder these are the files with a known ending that no job has written; of a pattern all but those of
    `output`. JobRefusedError if an argument names no file, or one comes twice.
    """
    found: dict[str, Path] = {}
    for text in given:
        path = Path(text)
        some = [path]
        if text == "-":
            raise JobRefusedError("- is standard input, and it is read alone; leave out the other inputs")
        if path.is_dir():
            known = (
                each for each in sorted(path.iterdir()) if endings(each)[0] in ENDINGS and each.is_file()
            )
            some = [each for each in known if not _is_of_job(each) and each != output]
            if not some:
                raise JobRefusedError(
                    f"{text} is a folder without files of rows ({', '.join(ENDINGS)}); outputs of jobs in it "
                    "are passed over, so name them, or a pattern"
                )
        elif not path.exists() and has_magic(text):
            names = sorted(glob(text, recursive=True))
            some = [each for each in map(Path, names) if each.is_file() and not _is_beside(each, output)]
            if not some:
                raise JobRefusedError(f"{text} matches no file; check the pattern")
        for each in some:
            real = os.path.realpath(each)
            if real in found:
                raise JobRefusedError(f"{each} is given twice, and its rows would be, too; name it once")
            found[real] = each
    return list(found.values())


def _is_of_job(path: Path) -> bool:
    """Whether a job has written a file of a folder, or it is hidden."""
    output = path.name.removesuffix(".job.json").removesuffix(".rows.jsonl")
    return path.name.startswith(".") or path.with_name(f"{output}.job.json").exists()


def _is_beside(path: Path, output: Path | None) -> bool:
    """Whether a file is the output, or belongs to it."""
    if output is None or path.parent.resolve() != output.parent.resolve():
        return False
    rest = path.name.removeprefix(output.name)
    return path.name.startswith(output.name) and (
        rest in ("", ".job.json", ".rows.jsonl") or ".nanovllm." in rest
    )


@contextmanager
def copied(output: Path, use: str, name: str, content: Iterable[bytes]) -> Iterator[Path]:
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
    for text, (option, path) in product(args.inputs, (("-o", output), ("--report", args.report))):
        rows = Path(text)
        both = text != "-" and path is not None and path.exists() and rows.exists()
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


def open_job(args: argparse.Namespace, paths: Sequence[Path]) -> tuple[Input, bool]:
    """Return the rows of files, and whether they are an OpenAI batch.

    JobRefusedError if a file cannot be read, or lacks the columns that the arguments name.
    """
    with refusing():
        plain = _plain_format(args, SamplingParams(), 0)
    several = len({path.name for path in paths}) < len(paths)
    found = [_open_part(args, path, plain, str(path) if several else path.name) for path in paths]
    parts = [part for part, _ in found]
    is_batch = found[0][1]
    for part, other in found:
        if other != is_batch:
            raise JobRefusedError(
                f"one of {parts[0].name} and {part.name} is an OpenAI batch, and the other is not; run them "
                "as two jobs"
            )
    given = {"--chat": args.chat, "--columns": args.columns, "--choice": args.choice}
    if is_batch and any(given.values()):
        flag = next(name for name, value in given.items() if value)
        raise JobRefusedError(f"{parts[0].name} is an OpenAI batch, which has no {flag}; leave it out")
    return Input(parts, getattr(args, "limit", None), getattr(args, "shard", None)), is_batch


def _open_part(args: argparse.Namespace, path: Path, plain: PlainFormat, name: str) -> tuple[Source, bool]:
    """Return the rows of one file, and whether they are an OpenAI batch."""
    is_stdin = args.inputs == ["-"]
    format = "jsonl" if args.format == "auto" and is_stdin else args.format
    source = open_source(path, format, args.quoting, args.delimiter, STDIN if is_stdin else "")
    source.name = STDIN if is_stdin else name
    if source.columns is not None:
        _check_columns(source.columns, plain, f"{path} has")
        source.wanted = plain.columns
        return source, False
    columns, is_batch = _first_columns(source)
    is_batch = is_batch and not plain.named
    if columns and not is_batch:
        _check_columns(columns, plain, f"{path}: the first {_INSPECTED_ROWS} rows have")
    return source, is_batch


def _plain_format(args: argparse.Namespace, params: SamplingParams, seed: int) -> PlainFormat:
    given = COPIED if args.columns is None else args.columns
    copied = {"all": None, "none": ()}.get(given, given) if isinstance(given, str) else given
    return (PlainFormat if args.choice is None else LabelFormat)(
        params,
        seed,
        prompt=args.prompt_column,
        template=args.template,
        messages=args.messages_column,
        id=args.id_column,
        copied=copied,
        chat=args.chat,
        system=args.system,
    )


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
    args: argparse.Namespace, source: Input, is_batch: bool, config: Config, model_hash: str
) -> dict[str, Any]:
    """The journal entry of a job."""
    options = {name: getattr(config, name) for name in engine_options(args)}
    prompt = {name: getattr(args, name) for name in _PROMPT_ARGUMENTS}
    if args.shard is not None:
        prompt |= {"shard": "/".join(map(str, args.shard)), "limit": args.limit}
    return {
        "command": shlex.join(["nanovllm", *sys.argv[1:]]),
        "output": args.output.name,
        "input": _describe_input(args, source),
        "limit": args.limit,
        "format": "openai" if is_batch else source.format,
        "model": {"path": args.model, "xxh3_128": model_hash},
        "options": {name: value for name, value in options.items() if name not in _MAY_CHANGE},
        "sampling": args.sampling,
        "prompt": {name: value for name, value in prompt.items() if value not in (None, False)}
        | dict(source.reading),
        "other_options": {name: value for name, value in options.items() if name in _MAY_CHANGE},
        "versions": versions(),
    }


def _describe_input(args: argparse.Namespace, source: Input) -> dict[str, Any]:
    """The files of a job: their sizes, and hashes of all their bytes."""
    is_stdin = args.inputs == ["-"]
    files = [{"bytes": part.size, "xxh3_128": hash_file(part.path, part.size)} for part in source.parts]
    paths = [STDIN if is_stdin else str(part.path.absolute()) for part in source.parts]
    if len(files) == 1:
        return {"path": paths[0], **files[0]}
    whole = xxhash.xxh3_128_hexdigest(
        " ".join(f"{each['bytes']}:{each['xxh3_128']}" for each in files).encode()
    )
    return {"path": paths, "bytes": source.size, "xxh3_128": whole, "files": files}


def _check_columns(columns: list[str], plain: PlainFormat, where: str) -> None:
    if not columns:
        raise JobRefusedError(
            f"{where} no columns: name them in the first line of a CSV file, or as a row's keys"
        )
    names = ", ".join(map(repr, columns))
    for name in plain.named:
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
