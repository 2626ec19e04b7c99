"""Export: the records of a complete output of lines, and CSV files from them. Holds one line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from nanovllm.jobs.output import ordered_lines

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
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins so


def records(lines: Path, num_rows: int, csv_safe: bool = False) -> Iterator[dict[str, Any]]:
    """The records of a complete output of lines, in order. csv_safe: a string that a spreadsheet would run
    begins with an apostrophe, which makes it text; numbers are as they are."""
    return (_record(line, csv_safe) for line in ordered_lines(lines, num_rows))


def _record(line: bytes, csv_safe: bool) -> dict[str, Any]:
    """The record of a line. Logprobs, and an id that is not a string, are JSON; lone surrogates are question
    marks."""
    record: dict[str, Any] = json.loads(line)
    if b"\\u" in line:
        record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    if csv_safe:
        strings = {name: value for name, value in record.items() if isinstance(value, str)}
        record |= {name: f"'{value}" for name, value in strings.items() if value.startswith(FORMULA)}
    if "logprobs" in record:
        record["logprobs"] = json.dumps(record["logprobs"], ensure_ascii=False)
    if not isinstance(record["id"], (str, type(None))):
        record["id"] = json.dumps(record["id"], ensure_ascii=False)
    return record


def write_csv(records: Iterator[dict[str, Any]], file: BinaryIO, delimiter: str = ",") -> None:
    """Write a CSV file, with lists as JSON, and None as an empty field."""
    # With the line end "\r\n" the csv module quotes both characters. With "\n" it does not quote "\r", up to
    # Python 3.12.
    lines = SimpleNamespace(write=lambda line: file.write((line.removesuffix("\r\n") + "\n").encode()))
    writer = csv.writer(lines, delimiter=delimiter, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for record in records:
        for name in LISTS:
            if name in record:
                record[name] = json.dumps(record[name], ensure_ascii=False)
        writer.writerow([record.get(name) for name in COLUMNS])
