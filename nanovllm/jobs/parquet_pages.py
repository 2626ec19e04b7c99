"""How many rows of a Parquet file can be unpacked at once, from the headers of its pages.

A page of a few bytes may unpack to gigabytes, one value of a dictionary may be that of every row, and a list
may have any length. The footer may say what it likes of sizes, so this goes by what pyarrow itself goes by:
the header of each page, and where that is not enough, the lengths in the page. Reads no values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

MAX_UNPACKED = 2**30  # bytes in memory at once, for all columns that are read
_MAX_ROWS = 256  # read at once
_VALUE_BYTES = 32  # of a value in memory: its levels, its offset, and what else has a fixed width
_MAX_LENGTHS = 2**24  # lengths to read in one column of a row group
_HEADER_BYTES = (
    2**8,
    2**12,
    2**16,
    2**20,
    2**24,
)  # how much to read for a header; pyarrow takes at most the last
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # kinds of pages
_CODECS = ("", "snappy", "gzip", "lzo", "brotli", "lz4", "zstd", "lz4_raw")  # by their numbers in the footer
_RLE, _DELTA_LENGTHS, _DELTA_STRINGS = 3, 6, 7  # encodings
_Fields: TypeAlias = "dict[int, Any]"  # of a Thrift struct, by their ids


class Footer:
    """The row groups of a Parquet file. Read here, because pyarrow ends the process at some damaged ones."""

    def __init__(self, path: Path) -> None:
        """ValueError if there is none."""
        self.path = path
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8))
            (length,) = struct.unpack("<I", file.read(4).rjust(4))
            file.seek(max(0, path.stat().st_size - 8 - length))
            self._data = file.read(length)
        try:
            self._groups = _fields(self._data, 0, lazy=True)[0].get(4, [])
        except (IndexError, RecursionError):
            raise ValueError("its footer is damaged") from None

    def chunks(self, group: int) -> list[_Fields]:
        """What the footer says of each column of a row group."""
        fields, _ = _fields(self._data, self._groups[group])
        return [chunk.get(3, {}) for chunk in fields.get(1, [])]


def rows_at_once(file: Any, footer: Footer, group: int, names: list[str]) -> int:
    """How many rows of a row group can be read at once with these columns: _MAX_ROWS or fewer, 0 for none.

    file: the pyarrow.parquet.ParquetFile of the footer's file.
    """
    chunks = footer.chunks(group)
    leaves = [file.schema.column(number) for number in range(len(chunks))]
    with footer.path.open("rb") as opened:
        columns = [
            Column(opened, chunk, leaf)
            for chunk, leaf in zip(chunks, leaves, strict=True)
            if any(leaf.path == name or leaf.path.startswith(f"{name}.") for name in names)
        ]
        if sum(column.at_most() for column in columns) <= MAX_UNPACKED:
            return _MAX_ROWS
        rows = _MAX_ROWS
        while rows and sum(column.bytes_of(rows) for column in columns) > MAX_UNPACKED:
            rows //= 2
        return rows


class _Page(NamedTuple):
    kind: int
    num_values: int
    encoding: int
    size: int  # unpacked, if it is packed
    start: int  # of its content in the file
    stored: int  # bytes in the file
    levels: int | None = None  # bytes of repetition levels before what is packed; None: in it; -1: unknown


class Column:
    """One column of a row group: what its values need in memory."""

    def __init__(self, file: BinaryIO, chunk: _Fields, schema: Any) -> None:
        self._file, self._chunk, self._schema = file, chunk, schema
        fixed = schema.length if schema.physical_type == "FIXED_LEN_BYTE_ARRAY" else 0
        self._value = _VALUE_BYTES + fixed
        self.num_values = self.num_pages = 0
        self._dictionary = self._page = self._extra = 0  # bytes of the largest pages, and of a value at most
        self._least = last = 0  # values of the page that has the fewest, but for the last one
        for page in self._pages():
            size = max(page.size, page.stored)
            if page.kind == _DICTIONARY:
                self._dictionary = max(self._dictionary, size)
                continue
            if page.encoding == _DELTA_STRINGS:  # a value may begin like the one before it
                self._extra = max(self._extra, size)
            if page.encoding in (_DELTA_LENGTHS, _DELTA_STRINGS):
                size += 8 * page.num_values  # all lengths of a page are unpacked
            self._page = max(self._page, size)
            if self.num_pages:
                self._least = last if self.num_pages == 1 else min(self._least, last)
            last = page.num_values
            self.num_values += last
            self.num_pages += 1

    def at_most(self) -> int:
        """Bytes of _MAX_ROWS rows: a bound that needs no page."""
        values = self.num_values if self._schema.max_repetition_level else min(_MAX_ROWS, self.num_values)
        shared = self._dictionary if self._schema.physical_type == "BYTE_ARRAY" else 0
        return self._bytes(values, max(shared, self._extra))

    def bytes_of(self, rows: int) -> int:
        """Bytes in memory while so many rows are read."""
        return self._bytes(
            min(rows * self.longest_list, self.num_values), max(self._longest_text, self._extra)
        )

    def _bytes(self, values: int, longest: int) -> int:
        # Neighbours lie in so many pages at most. While a batch is built, there are copies.
        touched = min(self.num_pages, 2 + values // max(1, self._least))
        return 3 * values * (self._value + longest) + self._page * (1 + touched) + 2 * self._dictionary

    @cached_property
    def _longest_text(self) -> int:
        """Bytes of the longest value in the dictionary, or a bound."""
        if self._schema.physical_type != "BYTE_ARRAY":
            return 0
        longest = 0
        for page in self._pages():
            if page.kind == _DICTIONARY:
                content = self._unpacked(page)
                if content is None or page.num_values > _MAX_LENGTHS:
                    return self._dictionary
                place = 0
                while place + 4 <= len(content):
                    (length,) = struct.unpack_from("<I", content, place)
                    longest = max(longest, length)
                    place += 4 + length
        return min(longest, self._dictionary)

    @cached_property
    def longest_list(self) -> int:
        """Values of the row that has the most, or a bound; 1 without lists."""
        if not self._schema.max_repetition_level:
            return 1
        width = int(self._schema.max_repetition_level).bit_length()
        lengths = _Lengths()
        for page in self._pages():
            if page.kind != _DICTIONARY:
                levels = self._levels(page)
                if levels is None or not lengths.add(levels, page.num_values, width):
                    return self.num_values
        return lengths.longest

    def _levels(self, page: _Page) -> bytes | memoryview | None:
        """The repetition levels of a page; None if they cannot be read."""
        if page.levels is not None:
            self._file.seek(page.start)
            return self._file.read(min(page.levels, page.stored)) if page.levels >= 0 else None
        content = self._unpacked(page)
        if content is None or len(content) < 4:
            return None
        return content[4 : 4 + struct.unpack_from("<I", content)[0]]

    def _unpacked(self, page: _Page) -> memoryview | None:
        """The content of a page; None if it is too large or damaged, or of an unknown kind."""
        import pyarrow

        if page.size > MAX_UNPACKED // 2:
            return None
        self._file.seek(page.start)
        content = self._file.read(page.stored)
        codec = self._chunk.get(4, 0)
        if codec == 0:
            return memoryview(content)
        try:
            return memoryview(pyarrow.decompress(content, page.size, _CODECS[codec])).cast("B")
        except (OSError, ValueError, IndexError, pyarrow.ArrowException):
            return None

    def _pages(self) -> Iterator[_Page]:
        """The pages as pyarrow finds them: one after the other, until they have all values. They end where a
        header is damaged, which pyarrow cannot read either."""
        num_values, size, start, dictionary = (self._chunk.get(number, 0) for number in (5, 7, 9, 11))
        if 0 < dictionary < start:
            start = dictionary
        end = start + size
        seen = 0
        while seen < num_values and 0 <= start < end:
            page = _read_page(self._file, start)
            if page is None:
                return
            if page.kind in (_DATA, _DICTIONARY, _DATA_V2):
                yield page
            seen += page.num_values if page.kind in (_DATA, _DATA_V2) else 0
            start = page.start + page.stored


class _Lengths:
    """The longest list in levels that are given page by page: each 0 begins a row."""

    def __init__(self) -> None:
        self._longest = self._current = self._num_runs = 0

    @property
    def longest(self) -> int:
        return max(self._longest, self._current, 1)

    def add(self, levels: bytes | memoryview, num_values: int, width: int) -> bool:
        """Take in the levels of a page, runs of equal or of packed numbers; False if they cannot be read."""
        place = 0
        try:
            while num_values > 0:
                self._num_runs += 1
                if self._num_runs > _MAX_LENGTHS:
                    return False
                head, place = _varint(levels, place)
                if head & 1:
                    size = min((head >> 1) * width, len(levels) - place)
                    if size <= 0:
                        return False
                    num_values -= self._packed(levels[place : place + size], num_values, width)
                    place += size
                else:
                    count = min(head >> 1, num_values)
                    level, place = levels[place], place + 1
                    if count and not level:
                        self._longest = max(self._longest, self._current)
                        self._current = 1
                    else:
                        self._current += count
                    num_values -= count
        except IndexError:
            return False
        return True

    def _packed(self, packed: bytes | memoryview, num_values: int, width: int) -> int:
        """Take in packed numbers; return how many."""
        found = 0
        for start in range(0, len(packed), width * 2**16):
            part = np.frombuffer(packed[start : start + width * 2**16], np.uint8)
            bits = np.unpackbits(part, bitorder="little")
            count = min(len(bits) // width, num_values - found)
            rows = np.flatnonzero(~bits[: count * width].reshape(count, width).any(1))
            if len(rows):
                inner = int(np.diff(rows).max(initial=0))
                self._longest = max(self._longest, self._current + int(rows[0]), inner)
                self._current = count - int(rows[-1])
            else:
                self._current += count
            found += count
        return found


def _read_page(file: BinaryIO, start: int) -> _Page | None:
    """The header of the page at `start`; None if it is damaged."""
    for size in _HEADER_BYTES:
        file.seek(start)
        head = file.read(size)
        try:
            fields, length = _fields(head, 0)
        except IndexError:
            if len(head) < size:
                return None
            continue
        except (ValueError, RecursionError):
            return None
        kind, unpacked, stored = (fields.get(number, -1) for number in (1, 2, 3))
        about = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, -1), {})
        num_values = about.get(1, 0)
        if min(kind, unpacked, stored, num_values) < 0:
            return None
        levels = about.get(6, 0) if kind == _DATA_V2 else None
        encoding = about.get(4 if kind == _DATA_V2 else 2, 0)
        if kind == _DATA and about.get(4, _RLE) != _RLE:
            levels = -1
        return _Page(kind, num_values, encoding, unpacked, start + length, stored, levels)
    return None


def _fields(data: bytes, place: int, lazy: bool = False) -> tuple[_Fields, int]:
    """The integers, structs and lists of structs of a struct in Thrift's compact protocol, and where it ends.
    IndexError if the data ends before. lazy: of lists of structs, only where each struct is."""
    fields: _Fields = {}
    number = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            number += head >> 4
        else:
            number, place = _integer(data, place)
        kind = head & 15
        if kind in (5, 6):
            fields[number], place = _integer(data, place, 32 if kind == 5 else 64)
        elif kind == 9 and data[place] & 15 == 12:
            count, place = data[place] >> 4, place + 1
            if count == 15:
                count, place = _varint(data, place)
            fields[number] = found = []
            for _ in range(count):
                inner, end = (None, _skip(data, place, 12)) if lazy else _fields(data, place)
                found.append(place if lazy else inner)
                place = end
        elif kind == 12:
            fields[number], place = _fields(data, place)
        elif kind > 2:  # others are in the head
            place = _skip(data, place, kind)
    return fields, place + 1


def _skip(data: bytes, place: int, kind: int) -> int:
    """Where a value of the compact protocol ends."""
    if kind in (1, 2, 3):
        place += 1
    elif kind in (4, 5, 6):
        _, place = _varint(data, place)
    elif kind in (7, 13):
        place += 8 if kind == 7 else 16
    elif kind == 8:
        length, place = _varint(data, place)
        place += length
    elif kind in (9, 10):
        head, place = data[place], place + 1
        count = head >> 4
        if count == 15:
            count, place = _varint(data, place)
        for _ in range(count):
            place = _skip(data, place, head & 15)
    elif kind == 11:
        count, place = _varint(data, place)
        head, place = (data[place], place + 1) if count else (0, place)
        for each in range(2 * count):
            place = _skip(data, place, head & 15 if each % 2 else head >> 4)
    elif kind == 12:
        _, place = _fields(data, place, lazy=True)
    else:
        raise ValueError(f"there is no kind {kind}")
    if place > len(data):
        raise IndexError
    return place


def _integer(data: bytes, place: int, bits: int = 32) -> tuple[int, int]:
    """A signed number, and where it ends."""
    value, place = _varint(data, place)
    value &= (1 << bits) - 1
    return (value >> 1) ^ -(value & 1), place


def _varint(data: bytes | memoryview, place: int) -> tuple[int, int]:
    """A number of seven bits in each byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
        if shift > 63:
            raise IndexError
