"""`--extend`: an input that has grown since its job began, by bytes at its end or by files after it.

Compares the old rows with the new ones, so that no answer is kept for another row. Answers nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovllm.checks import attempt
from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.job import STDIN, copied, open_job
from nanovllm.jobs.journal import chunks, hash_file
from nanovllm.jobs.output import Output
from nanovllm.jobs.sources import Input, Source, SourceRow
from nanovllm.stats.summary import counted


def files_of(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The size and the hash of each file of the `input` of a journal."""
    found: list[Mapping[str, Any]] = described.get("files") or [described]
    return found


def extend(args: argparse.Namespace, source: Input, before: Mapping[str, Any], lines: Path) -> None:
    """Take up a job whose input has grown: the last file, or by files after it. Check that the old rows are
    the same, and remove lines of others.

    before: the `input` of its journal. lines: its JSON Lines file; a job that ran while the input grew may
    have read a new row in part. JobRefusedError if the old rows are not the same, or without `--extend`.
    """
    keep = (
        f"To keep the answers in {args.output}, put the new rows into a file of their own, and run that with "
        "another -o"
    )
    olds = files_of(before)
    grown = _grown_file(args, source, olds, keep)
    if args.shard is not None:
        raise JobRefusedError(f"the input has grown, and its shards would have other rows. {keep}")
    if not args.extend:
        number = len(source.parts) - len(olds)
        new = [counted(number, "file")] if number else []
        if grown is not None:
            new.append(f"{grown.size - olds[-1]['bytes']:,} bytes")
        name = source.name if grown is None else shown(args, grown)
        raise JobRefusedError(
            f"{name} has grown since the job began, by {' and '.join(new)}; run the same "
            "command with --extend, which keeps all answers and answers the new rows"
        )
    num_old = 0
    for number, part in enumerate(source.parts[: len(olds)]):
        is_grown = part is grown
        num_old += (
            _num_old(args, part, olds[number]["bytes"], keep) if is_grown else sum(1 for _ in part.rows())
        )
    Output(lines, range(num_old), args.output).close()


def shown(args: argparse.Namespace, part: Source) -> str:
    return STDIN if args.inputs == ["-"] else str(part.path)


def _grown_file(
    args: argparse.Namespace, source: Input, olds: Sequence[Mapping[str, Any]], keep: str
) -> Source | None:
    """The file that has grown, the last of the old ones. JobRefusedError if old files have changed."""
    several = " (new files must come after all old ones)" if len(source.parts) > 1 else ""
    if len(source.parts) < len(olds):
        raise JobRefusedError(
            f"the job began with {counted(len(olds), 'file')}, and these are {len(source.parts)}. {keep}"
        )
    for number, (part, old) in enumerate(zip(source.parts, olds, strict=False), 1):
        if part.size == old["bytes"] and hash_file(part.path) == old["xxh3_128"]:
            continue
        name, begins = shown(args, part), has_grown(part.path, old)
        if part.num_rows is not None:
            raise JobRefusedError(
                f"{name} is not the file that the job began with{several}. A Parquet file changes as a whole "
                f"when rows are added, so --extend cannot tell that the old rows are the same. {keep}"
            )
        if not begins or number < len(olds):
            why = "others follow it" if begins else f"its first {old['bytes']:,} bytes have changed"
            raise JobRefusedError(
                f"{name} is not the file that the job began with{several}: {why}, so the answers there may "
                f"be of other rows. {keep}"
            )
        return part
    return None


def _num_old(args: argparse.Namespace, part: Source, size: int, keep: str) -> int:
    """The number of rows in the first `size` bytes of a file. JobRefusedError if it now has others there."""
    num_old = 0
    rows = part.rows()
    # A copy, because the end of a file can decide how a row is read: it ends a line, and leaves a quote open.
    ending = "".join(part.path.suffixes[-2:])
    with copied(args.output, "before" + ending, str(part.path), chunks(part.path, size)) as copy:
        old = open_job(args, [copy])[0].parts[0]
        old.name = part.name  # errors of equal rows are equal
        for row in old.rows():
            same = next(rows, None)
            if same is None or not _is_same(row, same):
                line = row.place.removeprefix(f"{part.name}: ")
                raise JobRefusedError(
                    f"{shown(args, part)} has grown, and with the new bytes {line} is another row than "
                    f"before. {keep}"
                )
            num_old = row.index + 1
    return num_old


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
