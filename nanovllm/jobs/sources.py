"""Source: reads the rows of a file one by one, each with its place; here, of JSON Lines, CSV and TSV.

Holds one row at a time. An unreadable row becomes an error in its place and never ends the file. Knows
nothing of prompts.
"""

from __future__ import annotations

import codecs
import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias

from nanovllm.engine.stats import counted
from nanovllm.jobs.errors import JobRefusedError

MAX_ROW_BYTES = 8 * 2**20  # of a line or a CSV field; a longer one is an error row
MAX_NESTING = 100  # depth of lists and objects; near 1,000 Python can no longer print or write them
TOO_DEEP = f"more than {MAX_NESTING} lists and objects within each other"
Values: TypeAlias = "dict[str, Any]"


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


DECODER = json.JSONDecoder(parse_constant=_no_number)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row of a file.

    index: counts all rows from 0, including bad ones. place: in the file, such as "line 7". data: its values,
    an unparsed line of JSON, or the reason why it could not be read.
    """

    index: int
    place: str
    data: Values | bytes | ValueError

    def values(self) -> Values:
        """The row as a dictionary. ValueError with the place and the reason if it is not one."""
        if isinstance(self.data, ValueError):
            raise ValueError(f"{self.place}: {self.data}")
        if isinstance(self.data, dict):
            return self.data
        try:
            return parse_json_line(self.data)
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}") from None


class Source(ABC):
    """A file of rows. Can be read any number of times, always with the same indexes."""

    columns: list[str] | None = None  # of all rows; None if each row has its own
    num_rows: int | None = None  # None: not known before the end
    wanted: set[str] | None = None  # the columns to read from Parquet; None: all

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stat = path.stat()
        self.size = self._stat.st_size
        self.position = 0  # bytes read so far, for progress

    @abstractmethod
    def rows(self) -> Iterator[SourceRow]:
        """Read the file from its beginning."""

    @property
    def most_rows(self) -> int:
        """An upper bound of the number of rows: each row has at least one byte."""
        return self.size if self.num_rows is None else self.num_rows

    def was_written(self) -> bool:
        """Whether the file was written or touched since it was first opened."""
        now = self.path.stat()
        return (now.st_size, now.st_mtime_ns) != (self.size, self._stat.st_mtime_ns)


class JSONLinesSource(Source):
    """A JSON object on every line, in UTF-8. Blank lines are skipped."""

    def rows(self) -> Iterator[SourceRow]:
        index = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                self.position = file.tell()
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                is_long = len(line) > MAX_ROW_BYTES
                yield SourceRow(index, f"line {number}", _too_long() if is_long else line)
                index += 1


class CSVSource(Source):
    """Comma-separated values in UTF-8; the first row names the columns. Blank lines are no rows.

    A quote that is not closed, or stands alone within a quoted field, makes an error row, and no text.
    """

    delimiter = ","

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # For the current row: whether a line was cut off, and where its first line ends.
        self._is_long = False
        self._first_line_end: int | None = None
        csv.field_size_limit(MAX_ROW_BYTES)
        with self.path.open("rb") as file:
            first = next(self._reader(file), [])
        if isinstance(first, ValueError):
            raise JobRefusedError(f"{path}: the row of column names: {first}")
        self.columns = unique_names(first, path)

    def rows(self) -> Iterator[SourceRow]:
        assert self.columns is not None
        with self.path.open("rb") as file:
            found = self._reader(file)
            next(found, None)  # the names
            for index, fields in enumerate(found):
                self.position = file.tell()
                yield SourceRow(index, f"row {index + 2}", self._values(fields, self.columns))

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

    def _reader(self, file: BinaryIO) -> Iterator[list[str] | ValueError]:
        """Rows of fields. After a bad row the next one begins after its first line, so that an unclosed quote
        spoils no other row."""
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        while True:
            error = yield from self._good_rows(file)
            if error is None:
                return
            file.seek(self._first_line_end or 0)
            yield error

    def _good_rows(self, file: BinaryIO) -> Generator[list[str], None, ValueError | None]:
        """Yield rows up to the end or a bad row; return the error of the bad row."""
        reader = csv.reader(self._decoded(file), delimiter=self.delimiter, strict=True)
        while True:
            self._is_long, self._first_line_end = False, None
            try:
                fields = next(reader)
            except StopIteration:
                return None
            except csv.Error as error:
                if not self._is_long:
                    return ValueError(f"it is not CSV: {error}; close every quote, and double those inside")
            if self._is_long:
                return _too_long()
            if fields:
                yield fields

    def _decoded(self, file: BinaryIO) -> Iterator[str]:
        for line in _lines(file):
            self._is_long = self._is_long or len(line) > MAX_ROW_BYTES
            if self._first_line_end is None:
                self._first_line_end = file.tell()
            yield line.decode("utf-8", "surrogateescape")


class TSVSource(CSVSource):
    """The same with tabs."""

    delimiter = "\t"


def unique_names(names: list[str], path: Path) -> list[str]:
    """The names of columns; JobRefusedError if a name is repeated."""
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise JobRefusedError(
            f"{path}: several columns are named {', '.join(map(repr, doubled))}; rename them"
        )
    return names


def parse_json_line(line: bytes) -> Values:
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
        value = DECODER.decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    depth, level = 1, [value] if text.count("[") + text.count("{") > MAX_NESTING else []
    while level and depth <= MAX_NESTING:
        inner = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
        depth, level = depth + 1, [each for each in inner if isinstance(each, (dict, list))]
    if level:
        raise ValueError(TOO_DEEP)
    return value


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; a line that is too long is cut to one byte more than the limit."""
    while line := file.readline(MAX_ROW_BYTES + 1):
        rest = line
        while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_ROW_BYTES + 1)
        yield line


def _too_long() -> ValueError:
    return ValueError(f"it is longer than {MAX_ROW_BYTES // 2**20} MiB")


def _not_utf8(byte: int, position: int) -> ValueError:
    return ValueError(
        f"it is not UTF-8: byte 0x{byte:02x} at position {position}; convert the file, for example with "
        "`iconv -f latin1 -t utf-8`"
    )
