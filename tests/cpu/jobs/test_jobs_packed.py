"""Compressed files in and out of `nanovllm run`, and its answers on standard output."""

from __future__ import annotations

import gzip
import io
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from jobs import files, no_model, read_rows, rows_of, run, watched, write_rows
from test_jobs_inputs import pack, stop_at

from nanovllm import demo_model_path
from nanovllm.jobs import main as program
from nanovllm.jobs import packed

# -- compressed files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "csv.gz", "tsv.zst"])
def test_compressed_output(tmp_path: Path, ending: str) -> None:
    """Answers of an interrupted job are lines beside it; the end has the bytes of an unbroken job."""
    source = write_rows(tmp_path / "in.jsonl", rows_of(100))
    plain, whole, out = (
        tmp_path / f"plain.{ending[:-3].strip('.')}",
        tmp_path / f"whole.{ending}",
        tmp_path / f"o.{ending}",
    )
    assert run(source, "-o", plain) == 0 and run(source, "-o", whole) == 0
    with packed.open_rows(whole) as file:
        assert file.read() == plain.read_bytes()
    assert run(source, "-o", out, make_llm=stop_at(50)) == 130 and not out.exists()
    assert len(read_rows(tmp_path / f"o.{ending}.rows.jsonl")) >= 50
    assert run(source, "-o", out) == 0 and out.read_bytes() == whole.read_bytes()
    assert run(source, "-o", out, make_llm=no_model) == 0
    if ending.endswith(".gz"):
        assert gzip.decompress(out.read_bytes()) == plain.read_bytes()


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("format", ["jsonl", "csv", "tsv"])
def test_compressed_input(tmp_path: Path, format: str, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal answers and errors, with bad rows after which a table is read again from their second line."""
    monkeypatch.setattr(packed, "CHUNK", 300)
    rng = random.Random(1)
    tab = {"csv": ",", "tsv": "\t"}.get(format)
    if tab is None:
        lines = [json.dumps(row).encode() for row in rows_of(500)] + [b"{", b""]
    else:
        lines = [f'{row["id"]}{tab}"{row["prompt"]}"'.encode() for row in rows_of(500)]
        lines += [b'bad%b"open' % tab.encode(), b"x" * 3000] * 3
    rng.shuffle(lines)
    content = b"\n".join([b"id" + tab.encode() + b"prompt" if tab else lines[0], *lines]) + b"\n"
    for name in (f"in.{format}", f"in.{format}.{ending}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pack(tmp_path / name, content)
        assert run(tmp_path / name, "-o", tmp_path / f"{len(name)}.jsonl") == 1
    plain, unpacked = (
        read_rows(path) for path in sorted(tmp_path.glob("*[0-9].jsonl"), key=lambda p: int(p.stem))
    )
    assert len(plain) > 500
    for one, other in zip(plain, unpacked, strict=True):
        if one["error"]:
            assert other["error"] == one["error"].replace(f"in.{format}:", f"in.{format}.{ending}:")
        else:
            assert one == other


def test_a_compressed_file_on_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = pack(tmp_path / "in.gz", write_rows(tmp_path / "in.jsonl", rows_of(20)).read_bytes())
    with source.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run("-", "-o", tmp_path / "out.jsonl") == 0
    assert len(read_rows(tmp_path / "out.jsonl")) == 20


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_damaged_and_bombs(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused before anything is written; `check` says so too."""
    rows = b"".join(b'{"prompt": "%d"}\n' % random.Random(index).randrange(10**9) for index in range(5000))
    source, out = pack(tmp_path / f"in.jsonl.{ending}", rows), tmp_path / "out.jsonl"
    source.write_bytes(source.read_bytes()[:-50])
    assert run(source, "-o", out, make_llm=no_model) == 2 and files(tmp_path) == {source.name}
    assert "is compressed and damaged: " in capsys.readouterr().out
    assert program.main(["check", str(source)]) == 2
    assert "is compressed and damaged: " in capsys.readouterr().out
    monkeypatch.setattr(packed, "MAX_UNPACKED_FREELY", 2**20)
    pack(source, b'{"prompt": "%b"}\n' % (b"a" * 2**23))
    assert source.stat().st_size < 2**14
    assert run(source, "-o", out, make_llm=no_model) == 2
    assert "unpacks to more than 1,000 times its size, as no text does" in capsys.readouterr().out


def test_refused_compressed_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "in.jsonl", rows_of(2))
    for name, error in (
        ("out.parquet.gz", "Parquet is compressed within; leave out the ending .gz"),
        ("out.gz", "its ending must be one of .jsonl"),
    ):
        assert run(source, "-o", tmp_path / name) == 2 and error in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(source, "-o", tmp_path / "out.jsonl.zst") == 2
    assert "needs the package pyarrow" in capsys.readouterr().out


# -- standard output ---------------------------------------------------------------------------------------


class Stdout(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), "utf-8")


def test_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(100)), tmp_path / "out.jsonl"
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))  # that no other job uses

    def stop_with_a_folder(number: int) -> None:
        if number == 20:
            assert list((tmp_path / "own").glob("nanovllm-*/out.jsonl")), "while it runs"
            raise KeyboardInterrupt

    assert run(source, "-o", out) == 0
    for more in ([], ["--ordered"]):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", printed := Stdout())
            assert run(source, "-o", "-", *more) == 0
        content = printed.buffer.getvalue()  # type: ignore[attr-defined]
        lines = content.splitlines(keepends=True)
        assert sorted(lines) == sorted(out.read_bytes().splitlines(keepends=True))
        assert not more or content == out.read_bytes()
    assert "standard output: finished. 100 of 100 rows" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Stdout())
        assert run(source, "-o", "-", make_llm=watched(stop_with_a_folder)) == 130
    printed_text = capsys.readouterr().err
    assert (
        "stopped by Ctrl-C; an output to standard output cannot be resumed, so run it again" in printed_text
    )
    for flag in ("--extend", "--retry-errors"):
        assert run(source, "-o", "-", flag, make_llm=no_model) == 2
        assert f"-o - keeps no answers, so {flag} has no job to resume" in capsys.readouterr().out
    assert not list((tmp_path / "own").iterdir())


def test_a_pipe_from_end_to_end(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", rows_of(40))
    argv = [sys.executable, "-m", "nanovllm", "run", "-", "-o", "-", "--model", demo_model_path()]
    argv += ["--sampling", "temperature=0,max_tokens=2", "--num-kvcache-blocks", "99", "--device", "cpu"]
    with source.open() as stdin:
        done = subprocess.run(argv, stdin=stdin, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(line)["index"] for line in done.stdout.splitlines()) == list(range(40))


def test_a_reader_that_leaves_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Left(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    source = write_rows(tmp_path / "in.jsonl", rows_of(100))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Left())))
        assert run(source, "-o", "-") == 141
    assert "stopped, because the reader of standard output left" in capsys.readouterr().err
