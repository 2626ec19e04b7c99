"""Parquet files: reads rows and writes records, a small batch at a time. Needs pyarrow, the extra `jobs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any, BinaryIO

from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.output import COLUMNS, LISTS, NUMBERS, as_text
from nanovllm.jobs.parquet_pages import MAX_UNPACKED, Footer, rows_at_once
from nanovllm.jobs.sources import MAX_ROW_BYTES, Source, SourceRow, Values, too_long, unique_names

_WRITTEN_ROWS = 1024  # at once


class ParquetSource(Source):
    """A Parquet file."""

    format = "parquet"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        pyarrow = import_pyarrow()
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                Footer(path)
                self.columns = unique_names(file.schema_arrow.names, path)
                self.num_rows = file.metadata.num_rows
        except (pyarrow.ArrowException, ValueError) as error:  # a name that is not UTF-8, for example
            raise JobRefusedError(f"{path} is no Parquet file that can be read: {error}") from None

    def rows(self) -> Iterator[SourceRow]:
        index = end = 0
        footer = Footer(self.path)
        with import_pyarrow().parquet.ParquetFile(self.path, buffer_size=2**20) as file:
            for group in range(file.num_row_groups):
                end += file.metadata.row_group(group).num_rows
                for values in self._values_in(file, footer, group, index, end):
                    self.position = self.length * (index + 1) // (self.num_rows or 1)
                    yield SourceRow(index, f"{self.name}: row {index + 1}", values)
                    index += 1

    def _values_in(
        self, file: Any, footer: Footer, group: int, index: int, end: int
    ) -> Iterator[Values | ValueError]:
        """The values of rows `index` to `end`, which are those of a row group. If it is damaged, an error
        takes the place of each row from the damaged batch on. If it would take too much memory, none is read.
        OSError if the system cannot read the file."""
        assert self.columns is not None
        names = [name for name in self.columns if self.wanted is None or name in self.wanted]
        why = "it ends early"
        try:
            rows = rows_at_once(file, footer, group, names)
            if not rows:
                yield from repeat(_too_large(group, index, end), end - index)
                return
            for batch in file.iter_batches(rows, row_groups=[group], columns=names):
                yield from _values_of(_decoded(batch))
                index += batch.num_rows
        except (OSError, ValueError, IndexError, RecursionError, import_pyarrow().ArrowException) as error:
            if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
                raise
            why = " ".join(str(error).split())
        damaged = ValueError(
            f"row group {group} of the file is damaged, and its rows {index + 1} to {end} cannot be read "
            f"({why}); replace the file by a good copy"
        )
        yield from repeat(damaged, end - index)


def _too_large(group: int, index: int, end: int) -> ValueError:
    return ValueError(
        f"row group {group} of the file takes more than {MAX_UNPACKED // 2**30} GiB of memory to unpack, and "
        f"its rows {index + 1} to {end} are not read; write it with smaller row groups, such as "
        "pyarrow.parquet.write_table(table, path, row_group_size=100)"
    )


def _decoded(batch: Any) -> Any:
    """A batch whose columns do not share values, so that its size is that of its rows."""
    pyarrow = import_pyarrow()
    columns = batch.columns
    if not any(isinstance(column, pyarrow.DictionaryArray) for column in columns):
        return batch
    plain = [
        each.dictionary_decode() if isinstance(each, pyarrow.DictionaryArray) else each for each in columns
    ]
    return pyarrow.RecordBatch.from_arrays(plain, names=batch.schema.names)


def _values_of(batch: Any) -> Iterator[Values | ValueError]:
    """The rows of a batch. An error takes the place of a row that is too long, or has a value that Python
    cannot hold, such as a time in nanoseconds or a string that is not UTF-8."""
    rows: list[Values | ValueError] = [too_long()]
    if batch.nbytes <= MAX_ROW_BYTES:
        try:
            rows = batch.to_pylist()
        except Exception as error:  # of many kinds
            rows = [ValueError(f"it cannot be read: {error}")]
    if len(rows) == batch.num_rows:
        yield from rows
        return
    half = batch.num_rows // 2
    yield from _values_of(batch.slice(0, half))
    yield from _values_of(batch.slice(half))


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
