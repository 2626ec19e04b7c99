"""`nanovllm run` with an engine that computes nothing: rows, formats, standard streams; `nanovllm check`."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from decimal import Decimal
from importlib.metadata import version
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import jobs
import pytest
from jobs import FakeLLM, files, no_model, read_rows, rows_of, run, watched, write_rows

from nanovllm.jobs import main as program
from nanovllm.jobs.parquet import import_pyarrow

MIB = 2**20


def test_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(300)), tmp_path / "out.jsonl"
    assert run(source, "-o", out) == 0
    found = read_rows(out)
    assert [row["id"] for row in found] == [f"r{index}" for index in range(300)]
    assert [row["index"] for row in found] == list(range(300))
    assert found[0] == {
        "index": 0,
        "id": "r0",
        "text": "8 None",
        "finish_reason": "stop",
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "error": None,
        "prompt": "prompt 0",
    }
    assert files(tmp_path) == {"in.jsonl", "out.jsonl", "out.jsonl.job.json"}
    journal = json.loads((tmp_path / "out.jsonl.job.json").read_text())
    assert journal["state"] == "finished" and journal["rows"] == 300 and journal["pid"] is None
    printed = capsys.readouterr().err
    assert "300 of 300 rows, 0 of them with an error" in printed and "ended by 300 stop" in printed
    before = out.read_bytes()
    assert run(source, "-o", out, make_llm=no_model) == 0 and out.read_bytes() == before
    assert "other versions" not in capsys.readouterr().err
    path = tmp_path / "out.jsonl.job.json"
    torch = version("torch")
    path.write_text(path.read_text().replace(f'"torch": "{torch}"', '"torch": "0.1"'))
    assert run(source, "-o", out, make_llm=no_model) == 0 and out.read_bytes() == before
    differ = f"began with other versions, and answers may differ: torch 0.1 (here {torch})\n"
    assert differ in capsys.readouterr().err


def test_bad_rows_are_error_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [b"{\n", b'{"prompt": "\xe9"}\n', {"id": 7}, {"id": 8, "prompt": ""}, b"x" * 10 * MIB + b"\n"]
    bad += [{"id": 9, "prompt": "a", "sampling_params": {"top_p": 2}}, {"id": "r1", "prompt": "twice"}]
    source, out = write_rows(tmp_path / "in.jsonl", [*rows_of(5), *bad, *rows_of(2)]), tmp_path / "out.jsonl"
    assert run(source, "-o", out) == 1
    found = read_rows(out)
    assert [row["index"] for row in found] == list(range(14))
    errors = {row["index"]: (row["id"], row["error"]) for row in found if row["error"] is not None}
    assert errors.keys() == {5, 6, 7, 8, 9, 10}
    for index, (row_id, error) in {
        5: (None, "line 6: it is not JSON"),
        6: (None, "line 7: it is not UTF-8"),
        7: (7, "line 8: there is no column 'prompt'"),
        8: (8, "line 9: the prompt is empty"),
        9: (None, "line 10: it is longer than 8 MiB"),
        10: (9, "line 11: top_p must be in (0, 1]"),
    }.items():
        assert errors[index][0] == row_id and errors[index][1].startswith(f"in.jsonl: {error}")
    assert found[5]["finish_reason"] == "error" and found[5]["text"] is None
    assert found[11]["id"] == "r1" and found[11]["text"] == "5 None"  # ids need not be unique
    assert "14 of 14 rows, 6 of them with an error" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["jsonl", "csv", "openai"])
def test_ids_that_repeat(tmp_path: Path, kind: str) -> None:
    """Every row is answered once, in an interrupted job too: rows are told apart by their index."""
    rows: list[dict[str, Any]] = [{"id": f"r{row % 7}", "prompt": "a" * (1 + row)} for row in range(200)]
    if kind == "openai":
        rows = [
            {"custom_id": row["id"], "url": "/v1/completions", "body": {"prompt": row["prompt"]}}
            for row in rows
        ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    out = tmp_path / ("out.csv" if kind == "csv" else "out.jsonl")

    def stop(number: int) -> None:
        if number == 90:
            raise KeyboardInterrupt

    assert run(source, "-o", out, make_llm=watched(stop)) == 130
    assert run(source, "-o", out) == 0
    if kind == "csv":
        with out.open(newline="") as file:
            found = [(int(row["index"]), row["id"], row["text"]) for row in csv.DictReader(file)]
    elif kind == "openai":
        found = [
            (int(row["id"].removeprefix("batch_req_")), row["custom_id"], choice["text"])
            for row in read_rows(out)
            for choice in row["response"]["body"]["choices"]
        ]
    else:
        found = [(row["index"], row["id"], row["text"]) for row in read_rows(out)]
    lengths = [(index, row_id, int(text.split()[0])) for index, row_id, text in found]
    assert lengths == [(row, f"r{row % 7}", row + 1) for row in range(200)]


def test_errors_are_bounded_and_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = rows_of(100)
    rows[20:50:10] = [{"id": "x", "prompt": ""}] * 3
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert run(source, "-o", out, "--max-errors", 2) == 3
    assert "3 error rows, and --max-errors is 2" in capsys.readouterr().err
    done = read_rows(out)
    assert sum(row["error"] is not None for row in done) == 3
    assert run(source, "-o", out, "--max-errors", 2) == 3 and read_rows(out) == done
    assert run(source, "-o", out, "--max-errors", 3) == 1 and len(read_rows(out)) == 100
    monkeypatch.setattr(FakeLLM, "answer", without_errors(FakeLLM.answer))
    assert run(source, "-o", out, "--retry-errors") == 0
    assert [row["index"] for row in read_rows(out)] == list(range(100))
    assert "and runs 3 rows again (damaged lines or error rows)" in capsys.readouterr().err


def without_errors(answer: Any) -> Any:
    return lambda llm, index, prompt, params: answer(llm, index, {"prompt": prompt["prompt"] or "-"}, params)


def test_an_output_that_is_a_link(tmp_path: Path) -> None:
    """The target file is written, and the link stays a link."""
    source, link = write_rows(tmp_path / "in.jsonl", rows_of(100)), tmp_path / "link.jsonl"
    (tmp_path / "there").mkdir()
    link.symlink_to(tmp_path / "there" / "out.jsonl")
    assert run(source, "-o", link) == 0
    assert link.is_symlink() and len(read_rows(link)) == 100
    assert files(tmp_path / "there") == {"out.jsonl", "out.jsonl.job.json"}
    assert run(source, "-o", tmp_path / "there" / "out.jsonl") == 0, "by either name it is the same job"


def test_standard_error_that_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(3)), tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("nanovllm.jobs.run.run.__defaults__", (FakeLLM,))
    assert program.main(["run", str(source), "-o", str(out), "--model", jobs.demo_model_path()]) == 0
    assert len(read_rows(out)) == 3


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_an_empty_file(tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", []), tmp_path / f"out.{ending}"
    assert run(source, "-o", out) == 0 and out.read_bytes().count(b"\n") == (ending == "csv")
    assert "in.jsonl has no rows" in capsys.readouterr().err
    assert run(source, "-o", out) == 0


def test_names_that_are_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = (tmp_path / os.fsdecode(name) for name in (b"in\xff.jsonl", b"out\xff.jsonl"))
    write_rows(source, rows_of(20))
    assert run(source, "-o", out) == 0 and len(read_rows(out)) == 20
    assert run(source, "-o", out, make_llm=no_model) == 0
    printed = BytesIO()
    monkeypatch.setattr("sys.stdout", TextIOWrapper(printed, "utf-8", write_through=True))
    assert program.main(["check", str(source)]) == 0
    assert printed.getvalue().endswith(b"in\\udcff.jsonl: 20 rows, 0 bad\n")


def test_ordered_output_is_in_order_at_every_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = rows_of(300)
    rows[10] = {"prompt": ""}
    rows[200] = b"{\n"
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    seen = 0

    def watch(number: int) -> None:
        nonlocal seen
        found = read_rows(out)
        assert [row["index"] for row in found] == list(range(len(found)))
        seen = max(seen, len(found))
        if number == 150:
            raise KeyboardInterrupt

    assert run(source, "-o", out, "--ordered", make_llm=watched(watch)) == 130
    assert 0 < seen < 300
    kept = read_rows(out)
    num_bad = sum(row["error"] is not None for row in kept)
    assert f" {len(kept)} rows, {num_bad} of them with an error" in capsys.readouterr().err
    assert run(source, "-o", out, "--ordered") == 1
    assert [row["index"] for row in read_rows(out)] == list(range(300))
    unordered = tmp_path / "unordered.jsonl"
    assert run(source, "-o", unordered) == 1 and unordered.read_bytes() == out.read_bytes()


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_other_formats_in_and_out(tmp_path: Path, ending: str) -> None:
    pyarrow = import_pyarrow()
    rows = [{"id": f"r{index}", "prompt": f"prompt, {index}"} for index in range(50)]
    source = tmp_path / f"in.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    else:
        tab = "\t" if ending == "tsv" else ","
        quote = "" if ending == "tsv" else '"'
        lines = [f"{row['id']}{tab}{quote}{row['prompt']}{quote}" for row in rows]
        source.write_text("\n".join([f"id{tab}prompt", *lines]))
    out = tmp_path / f"out.{ending}"

    def stop(number: int) -> None:
        if number == 20:
            raise KeyboardInterrupt

    assert run(source, "-o", out, make_llm=watched(stop, ahead=4)) == 130 and not out.exists()
    assert run(source, "-o", out) == 0
    if ending == "parquet":
        found = pyarrow.parquet.read_table(out).to_pylist()
        assert found[3] == {
            **{"index": 3, "id": "r3", "text": "9 None", "finish_reason": "stop", "texts": None},
            **{"finish_reasons": None, "prompt_tokens": 1, "completion_tokens": 2, "logprobs": None},
            **{"error": None, "prompt": "prompt, 3"},
        }
    else:
        lines = out.read_text().splitlines()
        assert lines[0].replace("\t", ",").startswith("index,id,text,finish_reason") and len(lines) == 51
        prompt = '"prompt, 3"' if ending == "csv" else "prompt, 3"
        assert lines[4].replace("\t", ",") == f"3,r3,9 None,stop,1,2,{prompt}"
    (tmp_path / f"out.{ending}.rows.jsonl").unlink()
    assert run(source, "-o", out) == 2


def test_csv_with_line_ends_of_all_kinds(tmp_path: Path) -> None:
    ids = ["a\rb", "c\nd", "e\r\nf", '"', "g"]
    source = write_rows(tmp_path / "in.jsonl", [{"id": each, "prompt": "a"} for each in ids])
    assert run(source, "-o", tmp_path / "out.csv") == 0
    content = (tmp_path / "out.csv").read_bytes()
    assert content.startswith(b"index,id,text,finish_reason") and content.endswith(b"4,g,1 None,stop,1,2,a\n")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == ids


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_formulas_in_cells(tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--csv-safe` no string begins like a formula, neither answer nor id. Numbers are left alone."""

    class Echo(FakeLLM):
        def answer(self, index: int, prompt: Any, params: Any) -> Any:
            output = super().answer(index, prompt, params)
            output.outputs[0].text = prompt["prompt"]
            return output

    texts = ["=cmd()", "+1", "-1+2", "@SUM(1)", "\t=1", "\r=1", "'=1", " =1", "a=b", "1"]
    rows: list[Any] = [{"id": text, "prompt": text} for text in texts]
    rows += [{"id": -5, "prompt": "-5"}, {"id": -0.5, "prompt": "a", "sampling_params": {"n": 1}}]
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / f"out.{ending}"

    def cells() -> list[tuple[str, str]]:
        with out.open(newline="") as file:
            found = csv.DictReader(file, delimiter="," if ending == "csv" else "\t")
            return [(row["id"], row["text"]) for row in found]

    assert run(source, "-o", out, make_llm=Echo) == 0
    assert cells() == [(str(row["id"]), row["prompt"]) for row in rows]
    assert run(source, "-o", out, "--csv-safe", make_llm=no_model) == 0
    safe = [f"'{text}" for text in texts[:6]] + texts[6:]
    assert cells() == [*zip(safe, safe, strict=True), ("-5", "'-5"), ("-0.5", "a")]
    assert run(source, "-o", tmp_path / "out.jsonl", "--csv-safe") == 2
    assert "is written as jsonl, and --csv-safe is for CSV and TSV; leave it out" in capsys.readouterr().out


def test_ids_of_parquet_that_json_has_not(tmp_path: Path) -> None:
    pyarrow = import_pyarrow()
    day = datetime(2020, 1, 2, tzinfo=timezone.utc)
    for ids, found in (
        ([day, None], ["2020-01-02 00:00:00+00:00", None]),
        ([b"\xff", b"a"], [r"b'\xff'", "b'a'"]),
        ([Decimal("1.5"), Decimal(2)], ["1.5", "2.0"]),
        ([float("nan"), 2.0], [None, 2.0]),
    ):
        rows = [{"id": each, "prompt": "a"} for each in ids]
        source, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
        assert run(source, "-o", out, "--id-column", "id") == 0
        assert [row["id"] for row in read_rows(out)] == found
        out.unlink()


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    for rows, code in ((20, 0), (20, 0), (21, 2)):
        with write_rows(tmp_path / "in.jsonl", rows_of(rows)).open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert run("-", "-o", out) == code
    assert len(read_rows(out)) == 20
    assert files(tmp_path) == {"in.jsonl", "out.jsonl", "out.jsonl.job.json"}


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_files_of_the_user_beside_the_output(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed job leaves is replaced; nothing else is touched."""
    endings = [".lock", ".tmp", ".stdin.jsonl", ".job.json.tmp", ".rows.jsonl.tmp", ".job.json.lock"]
    theirs = [tmp_path / (name + ending) for ending in endings]
    left = [tmp_path / (name + ending) for ending in (".nanovllm.lock", ".nanovllm.tmp", ".nanovllm.stdin")]
    for path in theirs + left:
        path.write_text(f"{path.name}\n")
    with write_rows(tmp_path / "in.jsonl", rows_of(200)).open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run("-", "-o", tmp_path / name) == 0
    assert [path.read_text() for path in theirs] == [f"{path.name}\n" for path in theirs]
    assert not any(path.exists() for path in left)


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_rows(tmp_path / "good.jsonl", rows_of(30))
    assert program.main(["check", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: 30 rows, 0 bad\n"
    empty = write_rows(tmp_path / "empty.jsonl", [{"prompt": ""}, {"prompt": []}, {"prompt": [5]}])
    assert program.main(["check", str(empty)]) == 1
    printed = capsys.readouterr().out
    assert "line 1: the prompt is empty; a prompt needs" in printed and "3 rows, 2 bad" in printed
    bad = [b"{\n", *rows_of(2), *rows_of(1), {"prompt": "a " * 2000}, *[{"prompt": 5}] * 30]
    bad += [{"messages": [{"role": "user", "content": "a " * 2000}]}]
    bad += [{"prompt": "a", "sampling_params": {"stop_token_ids": [10**6]}}]
    source = write_rows(tmp_path / "bad.jsonl", bad)
    assert program.main(["check", str(source), str(good)]) == 1
    printed = capsys.readouterr().out
    assert f"{source}: line 1: it is not JSON" in printed and f"{source}: and 11 rows more" in printed
    assert f"{source}: 37 rows, 31 bad; 1 id comes more than once" in printed
    assert program.main(["check", str(source), "--model", jobs.demo_model_path()]) == 1
    printed = capsys.readouterr().out
    [_, first, *_, last, total] = printed.splitlines()
    why = "the prompt has 2001 tokens, and at most 1023 leave room for one more (max_model_len=1024)"
    assert first == f"{source}: line 5: {why}" and last == f"{source}: and 14 rows more"
    assert total.startswith(f"{source}: 37 rows, 34 bad; 1 id comes more than once")
    several = write_rows(tmp_path / "n.jsonl", [{"prompt": "a", "sampling_params": {"n": 2}}])
    own = ["--override-generation-config", '{"temperature": 0}']
    assert program.main(["check", str(several), "--model", jobs.demo_model_path(), *own]) == 1
    assert "n must be 1 with temperature=0" in capsys.readouterr().out, "as a run with this model says"
    assert program.main(["check", str(tmp_path / "none")]) == 2
    assert "none: No such file" in capsys.readouterr().out
    assert program.main(["check", str(tmp_path / "none.jsonl")]) == 2
    assert program.main(["version"]) == 0
    printed = capsys.readouterr().out
    assert "nanovllm " in printed and "attention backend reference: can run" in printed
    assert program.main(["run", str(good), "-o", str(good), "--model", jobs.demo_model_path()]) == 2
    assert "nanovllm run: -o" in capsys.readouterr().err


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", rows_of(3))
    with subprocess.Popen(
        [sys.executable, "-m", "nanovllm", "check", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


def test_standard_streams_that_are_closed(tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", rows_of(3)), tmp_path / "out.jsonl"
    model = jobs.demo_model_path()
    argv = ["-m", "nanovllm", "run", source, "-o", output, "--model", model, "--num-kvcache-blocks", "99"]
    closed = ["sh", "-c", 'exec "$0" "$@" >&- 2>&-', sys.executable, *argv]
    assert subprocess.run(closed).returncode == 0
    assert [row["error"] for row in read_rows(output)] == [None] * 3
    closed = [
        "sh",
        "-c",
        'exec "$0" "$@" <&-',
        sys.executable,
        *argv[:3],
        "-",
        "-o",
        tmp_path / "b.jsonl",
        *argv[6:],
    ]
    assert subprocess.run(closed, capture_output=True).returncode == 0, "no rows"
