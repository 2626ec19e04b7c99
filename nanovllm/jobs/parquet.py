"""Parquet files: reads rows and writes records, a small batch at a time. Needs pyarrow, the extra `jobs`."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice, repeat
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, BinaryIO

from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.output import COLUMNS, LISTS, NUMBERS, as_text
from nanovllm.jobs.sources import MAX_ROW_BYTES, Source, SourceRow, Values, too_long, unique_names

MAX_UNPACKED = 2**30  # bytes of memory that the process may take to read

_ROWS_AT_ONCE = 256  # to read, at most
_WRITTEN_ROWS = 1024  # at once
_START = """
import pickle, runpy, sys
sys.path[:], program, asked = pickle.load(sys.stdin.buffer)
runpy.run_path(program)["read_file"](*asked)
"""


class ParquetSource(Source):
    """A Parquet file. A process of its own reads it, see `jobs/parquet_reader.py`."""

    format = "parquet"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        import_pyarrow()
        with closing(_read(path, None)) as messages:
            found = next(messages, ValueError("pyarrow ends its process at it"))
        if isinstance(found, OSError):
            raise found
        if isinstance(found, ValueError):
            raise JobRefusedError(f"{path} is no Parquet file that can be read: {found}")
        names, self._groups = found
        self.columns = unique_names(names, path)
        self.num_rows = sum(self._groups)

    def rows(self) -> Iterator[SourceRow]:
        with closing(self._values()) as found:
            for index, values in enumerate(found):
                self.position = self.length * (index + 1) // (self.num_rows or 1)
                yield SourceRow(index, f"{self.name}: row {index + 1}", values)

    def _values(self) -> Generator[Values | ValueError]:
        """The values of all rows. If a row group is damaged, an error takes the place of each row from the
        damaged batch on; if a row would take too much memory, from that row on. OSError if the system cannot
        read the file."""
        assert self.columns is not None
        names = [name for name in self.columns if self.wanted is None or name in self.wanted]
        group, read, at_once = 0, 0, _ROWS_AT_ONCE
        while group < len(self._groups):
            with closing(_read(self.path, names, (group, read, at_once))) as messages:
                for message in messages:
                    if isinstance(message, list):
                        yield from message
                        read += len(message)
                        continue
                    yield from self._failed(group, read, message)
                    group, read, at_once = group + 1, 0, _ROWS_AT_ONCE
            if group < len(self._groups):  # its process is dead
                at_once //= 16
                if not at_once:
                    yield from self._failed(group, read, ValueError("pyarrow ends its process at them"))
                    group, read, at_once = group + 1, 0, _ROWS_AT_ONCE

    def _failed(self, group: int, read: int, error: Exception | None) -> Iterator[ValueError]:
        """An error in place of each row of a row group from `read` on; the error of the process is None if
        these rows are not there."""
        if isinstance(error, OSError):
            raise error
        first, end = (sum(self._groups[:group]) + rows for rows in (read, self._groups[group]))
        rows = f"its rows {first + 1} to {end}"
        if isinstance(error, MemoryError):
            text = (
                f"row group {group} of the file takes more than {MAX_UNPACKED / 2**30:g} GiB of memory to "
                f"unpack, and {rows} are not read; write it with smaller row groups, such as "
                "pyarrow.parquet.write_table(table, path, row_group_size=100)"
            )
        else:
            why = "it ends early" if error is None else " ".join(str(error).split())
            text = (
                f"row group {group} of the file is damaged, and {rows} cannot be read ({why}); replace the "
                "file by a good copy"
            )
        yield from repeat(ValueError(text), end - first)


def _read(path: Path, wanted: list[str] | None, start: tuple[int, int, int] = (0, 0, 1)) -> Generator[Any]:
    """What `read_file` of `jobs/parquet_reader.py` sends; it ends early if that process dies."""
    memory = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}  # takes what it needs alone
    with Popen(
        [sys.executable, "-I", "-S", "-c", _START],
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env=os.environ | memory,
        start_new_session=True,  # Ctrl-C ends it with the job
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            asked = (str(path), wanted, start, MAX_UNPACKED, (MAX_ROW_BYTES, str(too_long())))
            pickle.dump((sys.path, str(Path(__file__).with_name("parquet_reader.py")), asked), process.stdin)
            process.stdin.close()
            while True:
                yield pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError, BrokenPipeError):
            return
        finally:
            process.kill()


def write_parquet(
    records: Iterator[dict[str, Any]],
    file: BinaryIO,
    own: Sequence[str],
    columns: Mapping[str, str],
    csv_safe: bool = False,
) -> None:
    """Write a Parquet file, a batch at a time. columns: of the input, and their kinds. It has all columns of
    answers, not only `own`: files of one job's shards have one schema."""
    pyarrow = import_pyarrow()
    kinds = {name: pyarrow.string() for name in COLUMNS}
    kinds |= {name: pyarrow.int64() for name in NUMBERS}
    kinds |= {name: pyarrow.list_(pyarrow.string()) for name in LISTS}
    of_kind = {"int": pyarrow.int64(), "float": pyarrow.float64(), "bool": pyarrow.bool_()}
    kinds |= {name: of_kind.get(kind, pyarrow.string()) for name, kind in columns.items()}
    texts = ["id", "logprobs", *(name for name, kind in columns.items() if kind not in of_kind)]
    schema = pyarrow.schema(list(kinds.items()))
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        while batch := list(islice(records, _WRITTEN_ROWS)):
            for record in batch:
                record |= {name: as_text(record[name]) for name in texts if record.get(name) is not None}
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))


def import_pyarrow() -> Any:
    """Return pyarrow with its Parquet module. JobRefusedError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise JobRefusedError(
            f"Parquet needs the package pyarrow ({error}); pip install 'nanovllm[jobs]'"
        ) from None
    return pyarrow
