"""`nanovllm run` and `check` on input that is damaged or unusual."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import inside_kinds
import pytest
from jobs import FakeLLM, no_model, read_rows, run, watched, write_rows

from nanovllm.jobs import main as program
from nanovllm.jobs.parquet import import_pyarrow
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


def write_damaged_parquet(path: Path) -> Path:
    """1,500 rows in three row groups; the second page of prompts in row group 1 is damaged."""
    pyarrow = import_pyarrow()
    rows = [{"id": index, "prompt": f"prompt {index}"} for index in range(1500)]
    table = pyarrow.Table.from_pylist(rows)
    options = {"row_group_size": 500, "use_dictionary": False, "compression": "none"}
    pyarrow.parquet.write_table(table, path, data_page_size=2048, write_batch_size=50, **options)
    content = bytearray(path.read_bytes())
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(1)
    start = column.data_page_offset + 5000
    content[start : start + 1000] = b"\xff" * 1000
    path.write_bytes(content)
    return path


def test_a_damaged_row_group_costs_its_rows_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_damaged_parquet(tmp_path / "in.parquet"), tmp_path / "out.jsonl"
    assert run(source, "-o", out) == 1
    found = read_rows(out)
    bad = [row["index"] for row in found if row["error"] is not None]
    assert len(found) == 1500 and bad == list(range(bad[0], 1000)) and 500 <= bad[0] < 800
    assert found[999]["error"].startswith(
        "in.parquet: row 1000: row group 1 of the file is damaged, "
        f"and its rows {bad[0] + 1} to 1000 cannot be read ("
    )
    assert found[999]["error"].endswith("); replace the file by a good copy")
    assert found[1000]["text"] == "11 None"
    assert program.main(["check", str(source)]) == 1
    printed = capsys.readouterr().out
    assert "row group 1 of the file is damaged" in printed and f"1,500 rows, {len(bad)} bad" in printed


def test_a_disk_that_fails_is_no_damaged_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail = """
import pyarrow.parquet
def fail(*args, **options): raise OSError(5, "Input/output error")
pyarrow.parquet.ParquetFile.iter_batches = fail
"""
    source, out = write_damaged_parquet(tmp_path / "in.parquet"), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        inside_kinds.begin_reading_parquet_by(patch, fail)
        assert run(source, "-o", out) == 4
    assert "Input/output error; the same command resumes" in capsys.readouterr().err
    assert read_rows(out) == []
    assert run(source, "-o", out) == 1


def test_a_process_that_dies_costs_a_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows before it, and other row groups, are answered."""
    source, out = write_damaged_parquet(tmp_path / "in.parquet"), tmp_path / "out.jsonl"
    fail = """
import os, pyarrow.parquet
plain = pyarrow.parquet.ParquetFile.iter_batches
def dies(self, size, row_groups, **options):
    for batch in plain(self, size, row_groups=row_groups, **options):
        yield batch
        if row_groups == [1]: os.abort()
pyarrow.parquet.ParquetFile.iter_batches = dies
"""
    inside_kinds.begin_reading_parquet_by(monkeypatch, fail)
    assert run(source, "-o", out) == 1
    errors = {row["index"]: row["error"] for row in read_rows(out) if row["error"] is not None}
    assert errors.keys() == set(range(500 + 256, 1000))
    assert "its rows 757 to 1000 cannot be read (pyarrow ends its process at them)" in errors[999]


def test_one_row_is_no_plural(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", [{"id": "a", "prompt": ""}]), tmp_path / "out.jsonl"
    assert run(source, "-o", out, "--max-errors", 0) == 3
    assert "1 error row, and --max-errors is 0" in capsys.readouterr().err
    assert run(source, "-o", out, "--retry-errors") == 1
    printed = capsys.readouterr().err
    assert "resumes after 0 rows, and runs 1 row again (damaged lines or error rows)" in printed
    assert "1 of 1 row, 1 of them with an error" in printed
    assert program.main(["check", str(source)]) == 1
    assert capsys.readouterr().out.endswith("in.jsonl: 1 row, 1 bad\n")


def test_a_null_is_no_text_for_a_template(tmp_path: Path) -> None:
    rows = [{"id": 1, "a": "x", "b": None}, {"id": None, "a": "x", "b": 0}]
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert run(source, "-o", out, "--template", "{a} {b}", "--id-column", "id") == 1
    [bad, good] = read_rows(out)
    assert bad["error"] == "in.jsonl: line 1: column 'b' is null, and the template needs it; give it a value"
    assert (bad["id"], good["error"], good["text"]) == (1, None, "3 None")


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_ids_that_no_table_holds(tmp_path: Path, ending: str) -> None:
    ids = [b'"\\ud800"', b'{"a": ["\\u00e9", null]}', b"true", b'"\\ud83d\\ude00"', b'"n\\u0000l"', b"7"]
    rows = [b'{"prompt": "a", "id": ' + each + b"}\n" for each in ids]
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / f"out.{ending}"
    assert run(source, "-o", out) == 0
    if ending == "csv":
        found = [row["id"] for row in csv.DictReader(out.open(encoding="utf-8"))]
    else:
        found = import_pyarrow().parquet.read_table(out)["id"].to_pylist()
    assert found == ["?", '{"a": ["é", null]}', "true", "\N{GRINNING FACE}", "n\0l", "7"]


def test_standard_input_is_not_blamed_for_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.jobs.run.open_job", Mock(side_effect=OSError(5, "Input/output error")))
    with write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}]).open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        with pytest.raises(OSError, match="Input/output error"):
            run("-", "-o", tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_files_that_vanish_while_the_job_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "a"}] * 300
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    gone = watched(lambda number: source.unlink() if number == 5 else None)
    assert run(source, "-o", out, make_llm=gone) == 4
    printed = capsys.readouterr().err
    assert "in.jsonl can no longer be read: No such file or directory; restore it and run" in printed
    assert "Traceback" not in printed
    write_rows(source, rows)
    assert run(source, "-o", out, make_llm=no_model) == 0 and len(read_rows(out)) == 300
    out.unlink()
    gone = watched(lambda number: out.unlink() if number == 5 else None)
    assert run(source, "-o", out, make_llm=gone) == 4
    printed = capsys.readouterr().err
    assert "another program changed" in printed and "all rows are answered" not in printed
    assert run(source, "-o", out) == 0 and len(read_rows(out)) == 300


def test_a_line_and_a_journal_of_endless_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}] * 3), tmp_path / "out.jsonl"
    assert run(source, "-o", out) == 0
    before = out.read_bytes()
    out.write_bytes(b'{"index": 0, "id": ' + b"[" * 100_000 + b"\n" + before.split(b"\n", 1)[1])
    assert run(source, "-o", out) == 0 and out.read_bytes() == before
    (tmp_path / "out.jsonl.job.json").write_text("[" * 100_000)
    assert run(source, "-o", out) == 2 and out.read_bytes() == before
    printed = capsys.readouterr().out  # the error is a RecursionError, in Python 3.14 with other words
    assert re.search(r"cannot be read as a journal \((maximum recursion depth|Stack overflow)", printed)


class WithoutTemplate(FakeLLM):
    """Refuses long prompts like an engine; its model has no chat template."""

    tokenizer = Mock(chat_template=None, return_value={"input_ids": [[1]]})

    def answer(self, index: int, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        output = super().answer(index, prompt, params)
        if len(prompt["prompt"]) > 99:
            output.error = f"prompts[{index}] has 100 tokens, and at most 99 leave room for one more"
        return output


def test_every_row_error_has_its_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of rows that cannot be parsed, that are wrong, and that the template or the engine refuses."""
    chat = [{"role": "user", "content": "Hi"}]
    rows = [b"{\n", {"prompt": 5}, {"prompt": ""}, {"prompt": "x" * 100}, {"messages": chat}]
    rows += [{"prompt": "Hi", "messages": chat}, {"prompt": "Hi"}]
    source = write_rows(tmp_path / "in.jsonl", [b"\n", *rows])
    with source.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        for name, input, out in (("in.jsonl", source, "a.jsonl"), ("standard input", "-", "b.jsonl")):
            assert run(input, "-o", tmp_path / out, make_llm=WithoutTemplate) == 1
            errors = [row["error"] for row in read_rows(tmp_path / out)]
            assert errors.pop() is None and len(errors) == 6
            for number, error in enumerate(errors, 2):
                assert error.startswith(f"{name}: line {number}: ") and error.count("line ") <= 2
            assert errors[3].endswith(
                "line 5: the prompt has 100 tokens, and at most 99 leave room for one more"
            )
            assert "it has both 'prompt' and 'messages'; leave one of them out" in errors[5]
    assert program.main(["check", str(source)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in printed[:-1]] == [
        [str(source), f"line {n}"] for n in (2, 3, 4, 7)
    ]


@pytest.mark.parametrize(
    ("name", "head", "found"),
    [
        ("a.csv", "id;prompt", "';': 'id', 'prompt'. Pass --delimiter ';', or --delimiter ','"),
        ("b.csv", '"id";"prompt"', "';': 'id', 'prompt'. Pass --delimiter ';'"),
        ("c.csv", "id\tprompt", r"'\t': 'id', 'prompt'. Pass --delimiter '\t'"),
        ("d.tsv", "id|prompt|other", "'|': 'id', 'prompt', 'other'. Pass --delimiter '|'"),
        ("e.tsv", "id,prompt", r"',': 'id', 'prompt'. Pass --delimiter ',', or --delimiter '\t'"),
    ],
)
def test_a_table_with_another_delimiter(
    tmp_path: Path, name: str, head: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even a template that names the one column does not answer rows that are split wrongly."""
    source, out = tmp_path / name, tmp_path / "out.jsonl"
    source.write_text(f"{head}\n{head.replace('prompt', 'Hello')}\n")
    template = f"{{{head}}}" if '"' not in head else "{id}"
    assert run(source, "-o", out, "--template", template) == 2 and not out.exists()
    assert found in capsys.readouterr().out
    assert run(source, "-o", out, "--delimiter", found.split("Pass --delimiter ")[1][1:].split("'")[0]) == 0
    assert read_rows(out)[0]["text"].startswith("5 ")


def test_one_column_whose_name_has_a_semicolon(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("a;b\nHello\n")
    assert run(source, "-o", tmp_path / "o.jsonl", "--delimiter", ",", "--prompt-column", "a;b") == 0
