"""Source: reads the rows of a file one by one, each with its place; here, of JSON Lines, CSV and TSV. Input:
several files as one source.

Holds one row at a time. An unreadable row becomes an error in its place and never ends the file. Knows
nothing of prompts.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from sys import getsizeof
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn, TypeAlias

from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.packed import open_rows, unpacked_size
from nanovllm.stats.summary import counted

MAX_ROW_BYTES = 8 * 2**20  # a longer row is an error row
MAX_NESTING = 100  # depth of lists and objects; near 1,000 Python can no longer print or write them
_TOO_DEEP = f"more than {MAX_NESTING} lists and objects within each other"
_LONG_ROW = f"more than {MAX_ROW_BYTES // 2**20} MiB of lines within a quote"
QUOTINGS = ("none", "minimal")
TABLES = {"csv": ",", "tsv": "\t"}  # formats with quoting, and their delimiters
DELIMITERS = (";", "\t", "|", ",")  # of tables that people have
Values: TypeAlias = "dict[str, Any]"
# A row of a table: the number of its first line, the number of its lines, and its fields.
_TableRow: TypeAlias = "tuple[int, int, list[str] | ValueError]"


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


@dataclass(slots=True)
class SourceRow:
    """A row of a file.

    index: counts all rows from 0, including bad ones. place: the file and the line, such as "in.csv: line 7".
    data: its values, an unparsed line of JSON, or the reason why it could not be read. num_lines: its lines.
    """

    index: int
    place: str
    data: Values | bytes | ValueError
    num_lines: int = 1

    @property
    def num_bytes(self) -> int:
        """About what the row takes in memory: its line, or its strings."""
        if isinstance(self.data, dict):
            return sum(getsizeof(value) for value in self.data.values() if isinstance(value, str))
        return 0 if isinstance(self.data, ValueError) else len(self.data)

    def values(self) -> Values:
        """The row as a dictionary. ValueError with the place and the reason if it is not one."""
        if isinstance(self.data, ValueError):
            raise ValueError(f"{self.place}: {self.data}")
        if isinstance(self.data, dict):
            return self.data
        try:
            return _parse_json_line(self.data)
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}") from None


class Source(ABC):
    """A file of rows. Can be read any number of times, always with the same indexes."""

    format: str  # for the journal
    columns: list[str] | None = None  # of all rows; None if each row has its own
    num_rows: int | None = None  # None: not known before the end
    wanted: set[str] | None = None  # the columns to read from Parquet; None: all
    reading: Mapping[str, str] = MappingProxyType({})  # how, where that is not as files mostly are

    def __init__(self, path: Path) -> None:
        """JobRefusedError for a compressed file that is damaged."""
        self.path = path
        self.name = path.name  # in the places of rows
        self._stat = path.stat()
        self.size = self._stat.st_size
        self.length = unpacked_size(path, str(path))
        self.position = 0  # bytes of `length` read so far, for progress

    @abstractmethod
    def rows(self) -> Iterator[SourceRow]:
        """Read the file from its beginning."""

    @property
    def most_rows(self) -> int:
        """An upper bound of the number of rows: each row has at least one byte."""
        return self.length if self.num_rows is None else self.num_rows

    def was_written(self) -> bool:
        """Whether the file was written or touched since it was first opened."""
        now = self.path.stat()
        return (now.st_size, now.st_mtime_ns) != (self.size, self._stat.st_mtime_ns)


class Input(Source):
    """Several files as one, and which of their rows are read. Indexes count the rows of all files.

    first: the index of the first row that is read. limit: how many of all rows there are at most. shard:
    (i, n) for the i-th of n parts of these rows, which are counted first.
    """

    def __init__(
        self, parts: Sequence[Source], limit: int | None = None, shard: tuple[int, int] | None = None
    ) -> None:
        self.parts = parts
        self.path, self.name = parts[0].path, parts[0].name
        self.size = sum(part.size for part in parts)
        self.length = sum(part.length for part in parts)
        self.position = self.first = 0
        self._end = limit
        self.format = " and ".join(dict.fromkeys(part.format for part in parts))
        names = dict.fromkeys(name for part in parts for name in part.reading)
        self.reading = {name: " ".join(part.reading.get(name, "-") for part in parts) for name in names}
        known = [part.num_rows for part in parts if part.num_rows is not None]
        if shard is not None or limit is not None:
            number, of = shard or (1, 1)
            total = sum(1 for _ in self.rows()) if len(known) < len(parts) else sum(known)
            total = total if limit is None else min(total, limit)
            self.first, self._end = total * (number - 1) // of, total * number // of
            self.num_rows = self._end - self.first
        elif len(known) == len(parts):
            self.num_rows = sum(known)

    def rows(self) -> Iterator[SourceRow]:
        index = before = 0
        for part in self.parts:
            for row in part.rows():
                if index == self._end:
                    return
                self.position = before + part.position
                if index >= self.first:
                    yield row if index == row.index else replace(row, index=index)
                index += 1
            before += part.length

    @property
    def span(self) -> range:
        """The indexes that rows may have."""
        most = sum(part.most_rows for part in self.parts)
        return range(self.first, most if self._end is None else self._end)

    def was_written(self) -> bool:
        return any(part.was_written() for part in self.parts)


class JSONLinesSource(Source):
    """A JSON object on every line, in UTF-8. Blank lines are skipped, and count only for line numbers."""

    format = "jsonlines"

    def rows(self) -> Iterator[SourceRow]:
        index = 0
        with open_rows(self.path) as file:
            for number, line in enumerate(_lines(file), 1):
                self.position = file.tell()
                if not line.strip():
                    continue
                is_long = len(line) > MAX_ROW_BYTES
                yield SourceRow(index, f"{self.name}: line {number}", too_long() if is_long else line)
                index += 1


class CSVSource(Source):
    """Comma- or tab-separated values in UTF-8; the first row names the columns. Blank lines are no rows.

    With `quoting` "minimal", a field in quotes may have delimiters, line ends and doubled quotes; a quote
    that is not closed, or stands alone within a quoted field, makes an error row, and no text. With "none" a
    quote is text, and each line is a row.
    """

    def __init__(
        self, path: Path, quoting: str | None = None, delimiter: str | None = None, format: str = "csv"
    ) -> None:
        """quoting, delimiter: None for the default of the format. JobRefusedError for wrong column names."""
        super().__init__(path)
        self.format = format
        self.delimiter = delimiter or TABLES[format]
        self.quoting = quoting or ("minimal" if format == "csv" else self._tsv_quoting())
        self.reading = {"quoting": self.quoting} if self.quoting != "minimal" else {}
        if self.delimiter != TABLES[format]:
            self.reading["delimiter"] = self.delimiter
        csv.field_size_limit(MAX_ROW_BYTES)
        with open_rows(self.path) as file:
            _, _, first = next(self._table_rows(file), (1, 1, []))
        if delimiter is None and (isinstance(first, ValueError) or len(first) == 1):
            self._refuse_another_delimiter()
        if isinstance(first, ValueError):
            raise JobRefusedError(f"{path}: the row of column names: {first}")
        self.columns = unique_names(first, path)

    def rows(self) -> Iterator[SourceRow]:
        assert self.columns is not None
        with open_rows(self.path) as file:
            found = self._table_rows(file)
            next(found, None)  # the names
            for index, (line, num_lines, fields) in enumerate(found):
                self.position = file.tell()
                values = self._values(fields, self.columns)
                yield SourceRow(index, f"{self.name}: line {line}", values, num_lines)

    def _refuse_another_delimiter(self) -> None:
        """JobRefusedError if the row of column names, which is one column, is several with another one."""
        own = self.delimiter
        for self.delimiter in DELIMITERS:
            with open_rows(self.path) as file:
                _, _, names = next(self._table_rows(file), (1, 1, []))
            if self.delimiter != own and isinstance(names, list) and len(names) > 1:
                raise JobRefusedError(
                    f"{self.path}: the row of column names is one column with {own!r} between columns, and "
                    f"{len(names)} with {self.delimiter!r}: {', '.join(map(repr, names[:8]))}. Pass "
                    f"--delimiter {self.delimiter!r}, or --delimiter {own!r} if it is one column"
                )
        self.delimiter = own

    def _tsv_quoting(self) -> str:
        """Quotes are text, unless a field on one of the lines begins and ends with a quote, and has doubled
        quotes, and no others, between them."""
        tab = re.escape(self.delimiter)
        doubled = re.compile(rf'(?:^|{tab})"[^"{tab}]*(?:""[^"{tab}]*)+"(?={tab}|$)')
        with open_rows(self.path) as file:
            has_doubled = any(b'""' in line and doubled.search(_text(line)) for line in _lines(file))
        return "minimal" if has_doubled else "none"

    def _values(self, fields: list[str] | ValueError, columns: list[str]) -> Values | ValueError:
        if isinstance(fields, ValueError):
            return fields
        if len(fields) != len(columns):
            found = counted(len(fields), "field")
            return ValueError(f"it has {found}, and the row of column names has {len(columns)}")
        for field in fields:
            try:
                field.encode()
            except UnicodeEncodeError as error:  # `surrogateescape` stands for bytes that are not UTF-8
                return _not_utf8(ord(field[error.start]) & 0xFF, error.start)
        return dict(zip(columns, fields, strict=True))

    def _table_rows(self, file: BinaryIO) -> Iterator[_TableRow]:
        return self._lines_as_rows(file) if self.quoting == "none" else self._quoted_rows(file)

    def _lines_as_rows(self, file: BinaryIO) -> Iterator[_TableRow]:
        for number, line in enumerate(_lines(file), 1):
            text = _text(line)
            if len(line) > MAX_ROW_BYTES:
                yield number, 1, too_long()
            elif text:
                yield number, 1, text.split(self.delimiter)

    def _quoted_rows(self, file: BinaryIO) -> Iterator[_TableRow]:
        """Rows of fields. After a bad row the next one begins after its first line, so that an unclosed quote
        spoils no other row."""
        number = 0  # of lines before the current row
        lines = _RowLines(_lines(file))
        while True:
            reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
            while True:
                lines.begin_row()
                fields: list[str] | ValueError
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    fields = _not_csv(error)
                if lines.num_bytes > MAX_ROW_BYTES:
                    fields = too_long() if len(lines.row) == 1 else _not_csv(_LONG_ROW)
                if isinstance(fields, ValueError):
                    break
                if fields:
                    yield number + 1, len(lines.row), fields
                number += len(lines.row)
            lines.go_back()
            number += 1
            yield number, 1, fields


def unique_names(names: list[str], path: Path) -> list[str]:
    """The names of columns; JobRefusedError if a name is repeated."""
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise JobRefusedError(
            f"{path}: several columns are named {', '.join(map(repr, doubled))}; rename them"
        )
    return names


def _parse_json_line(line: bytes) -> Values:
    """Return the JSON object on a line. ValueError if there is none."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(line[error.start], error.start) from None
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"it must be a JSON object {{...}}, not a {type(values).__name__}")
    return values


def parse_json(text: str) -> Any:
    """Parse a string as JSON. ValueError if it is not JSON, or nested too deeply."""
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    depth, level = 1, [value] if text.count("[") + text.count("{") > MAX_NESTING else []
    while level and depth <= MAX_NESTING:
        inner = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
        depth, level = depth + 1, [each for each in inner if isinstance(each, (dict, list))]
    if level:
        raise ValueError(_TOO_DEEP)
    return value


class _RowLines:
    """Lines as text, for a row that may have several; they end where the row is too long."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines, self._again = lines, deque[bytes]()
        self.begin_row()

    def begin_row(self) -> None:
        self.row: list[bytes] = []
        self.num_bytes = 0

    def go_back(self) -> None:
        """All lines of the row but the first come again."""
        self._again.extendleft(self.row[:0:-1])

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.num_bytes > MAX_ROW_BYTES:
            raise StopIteration
        line = self._again.popleft() if self._again else next(self._lines)
        self.num_bytes += len(line)
        self.row.append(line)
        return line.decode("utf-8", "surrogateescape")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, without a mark of UTF-8; a line that is too long is cut to one byte more than the
    limit."""
    mark = codecs.BOM_UTF8
    while line := file.readline(MAX_ROW_BYTES + 1):
        rest = line
        while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_ROW_BYTES + 1)
        yield line.removeprefix(mark)
        mark = b""


def _text(line: bytes) -> str:
    """A line without its end; bytes that are not UTF-8 become lone surrogates."""
    return line.decode("utf-8", "surrogateescape").removesuffix("\n").removesuffix("\r")


def _not_csv(error: csv.Error | str) -> ValueError:
    if "new-line character" in str(error):
        return ValueError(
            "a carriage return stands outside quotes; put the field into quotes, pass --quoting none, or end "
            "lines with \\n, for example with `tr '\\r' '\\n'`"
        )
    return ValueError(
        f"it is not CSV: {error}; close every quote, and double those inside, or pass --quoting none"
    )


def too_long() -> ValueError:
    return ValueError(f"it is longer than {MAX_ROW_BYTES // 2**20} MiB")


def _not_utf8(byte: int, position: int) -> ValueError:
    return ValueError(
        f"it is not UTF-8: byte 0x{byte:02x} at position {position}; convert the file, for example with "
        "`iconv -f latin1 -t utf-8`"
    )
