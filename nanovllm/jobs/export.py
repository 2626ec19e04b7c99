"""Export: CSV and Parquet files from a complete output of lines. Holds one line, or a small batch of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanovllm.jobs.journal import replaced
from nanovllm.jobs.output import ordered_lines
from nanovllm.jobs.sources import ENDINGS, import_pyarrow

BATCH = 1024  # rows of Parquet written at once
COLUMNS = (
    "index",
    "id",
    "text",
    "finish_reason",
    "texts",
    "finish_reasons",
    "prompt_tokens",
    "completion_tokens",
    "logprobs",
    "error",
)
LISTS = ("texts", "finish_reasons")  # of rows with several completions
NUMBERS = ("index", "prompt_tokens", "completion_tokens")


def export(lines: Path, path: Path, num_rows: int) -> None:
    """Write the rows of `lines`, in order, atomically to `path`, in the format of its ending."""
    kind = ENDINGS[path.suffix.lower()]
    records = map(_record, ordered_lines(lines, num_rows))
    with replaced(path) as temporary:
        if kind == "parquet":
            _write_parquet(records, temporary)
        else:
            _write_csv(records, temporary, "\t" if kind == "tsv" else ",")


def _record(line: bytes) -> dict[str, Any]:
    """The record of a line. Logprobs, and an id that is not a string, are JSON; lone surrogates are question
    marks."""
    record: dict[str, Any] = json.loads(line)
    if b"\\u" in line:
        record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    if "logprobs" in record:
        record["logprobs"] = json.dumps(record["logprobs"], ensure_ascii=False)
    if not isinstance(record["id"], (str, type(None))):
        record["id"] = json.dumps(record["id"], ensure_ascii=False)
    return record


def _write_csv(records: Iterator[dict[str, Any]], path: Path, delimiter: str) -> None:
    """Write lists as JSON, and None as an empty field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        # With the line end "\r\n" the csv module quotes both characters. With "\n" it does not quote "\r", up
        # to Python 3.12.
        lines = SimpleNamespace(write=lambda line: file.write(line.removesuffix("\r\n") + "\n"))
        writer = csv.writer(lines, delimiter=delimiter, lineterminator="\r\n")
        writer.writerow(COLUMNS)
        for record in records:
            for name in LISTS:
                if name in record:
                    record[name] = json.dumps(record[name], ensure_ascii=False)
            writer.writerow([record.get(name) for name in COLUMNS])


def _write_parquet(records: Iterator[dict[str, Any]], path: Path) -> None:
    pyarrow = import_pyarrow()
    kinds = {name: pyarrow.string() for name in COLUMNS}
    kinds |= {name: pyarrow.int64() for name in NUMBERS}
    kinds |= {name: pyarrow.list_(pyarrow.string()) for name in LISTS}
    schema = pyarrow.schema(list(kinds.items()))
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while batch := list(islice(records, BATCH)):
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))
