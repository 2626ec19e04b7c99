"""`nanovllm run --extend`: the input has grown since the job. And the advice that messages of jobs give."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import FakeLLM, files, no_model, read_rows, rows_of, run, watched, write_rows
from killed_jobs import fork_server, run_and_kill

from nanovllm.jobs.parquet import import_pyarrow

ROOT = Path(__file__).parents[3]


def whole_job(folder: Path, source: Path, name: str, code: int = 0) -> dict[str, bytes]:
    """The files of an uninterrupted job on this input, but its journal."""
    folder.mkdir()
    assert run(source, "-o", folder / name) == code
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".job.json")}


class Counting(FakeLLM):
    """Counts the rows that it answers."""

    answered = 0

    def answer(self, *args: Any) -> Any:
        Counting.answered += 1
        return super().answer(*args)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
@pytest.mark.parametrize("end", ["a line end", "no line end"])
@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_an_input_that_has_grown(
    tmp_path: Path, name: str, end: str, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = write_rows(tmp_path / "in.jsonl", rows_of(200)), tmp_path / "job"
    whole = source.read_bytes()
    expected = whole_job(tmp_path / "whole", source, name)
    lines = whole.splitlines(keepends=True)
    source.write_bytes(b"".join(lines[:120]).removesuffix(b"\n" if end == "no line end" else b""))
    folder.mkdir()

    def fail(number: int) -> None:
        if number == 30 and state == "unfinished":
            raise RuntimeError("the device failed")

    assert run(source, "-o", folder / name, make_llm=watched(fail)) == (4 if state == "unfinished" else 0)
    before = contents(folder)
    source.write_bytes(whole)
    capsys.readouterr()
    assert run(source, "-o", folder / name, make_llm=no_model) == 2
    printed = capsys.readouterr().out
    assert (
        "in.jsonl has grown since the job began, by " in printed and "same command with --extend" in printed
    )
    assert contents(folder) == before
    Counting.answered = 0
    assert run(source, "-o", folder / name, "--extend", make_llm=Counting) == 0
    assert Counting.answered == (170 if state == "unfinished" else 80)
    assert contents(folder) == expected
    journal = json.loads((folder / f"{name}.job.json").read_text())
    assert journal["input"]["bytes"] == len(whole) and journal["state"] == "finished"
    for more in ([], ["--extend"]):
        assert run(source, "-o", folder / name, *more, make_llm=no_model) == 0
    assert contents(folder) == expected


def test_standard_input_and_csv_that_have_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "job" / "out.csv"
    text = 'prompt,id\r\n"a\r\nb",1\r\n\r\nbad\r\n'
    source.write_bytes(f"{text}c,2\r\n".encode())
    expected = whole_job(tmp_path / "whole", source, out.name, code=1)
    out.parent.mkdir()
    for more, code in ((text, 1), (f"{text}c,2\r\n", 2), (f"{text}c,2\r\n", 1)):
        source.write_bytes(more.encode())
        extend = ["--extend"] if code == 1 else []
        with source.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert run("-", "--format", "csv", "-o", out, *extend) == code
    named = {name: data.replace(b"in.csv:", b"standard input:") for name, data in expected.items()}
    assert contents(out.parent) == named


def test_kill_at_every_change_of_a_file(tmp_path: Path) -> None:
    """No answer is lost, and the same command ends the extended job. Lines of rows that the old job had not,
    as after an input that grows while the job runs, are not taken over."""
    source, begin, folder = tmp_path / "in.jsonl", tmp_path / "begin", tmp_path / "job"
    write_rows(source, rows_of(12))
    expected = whole_job(tmp_path / "whole", source, "out.csv")
    write_rows(source, rows_of(8))
    begin.mkdir()
    assert run(source, "-o", begin / "out.csv") == 0
    with (begin / "out.csv.rows.jsonl").open("a") as file:
        file.write('{"index": 8, "id": null, "text": "half a row", "error": null}\n')
    answered = (begin / "out.csv.rows.jsonl").read_bytes().splitlines()[:8]
    write_rows(source, rows_of(12))
    argv = [source, "-o", folder / "out.csv", "--extend"]
    change = 0
    with fork_server():
        while True:
            shutil.copytree(begin, folder)
            code = run_and_kill(argv, source, change=change, make_llm=FakeLLM)
            if code == 0:
                break
            assert code == -9
            assert set(answered) <= set((folder / "out.csv.rows.jsonl").read_bytes().splitlines())
            assert run(*argv) == 0 and contents(folder) == expected
            shutil.rmtree(folder)
            change += 3
    assert change > 30 and contents(folder) == expected


# -- refused -----------------------------------------------------------------------------------------------

OLD = b'{"prompt": "a"}\n{"prompt": "b"}'
KEEPS = "put the new rows into a file of their own, and run that with another -o"


@pytest.mark.parametrize(
    ("name", "old", "new", "error"),
    [
        (
            "in.jsonl",
            OLD,
            b'{"prompt": "A"}\n{"prompt": "b"}\n{"prompt": "c"}\n',
            "first 31 bytes have changed",
        ),
        ("in.jsonl", OLD, b'{"prompt": "b"}\n', "first 31 bytes have changed"),
        ("in.jsonl", OLD, OLD + b'{"prompt": "c"}\n', "with the new bytes line 2 is another row than before"),
        (
            "in.csv",
            b'prompt\na\n"b\nc\n',
            b'prompt\na\n"b\nc\nd"\n',
            "with the new bytes line 3 is another row",
        ),
    ],
)
def test_a_changed_old_row(
    tmp_path: Path, name: str, old: bytes, new: bytes, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / name, tmp_path / "out.jsonl"
    source.write_bytes(old)
    run(source, "-o", out)
    before = out.read_bytes(), files(tmp_path)
    assert before[0]
    source.write_bytes(new)
    capsys.readouterr()
    assert run(source, "-o", out, "--extend", make_llm=no_model) == 2
    printed = capsys.readouterr().out
    assert error in printed and KEEPS in printed
    assert (out.read_bytes(), files(tmp_path)) == before


def test_parquet_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    pyarrow = import_pyarrow()
    for count, more, code in ((3, [], 0), (5, [], 2), (5, ["--extend"], 2)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_of(count)), source)
        assert run(source, "-o", out, *more) == code
    printed = capsys.readouterr().out
    assert printed.count("--extend cannot tell") == printed.count(KEEPS) == 2
    assert len(read_rows(out)) == 3


def test_another_job_that_has_grown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(3)), tmp_path / "out.jsonl"
    assert run(source, "-o", out) == 0
    write_rows(source, rows_of(5))
    assert run(source, "-o", out, "--extend", "--sampling", "temperature=0.5") == 2
    printed = capsys.readouterr().out
    assert "belongs to another job: its input.bytes is" in printed and "another -o, which keeps" in printed


def test_an_input_that_grows_while_the_job_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its writer has written half of a row when the job reads it."""
    source = write_rows(tmp_path / "in.jsonl", rows_of(300))
    expected = whole_job(tmp_path / "whole", source, "out.jsonl")
    whole, out = source.read_bytes(), tmp_path / "out.jsonl"
    write_rows(source, rows_of(200))
    size = source.stat().st_size
    half = watched(lambda number: source.write_bytes(whole[: size + 20]) if number == 10 else None)
    assert run(source, "-o", out, "--window", 8, make_llm=half) == 4
    assert "has grown while the job ran; run the same command with --extend" in capsys.readouterr().err
    assert len(read_rows(out)) == 201
    source.write_bytes(whole)
    assert run(source, "-o", out, "--extend") == 0
    assert out.read_bytes() == expected["out.jsonl"]


# -- advice ------------------------------------------------------------------------------------------------


def strings_of(path: Path) -> list[str]:
    """The strings of a module that are no docstrings; parts of an f-string are joined."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(ast.parse(path.read_text()))
    return found


def test_no_message_advises_to_delete_answers_alone() -> None:
    """A string or a paragraph that speaks of deleting also names the way that keeps the answers."""
    paths = [path for folder in ("jobs", "report") for path in (ROOT / "nanovllm" / folder).glob("*.py")]
    beside = "side_files.py"  # it refuses files that are not of this job
    texts = [text for path in paths if path.name != beside for text in strings_of(path)]
    assert any("choose another -o, which keeps" in text for text in texts)
    readme = (ROOT / "README.md").read_text()
    for page in ((ROOT / "docs/jobs.md").read_text(), readme[readme.index("nanovllm run") :]):
        texts += re.split(r"\n\n|\n- |\n\|", page)
    advice = re.compile(r"\b(delete|remove|erase|discard|throw away|start over|(?<!-)rm)\b", re.I)
    for text in texts:
        assert not advice.search(text) or re.search(r"\bkeeps?\b", text), text
