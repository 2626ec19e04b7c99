"""The file formats of jobs: opens a file of rows, and exports an output, in the format of a name's ending."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.output import ordered_lines, records, table_columns, write_csv
from nanovllm.jobs.packed import PACKINGS, import_zstd, open_rows, packed, packing_of
from nanovllm.jobs.parquet import ParquetSource, import_pyarrow, write_parquet
from nanovllm.jobs.side_files import replaced
from nanovllm.jobs.sources import TABLES, CSVSource, JSONLinesSource, Source

SOURCES: dict[str, Callable[..., Source]] = {
    "jsonl": JSONLinesSource,
    "csv": CSVSource,
    "tsv": partial(CSVSource, format="tsv"),
    "parquet": ParquetSource,
}
_Writer: TypeAlias = (
    "Callable[[Iterator[dict[str, Any]], BinaryIO, Sequence[str], Mapping[str, str], bool], None]"
)
# What writes an output at the end; for the other formats, the lines of a job are the file.
_WRITERS: dict[str, _Writer] = {
    "csv": write_csv,
    "tsv": partial(write_csv, delimiter="\t"),
    "parquet": write_parquet,
}
ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_UTF16 = "is UTF-16, and UTF-8 text is read; convert it, for example with `iconv -f utf-16 -t utf-8`"
_PACKED = (
    "is compressed ({}), and plain files, gzip and zstd are read; unpack it with `{}`, or pipe it: "
    "`{} FILE | nanovllm run - ...`, with --format if it has no JSON Lines"
)
_WRONG_MARKS = {  # first bytes of files that are not read
    codecs.BOM_UTF16_LE: _UTF16,
    codecs.BOM_UTF16_BE: _UTF16,
    b"BZh": _PACKED.format("bzip2", "bunzip2 -k", "bzip2 -dc"),
    b"\xfd7zXZ\0": _PACKED.format("xz", "unxz -k", "xz -dc"),
    b"PK\x03\x04": "is a zip archive or an Excel file; unpack it, or save the table as CSV",
}


def open_source(
    path: Path, format: str, quoting: str | None = None, delimiter: str | None = None, name: str = ""
) -> Source:
    """Return the source of a file; `format` is "auto" (by its ending) or one of `SOURCES`.

    quoting, delimiter: of a table; None for the default of its format. name: of the file in messages. Raises
    JobRefusedError if the file cannot be read in that format.
    """
    name = name or str(path)
    try:
        if path.exists() and not path.is_file():
            raise JobRefusedError(
                f"{name} is no regular file, and a job reads its input twice; name a file, or pass - and "
                "give the rows to standard input"
            )
        with path.open("rb") as file:
            is_packed = packing_of(file.read(4)) is not None
        start = _start_of(path, name)
        for mark, what in _WRONG_MARKS.items():
            if start.startswith(mark):
                raise JobRefusedError(f"{name} {what}")
        if format == "auto":
            format = _format_of(path)
        if format == "parquet" and is_packed:
            raise JobRefusedError(
                f"{name} is a compressed Parquet file, which is compressed within; unpack it"
            )
        of_tables = [name for name, value in (("--quoting", quoting), ("--delimiter", delimiter)) if value]
        if of_tables and format not in TABLES:
            flags = " and ".join(of_tables)
            raise JobRefusedError(f"{name} is read as {format}, and {flags} is for CSV and TSV; leave it out")
        if format == "jsonl" and start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            raise JobRefusedError(
                f"{name} is a JSON array, and an object on every line is read; convert it, for example with "
                "`jq -c '.[]'`"
            )
        make = SOURCES[format]
        return make(path, quoting, delimiter) if format in TABLES else make(path)
    except OSError as error:
        raise JobRefusedError(f"{name}: {error.strerror or error}") from None


def _start_of(path: Path, name: str) -> bytes:
    """The first bytes of a file's content."""
    try:
        with open_rows(path) as file:
            return file.read(64)
    except OSError as error:
        if error.strerror is not None:
            raise
        raise JobRefusedError(
            f"{name} is compressed and damaged: {error}; replace it by a good copy"
        ) from None


def endings(path: Path) -> tuple[str, str | None]:
    """The ending of a name that tells the format, and how the file is compressed."""
    packing = PACKINGS.get(path.suffix.lower())
    return (path if packing is None else path.with_suffix("")).suffix.lower(), packing


def _format_of(path: Path) -> str:
    ending, _ = endings(path)
    if ending not in ENDINGS:
        raise JobRefusedError(
            f"{path}: the ending {ending!r} is no known format; rename it to one of "
            f"{', '.join(ENDINGS)}, or pass --format"
        )
    return ENDINGS[ending]


def check_can_write(path: Path, csv_safe: bool = False) -> None:
    """JobRefusedError if the ending of `path` is no known format, the format needs a package, or `csv_safe`
    is for other formats."""
    ending, packing = endings(path)
    if ending not in ENDINGS:
        raise JobRefusedError(
            f"-o {path}: its ending must be one of {', '.join(ENDINGS)}, and {' or '.join(PACKINGS)} may "
            "follow"
        )
    format = ENDINGS[ending]
    if format == "parquet":
        import_pyarrow()
    if format == "parquet" and packing is not None:
        raise JobRefusedError(f"-o {path}: Parquet is compressed within; leave out the ending {path.suffix}")
    if packing == "zstd":
        import_zstd(f"-o {path}")
    if csv_safe and format not in TABLES:
        raise JobRefusedError(
            f"-o {path} is written as {format}, and --csv-safe is for CSV and TSV; leave it out"
        )


def is_exported(path: Path) -> bool:
    """Whether an output of this name is written at the end, from the lines of a job."""
    ending, packing = endings(path)
    return packing is not None or ENDINGS[ending] in _WRITERS


def is_lines(path: Path) -> bool:
    """Whether an output of this name has JSON Lines."""
    return ENDINGS[endings(path)[0]] not in _WRITERS


def export(lines: Path, path: Path, rows: range, csv_safe: bool = False) -> None:
    """Write the rows of `lines`, in order, atomically to `path`, in the format of its ending. csv_safe: as
    for `write_csv`."""
    ending, packing = endings(path)
    with replaced(path, path, lines) as new, packed(new, packing) as file:
        if is_lines(path):
            file.writelines(ordered_lines(lines, rows))
        else:
            write = _WRITERS[ENDINGS[ending]]
            write(records(lines, rows), file, *table_columns(lines), csv_safe)
