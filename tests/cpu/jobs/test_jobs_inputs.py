"""Several inputs of `nanovllm run`, limits and shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import no_model, read_rows, rows_of, run, watched, write_rows
from test_jobs_extend import Counting

from nanovllm.jobs import main as program
from nanovllm.jobs import packed
from nanovllm.jobs.job import find_files
from nanovllm.jobs.parquet import import_pyarrow


def pack(path: Path, content: bytes) -> Path:
    """Write a file, compressed as its name says."""
    with path.open("wb") as file, packed.packed(file, packed.PACKINGS.get(path.suffix)) as target:
        target.write(content)
    return path


def stop_at(count: int) -> Any:
    def stop(number: int) -> None:
        if number == count:
            raise KeyboardInterrupt

    return watched(stop, ahead=4)


def three_files(folder: Path, names: tuple[str, ...] = ("a.jsonl", "b.csv", "c.jsonl.gz")) -> list[bytes]:
    """Write 90 rows into three files of a folder; return the lines of JSON of each."""
    folder.mkdir()
    parts = []
    for number, name in enumerate(names):
        rows = rows_of(90)[30 * number : 30 * number + 30]
        lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        csv = b"id,prompt\n" + b"".join(f"{row['id']},{row['prompt']}\n".encode() for row in rows)
        pack(folder / name, csv if ".csv" in name else lines)
        parts.append(lines)
    return parts


# -- several inputs ----------------------------------------------------------------------------------------


def test_several_inputs_are_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, a pattern and a folder: the bytes are those of a job on all rows in one file."""
    three_files(tmp_path / "in")
    whole = tmp_path / "whole.jsonl"
    assert run(write_rows(tmp_path / "all.jsonl", rows_of(90)), "-o", whole) == 0
    monkeypatch.chdir(tmp_path)
    for number, given in enumerate((["in"], ["in/*"], ["in/a.jsonl", "in/[bc]*"])):
        out = tmp_path / f"out{number}.jsonl"
        assert run(*given, "-o", out, make_llm=stop_at(40)) == 130
        assert run(*given, "-o", out) == 0 and out.read_bytes() == whole.read_bytes()
    assert run("in", "-o", "out2.jsonl", make_llm=no_model) == 0, "it is the same list"
    assert run("in/c.jsonl.gz", "in/a.jsonl", "in/b.csv", "-o", "out2.jsonl", make_llm=no_model) == 2
    assert run("in/a.jsonl", "in/b.csv", "-o", "out2.jsonl", make_llm=no_model) == 2


def test_what_files_arguments_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a folder without outputs of jobs, by name; each once."""
    monkeypatch.chdir(tmp_path)
    three_files(tmp_path / "in")
    (tmp_path / "in/below").mkdir()
    for name in ("notes.txt", ".hidden.jsonl", "b10.jsonl", "b9.jsonl", "below/d.jsonl"):
        (tmp_path / "in" / name).write_bytes(b'{"prompt": "x"}\n')
    names = ["a.jsonl", "b.csv", "b10.jsonl", "b9.jsonl", "c.jsonl.gz"]
    assert [path.name for path in find_files(["in"])] == names
    assert run("in", "-o", "in/out.csv") == 0
    assert run("in", "-o", "in/out.csv", make_llm=no_model) == 0
    assert [path.name for path in find_files(["in"])] == names
    assert [path.name for path in find_files(["in/**/*.jsonl"])] == [
        *("a.jsonl", "b10.jsonl", "b9.jsonl", "d.jsonl", "out.csv.rows.jsonl")
    ]
    assert (
        run("in/*.csv", "-o", "in/o.csv") == 0 and run("in/*.csv", "-o", "in/o.csv", make_llm=no_model) == 0
    )


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["in/x*.jsonl"], "in/x*.jsonl matches no file; check the pattern"),
        (["empty"], "empty is a folder without files of rows (.jsonl, "),
        (["in", "in/a.jsonl"], "in/a.jsonl is given twice"),
        (["in/a.jsonl", "-"], "- is standard input, and it is read alone; leave out the other inputs"),
        (["in/a.jsonl", "none.jsonl"], "none.jsonl: No such file or directory"),
        (["in/a.jsonl", "other.csv"], "other.csv has no column 'prompt' or 'messages', but 'x'"),
        (
            ["in/a.jsonl", "batch.jsonl"],
            "one of a.jsonl and batch.jsonl is an OpenAI batch, and the other is not",
        ),
        (["in/a.jsonl", "in/out.jsonl"], "-o in/out.jsonl is the input"),
    ],
)
def test_refused_inputs(
    tmp_path: Path,
    given: list[str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    three_files(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.csv").write_text("x\n1\n")
    write_rows(
        tmp_path / "batch.jsonl", [{"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "a"}}]
    )
    if "in/out.jsonl" in given:
        (tmp_path / "in/out.jsonl").touch()
    assert run(*given, "-o", "in/out.jsonl", make_llm=no_model) == 2
    assert error in capsys.readouterr().out


def test_errors_name_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / "in.jsonl", [{"prompt": "a"}, b"{\n"])
    write_rows(tmp_path / "other.jsonl", [b"{\n", {"prompt": "a"}])
    assert run("x/in.jsonl", "other.jsonl", "-o", "one.jsonl") == 1
    errors = [row["error"] for row in read_rows(tmp_path / "one.jsonl")]
    assert [error and error.split(": it is")[0] for error in errors] == [
        *(None, "in.jsonl: line 2", "other.jsonl: line 1", None)
    ]
    assert run("x", "y", "-o", "two.jsonl") == 1, "two files have one name, so paths tell them apart"
    errors = [row["error"] for row in read_rows(tmp_path / "two.jsonl")]
    assert [error.split(": it is")[0] for error in errors if error] == [
        "x/in.jsonl: line 2",
        "y/in.jsonl: line 2",
    ]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_extend_knows_the_list(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """New files after the old ones, and a last file that has grown."""
    monkeypatch.chdir(tmp_path)
    parts = three_files(tmp_path / "in", (f"a.{ending}", f"b.{ending}", f"c.{ending}"))
    assert run("in", "-o", "whole.jsonl") == 0
    whole, last, grown = Path("whole.jsonl").read_bytes(), Path(f"in/c.{ending}"), Path(f"in/b.{ending}")
    content, all_of_b = last.read_bytes(), grown.read_bytes()
    last.unlink()
    lines = parts[1].splitlines(keepends=True)
    pack(grown, b"".join(lines[:20]))
    assert run("in", "-o", "out.jsonl", make_llm=stop_at(30)) == 130
    with grown.open("ab") as file:
        file.write(pack(tmp_path / f"rest.{ending}", b"".join(lines[20:])).read_bytes())
    last.write_bytes(content)
    assert run("in", "-o", "out.jsonl", make_llm=no_model) == 2
    assert "has grown since the job began, by 1 file and " in capsys.readouterr().out
    Counting.answered = 0
    assert run("in", "-o", "out.jsonl", "--extend", make_llm=Counting) == 0
    assert Path("out.jsonl").read_bytes() == whole and Counting.answered == 60
    pack(Path(f"in/aa.{ending}"), parts[0])
    assert run("in", "-o", "out.jsonl", "--extend", make_llm=no_model) == 2
    printed = capsys.readouterr().out
    assert (
        f"in/aa.{ending} is not the file that the job began with (new files must come after all old"
        in printed
    )
    Path(f"in/aa.{ending}").unlink()
    last.unlink()
    assert run("in", "-o", "out.jsonl", "--extend", make_llm=no_model) == 2
    assert "the job began with 3 files, and these are 2" in capsys.readouterr().out
    assert Path("out.jsonl").read_bytes() == whole and all_of_b


def test_a_new_parquet_file_after_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pyarrow = import_pyarrow()
    for number in range(2):
        rows = rows_of(60)[30 * number : 30 * number + 30]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f"{number}.parquet")
        assert run("[01].parquet", "-o", "out.jsonl", *["--extend"] * number) == 0
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == [f"r{index}" for index in range(60)]


# -- limits and shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [[], ["--sampling", "temperature=1", "--seed", "7"]])
def test_shards_together_are_one_job(tmp_path: Path, sampled: list[str]) -> None:
    three_files(tmp_path / "in")
    argv = [tmp_path / "in", *sampled]
    assert run(*argv, "-o", tmp_path / "whole.jsonl") == 0
    whole = (tmp_path / "whole.jsonl").read_bytes()
    for count in (1, 4, 7, 100):
        outs = [tmp_path / f"{count}-{number}.jsonl" for number in range(1, count + 1)]
        for number, out in enumerate(outs, 1):
            shard = ["-o", out, "--shard", f"{number}/{count}"]
            if number == 2 and count == 4:
                assert run(*argv, *shard, make_llm=stop_at(5)) == 130
                assert run(*argv, "-o", out, "--shard", "3/4", make_llm=no_model) == 2, (
                    "another part of the rows"
                )
            assert run(*argv, *shard, *["--ordered"] * (number % 2)) == 0
        assert b"".join(out.read_bytes() for out in outs) == whole
        sizes = [len(read_rows(out)) for out in outs]
        assert max(sizes) - min(sizes) <= 1


def test_a_limit_that_grows_keeps_its_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is tried on few rows, and then run on all."""
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(100)), tmp_path / "out.csv"
    assert run(source, "-o", tmp_path / "whole.csv") == 0
    assert run(source, "-o", out, "--limit", 10) == 0
    assert out.read_bytes() == b"".join((tmp_path / "whole.csv").read_bytes().splitlines(keepends=True)[:11])
    Counting.answered = 0
    assert run(source, "-o", out, "--limit", 30, make_llm=Counting) == 0 and Counting.answered == 20
    assert run(source, "-o", out, "--limit", 20, make_llm=no_model) == 2
    assert "its limit is 30, and 20 is less" in capsys.readouterr().out
    assert run(source, "-o", out, make_llm=Counting) == 0 and Counting.answered == 90
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert run(source, "-o", out, "--limit", 500, make_llm=no_model) == 2
    halves = [tmp_path / f"half{number}.jsonl" for number in (1, 2)]
    for number, half in enumerate(halves, 1):
        assert run(source, "-o", half, "--limit", 21, "--shard", f"{number}/2") == 0
    assert [row["index"] for half in halves for row in read_rows(half)] == list(range(21))


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1", "a/b", "1/0"])
def test_wrong_shards(shard: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["run", "a", "-o", "b.jsonl", "--model", "c", "--shard", shard])
    assert "must be I/N with I from 1 to N, such as 2/8" in capsys.readouterr().err


def test_shards_of_an_input_that_has_grown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(40)), tmp_path / "out.jsonl"
    assert run(source, "-o", out, "--shard", "1/2") == 0
    write_rows(source, rows_of(50))
    assert run(source, "-o", out, "--shard", "1/2", "--extend", make_llm=no_model) == 2
    assert "and its shards would have other rows" in capsys.readouterr().out


def test_n_is_a_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(3)), tmp_path / "out.jsonl"
    assert run(source, "-o", out, "--n", 2, "--sampling", "temperature=1") == 0
    assert run(source, "-o", out, "--sampling", "temperature=1,n=2", make_llm=no_model) == 0
    with pytest.raises(SystemExit):
        run(source, "-o", out, "--n", 2, "--sampling", "n=3,temperature=1")
    assert "--n is 2, and in --sampling it is another; keep one" in capsys.readouterr().err
