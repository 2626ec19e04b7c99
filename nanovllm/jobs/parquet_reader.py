"""The process that reads a Parquet file for `jobs/parquet.py`, with pyarrow and a limit on memory.

A file of a few bytes may unpack to gigabytes, and pyarrow ends its process at some damaged ones: here neither
harms the job. What is read goes to standard output, pickled: lists of rows, and at the end of each row group
None, or what ended it: MemoryError if a row needs more than the limit, OSError if the system cannot read the
file, ValueError if the row group is damaged. Imports nothing of the package, to start at once.
"""

from __future__ import annotations

import os
import pickle
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet

_THREADS = 2**25  # bytes that the stacks of pyarrow's threads may take


def send(message: object) -> None:
    """Give the job a value, or an error in place of it."""
    pickle.dump(message, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def read_file(
    path: str, wanted: list[str] | None, start: tuple[int, int, int], limit: int, longest: tuple[int, str]
) -> None:
    """Send what a file holds.

    wanted: the columns to read; None: send the names of all and the number of rows of each row group, or an
    error. start: the row group to begin with, how many of its rows to leave out, and how many to read at
    once. limit: bytes of memory. longest: bytes of a row, and the error of one that has more.
    """
    first, left_out, at_once = start
    _limit_memory(limit)
    try:
        file = pyarrow.parquet.ParquetFile(path, buffer_size=2**20)
        groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        names = file.schema_arrow.names
    except (OSError, pyarrow.ArrowException, ValueError) as error:  # such as a name that is not UTF-8
        send(_plain(error))
        return
    if wanted is None:
        send((names, groups))
        return
    for number in range(first, len(groups)):
        send(_ended(file, number, wanted, left_out, at_once, longest))
        left_out = 0


def _plain(error: Exception) -> Exception:
    """The error in a form that any process can load."""
    number = getattr(error, "errno", None)
    return ValueError(str(error)) if number is None else OSError(number, os.strerror(number))


def _limit_memory(limit: int) -> None:
    """Limit what this process takes from now on, where the system can: on Linux."""
    held = Path("/proc/self/statm")
    if held.exists():
        most = int(held.read_text().split()[0]) * resource.getpagesize() + limit + _THREADS
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _ended(
    file: Any, number: int, wanted: list[str], sent: int, at_once: int, longest: tuple[int, str]
) -> Exception | None:
    """Send the rows of a row group from `sent` on, fewer at once each time that they need too much memory.
    Return what ended that early."""
    while at_once:
        seen = 0
        try:
            for batch in file.iter_batches(at_once, row_groups=[number], columns=wanted, use_threads=False):
                new = batch.slice(max(0, sent - seen))
                seen += batch.num_rows
                for rows in _values_of(_decoded(new), longest) if new.num_rows else ():
                    send(rows)
                    sent += len(rows)
            return None
        except MemoryError:
            at_once //= 16
        except (OSError, ValueError, IndexError, RecursionError, pyarrow.ArrowException) as error:
            return _plain(error)
    return MemoryError()


def _decoded(batch: Any) -> Any:
    """A batch whose columns do not share values, so that its size is that of its rows."""
    columns = batch.columns
    if not any(isinstance(column, pyarrow.DictionaryArray) for column in columns):
        return batch
    plain = [
        each.dictionary_decode() if isinstance(each, pyarrow.DictionaryArray) else each for each in columns
    ]
    return pyarrow.RecordBatch.from_arrays(plain, names=batch.schema.names)


def _values_of(batch: Any, longest: tuple[int, str]) -> Iterator[list[Any]]:
    """The rows of a batch, some at a time. An error takes the place of a row that is too long, or has a value
    that Python cannot hold, such as a time in nanoseconds or a string that is not UTF-8."""
    rows: list[Any] = [ValueError(longest[1])]
    if batch.nbytes <= longest[0]:
        try:
            rows = batch.to_pylist()
        except MemoryError:
            raise
        except Exception as error:  # of many kinds
            rows = [ValueError(f"it cannot be read: {error}")]
    if len(rows) == batch.num_rows:
        yield rows
        return
    half = batch.num_rows // 2
    yield from _values_of(batch.slice(0, half), longest)
    yield from _values_of(batch.slice(half), longest)
