"""The output: one line of JSON for each row, appended when it is answered; repaired when a job resumes;
sorted into the order of the input at its end, and written as CSV from there.

Keeps one bit for each finished row, and no rows. Knows only lines: the first number of the `index` or `id`
tells the row of a line.
"""

from __future__ import annotations

import csv
import json
import os
import re
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from nanovllm.jobs.errors import JobFailedError
from nanovllm.jobs.side_files import open_own, replaced, sync_folder
from nanovllm.stats.summary import counted

KEPT_ERRORS = 200  # the number that a report lists
_SYNC_SECONDS = 1.0  # after this time an answer survives a power cut; it survives `kill -9` at once
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str)
_INDEX = re.compile(rb'\{"(?:index": |id": "batch_req_)(\d{1,18})')
MAX_COLUMNS = 1000  # of the input that a table gets
COLUMNS: tuple[str, ...] = ("index", "id", "text", "finish_reason", "texts", "finish_reasons")
COLUMNS += ("prompt_tokens", "completion_tokens", "logprobs", "error")
# Those of answers that a parser has separated, and of choices, where there are any.
PARSED: tuple[str, ...] = ("reasoning", "reasonings", "tool_calls", "all_tool_calls", "tool_call_errors")
PARSED += ("choice_scores", "choice_logprobs")
_ALWAYS = ("index", "text")  # of a CSV file, also where no row has a text
LISTS = ("texts", "finish_reasons")  # of rows with several completions
NUMBERS = ("index", "prompt_tokens", "completion_tokens")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins so


class IndexSet:
    """A set of non-negative integers, with one bit for each up to the largest."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __contains__(self, index: int) -> bool:
        byte = index >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (index & 7) & 1)

    def __len__(self) -> int:
        return self._count

    def add(self, index: int) -> None:
        if index in self:
            return
        byte = index >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1024 - len(self._bits)))
        self._bits[byte] |= 1 << (index & 7)
        self._count += 1


class Output:
    """The file of answers. Open it only inside `locked`.

    finished: the rows that have a line. num_errors: the number of error rows. first_errors: (row, why) of the
    first ones. num_requests, prompt_tokens, output_tokens: of the answers. is_ordered: whether the lines are
    in the order of the rows.
    """

    def __init__(
        self,
        path: Path,
        rows: range,
        *like: Path,
        drop_errors: bool = False,
        echo: BinaryIO | None = None,
        each: Callable[[int, dict[str, Any]], object] | None = None,
    ) -> None:
        """Open or create the file, and read its lines.

        An incomplete last line is cut off. Lines that are damaged, repeated, or have an index that is not
        among `rows` are removed; with `drop_errors` so are error rows. The rows of removed lines run again.
        OSError if the file cannot be written. like: as for `open_own`; `path` itself by default. echo: gets
        each new line, too. each: is called with the row and the record of each line that is there or comes.
        """
        self.path = path
        self._rows, self._echo, self._each = rows, echo, each
        self._like = like or (path,)
        self.finished = IndexSet()
        self.num_errors = self.num_dropped = 0
        self.num_requests = self.prompt_tokens = self.output_tokens = 0
        self.first_errors: list[tuple[int, str]] = []
        self.is_ordered = True
        self._descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, *self._like)
        try:
            sync_folder(path.parent)
            if self._read(drop_errors):
                self._rewrite_without_dropped(drop_errors)
            self._end = os.lseek(self._descriptor, 0, os.SEEK_END)
            self._sync = _Sync(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, index: int, record: dict[str, Any], columns: str = "") -> None:
        """Append the line of a row, whole or not at all; columns: as for `to_line`. JobFailedError if it
        cannot be written."""
        if index in self.finished:
            raise AssertionError(f"row {index} is answered twice")
        line = to_line(record, columns)
        try:
            self._sync.check()
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, self._end)
            raise JobFailedError(
                f"{self.path}: {error.strerror}, after {counted(len(self.finished), 'row')}, all kept; fix "
                "that and run the same command again"
            ) from error
        self._end += len(line)
        if self._each is not None and columns:
            record = record | json.loads(columns)
        self._count(index, record)
        self._sync.dirty.set()
        if self._echo is not None:
            self._echo.write(line)
            self._echo.flush()

    def sync(self) -> None:
        """Flush everything to disk. OSError if that fails or failed for an earlier line; JobFailedError if
        another program changed the file."""
        self._sync.check()
        os.fsync(self._descriptor)
        there = self.path.stat() if self.path.exists() else None
        same = there is not None and os.path.samestat(there, os.fstat(self._descriptor))
        if there is None or not same or there.st_size != self._end:
            raise JobFailedError(
                f"another program changed {self.path} while the job ran; run the same command again, which "
                "runs the rows that are missing now"
            )

    def close(self) -> None:
        """Try to flush everything to disk, and close the file."""
        self._sync.close()
        with suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _count(self, index: int, record: dict[str, Any]) -> None:
        self.is_ordered = self.is_ordered and index - self._rows.start == len(self.finished)
        self.finished.add(index)
        error = record.get("error")
        if self._each is not None:
            self._each(index, record)
        if error is not None:
            self.num_errors += 1
            if len(self.first_errors) < KEPT_ERRORS:
                self.first_errors.append((index, str(error["message"] if isinstance(error, dict) else error)))
            return
        body = (record.get("response") or {}).get("body") or {}  # of an OpenAI batch
        usage = body.get("usage", record)
        self.num_requests += len(body["data"]) if "data" in body else 1  # embeddings
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.output_tokens += usage.get("completion_tokens", 0)

    def _read(self, drop_errors: bool) -> bool:
        """Read the lines and cut off a damaged end; return whether lines before the end must be removed."""
        good_end = num_dropped = num_before = 0
        with self.path.open("rb") as file:
            for line in file:
                record = self._parse(line, drop_errors)
                if record is None:
                    num_dropped += 1
                    continue
                index, values = record
                self._count(index, values)
                good_end, num_before = file.tell(), num_dropped
        os.ftruncate(self._descriptor, good_end)
        self.num_dropped += num_dropped
        return num_before > 0

    def _parse(self, line: bytes, drop_errors: bool) -> tuple[int, dict[str, Any]] | None:
        """The index and the record of a line; None for a damaged, unwanted or repeated line."""
        index = line_index(line)
        if index is None or not line.endswith(b"\n"):
            return None
        if index not in self._rows or index in self.finished:
            return None
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return None if drop_errors and record.get("error") is not None else (index, record)

    def _rewrite_without_dropped(self, drop_errors: bool) -> None:
        self.finished = IndexSet()
        with replaced(self.path) as file:
            file.writelines(self._kept_lines(drop_errors))
        os.close(self._descriptor)
        self._descriptor = open_own(self.path, os.O_RDWR | os.O_APPEND, *self._like)

    def _kept_lines(self, drop_errors: bool) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            for line in file:
                record = self._parse(line, drop_errors)
                if record is not None:
                    self.finished.add(record[0])
                    yield line


class _Sync:
    """A thread that flushes a file to disk, at most _SYNC_SECONDS after `dirty` was set."""

    def __init__(self, descriptor: int) -> None:
        self.dirty = threading.Event()
        self._descriptor = descriptor
        self._closed = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="nanovllm-sync", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of an earlier flush."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._closed.set()
        self.dirty.set()
        self._thread.join()

    def _run(self) -> None:
        while self.dirty.wait() and not self._closed.wait(_SYNC_SECONDS):
            self.dirty.clear()
            if self._closed.is_set():  # `close` set both just before
                return
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self._error = error


def line_index(line: bytes) -> int | None:
    """The row of a line; None if the line does not tell."""
    found = _INDEX.match(line)
    return None if found is None else int(found[1])


def to_line(record: dict[str, Any], columns: str = "") -> bytes:
    """A record as a line of JSON, followed by the columns that `to_text` made. Lone surrogates become
    escapes."""
    text = to_text(record)
    if columns:
        text = f"{text[:-1]}, {columns[1:]}"
    return f"{text}\n".encode(errors="backslashreplace")


def to_text(record: dict[str, Any]) -> str:
    """A record as JSON, "" for an empty one. Values that JSON does not have, such as dates as ids, become
    strings, and numbers that are not finite become null."""
    if not record:
        return ""
    try:
        return _ENCODER.encode(record)
    except ValueError:  # a number that is not finite
        return _ENCODER.encode(json.loads(json.dumps(record, default=str), parse_constant=lambda name: None))


def ordered_lines(path: Path, rows: range) -> Iterator[bytes]:
    """The lines of a complete output of `rows`, in their order. Stores 8 bytes for each."""
    offsets = array("Q", bytes(8 * len(rows)))
    with path.open("rb") as file:
        offset = 0
        for line in file:
            index = line_index(line)
            assert index is not None, f"{path} was changed by another program"
            offsets[index - rows.start] = offset
            offset += len(line)
        for offset in offsets:
            file.seek(offset)
            yield file.readline()


def put_in_order(path: Path, rows: range) -> None:
    """Rewrite a complete output in the order of the rows, atomically."""
    with replaced(path) as file:
        file.writelines(ordered_lines(path, rows))


def records(lines: Path, rows: range) -> Iterator[dict[str, Any]]:
    """The records of a complete output of lines, in order."""
    return map(_record, ordered_lines(lines, rows))


def table_columns(lines: Path) -> tuple[list[str], dict[str, str]]:
    """What a table of a file of lines has: those of COLUMNS that a row fills, and `_ALWAYS`; and the columns
    of the input, by first appearance, at most MAX_COLUMNS, with the kind of their values: "int", "float",
    "bool" or "str", which is all others."""
    kinds: dict[str, str] = {}
    filled = {*_ALWAYS}
    with lines.open("rb") as file:
        for record in map(_record, file):
            for name, value in record.items():
                if name in COLUMNS:
                    if value not in (None, ""):
                        filled.add(name)
                    continue
                if name not in kinds and len(kinds) == MAX_COLUMNS:
                    continue
                kind, before = _kind(value), kinds.get(name, "")
                both = {kind, before} - {""}
                kinds[name] = (
                    kind or before if len(both) < 2 else "float" if both == {"int", "float"} else "str"
                )
    return [name for name in COLUMNS if name in filled], {name: kind or "str" for name, kind in kinds.items()}


def _kind(value: Any) -> str:
    if value is None:
        return ""
    kind = type(value).__name__
    is_number = kind in ("float", "bool") or (kind == "int" and -(2**63) <= value < 2**63)
    return kind if is_number else "str"


def _record(line: bytes) -> dict[str, Any]:
    """The record of a line; lone surrogates are question marks."""
    record: dict[str, Any] = json.loads(line)
    if b"\\u" in line:
        record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    return record


def as_text(value: Any) -> str:
    """A string, or another value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_csv(
    records: Iterator[dict[str, Any]],
    file: BinaryIO,
    own: Sequence[str],
    columns: Mapping[str, str],
    csv_safe: bool = False,
    delimiter: str = ",",
) -> None:
    """Write a CSV file, with lists as JSON, and None as an empty field.

    own, columns: as of `table_columns`. csv_safe: a string that a spreadsheet would run begins with an
    apostrophe, which makes it text, also in the row of names; numbers are as they are.
    """
    # With the line end "\r\n" the csv module quotes both characters. With "\n" it does not quote "\r", up to
    # Python 3.12.
    lines = SimpleNamespace(write=lambda line: file.write((line.removesuffix("\r\n") + "\n").encode()))
    writer = csv.writer(lines, delimiter=delimiter, lineterminator="\r\n")
    names = [*own, *columns]

    def cell(value: Any) -> Any:
        if isinstance(value, (list, dict, bool)):
            value = as_text(value)
        return f"'{value}" if csv_safe and isinstance(value, str) and value.startswith(_FORMULA) else value

    writer.writerow(map(cell, names))
    for record in records:
        writer.writerow([cell(record.get(name)) for name in names])
