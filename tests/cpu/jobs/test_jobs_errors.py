"""`nanovllm run` with an engine that computes nothing: jobs that are refused, and that fail and go on."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jobs
import pytest
from jobs import FakeLLM, files, no_model, read_rows, rows_of, run, watched, write_rows

from nanovllm.errors import WorkerError
from nanovllm.jobs import main as program
from nanovllm.jobs.output import Output
from nanovllm.sampling_params import SamplingParams

# -- refused -----------------------------------------------------------------------------------------------


def test_another_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(20)), tmp_path / "out.jsonl"
    assert run(source, "-o", out, "--sampling", "temperature=0") == 0
    before = out.read_bytes()
    capsys.readouterr()
    for change, error in {
        ("--sampling", "temperature=0.5"): "its sampling.temperature is 0, not 0.5",
        ("--sampling", "temperature=0", "--dtype", "float16"): 'its options.dtype is "auto", not "float16"',
        ("--sampling", "temperature=0", "--prompt-column", "id"): "its prompt.prompt_column is null",
    }.items():
        assert run(source, "-o", out, *change) == 2
        assert error in capsys.readouterr().out
    assert run(source, "-o", out, "--sampling", "temperature=0", "--max-num-seqs", 8) == 0
    table = tmp_path / "in.csv"
    table.write_text("prompt\na\tb\n")
    assert run(table, "-o", tmp_path / "table.jsonl") == 0
    assert run(table, "-o", tmp_path / "table.jsonl", "--format", "tsv") == 2
    assert 'its format is "csv", not "tsv"' in capsys.readouterr().out
    (tmp_path / "other.jsonl").write_text("text\n")
    assert run(source, "-o", tmp_path / "other.jsonl") == 2
    assert "has no journal, so it is no output of this job" in capsys.readouterr().out
    assert out.read_bytes() == before and (tmp_path / "other.jsonl").read_text() == "text\n"


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["-o", "out.txt"], "its ending must be one of .jsonl"),
        (["-o", "none/out.jsonl"], "there is no folder none; make it first"),
        (["-o", "folder.jsonl"], "is a folder"),
        (["-o", "pipe.csv"], "is a folder, a pipe, a device or a link to itself; name a file"),
        (["-o", "itself.jsonl"], "or a link to itself; name a file"),
        (["-o", "in.jsonl"], "is the input"),
        (["-o", "a" * 244 + ".jsonl"], "aaaaaa... is 19 bytes too long: files beside it need 274 bytes"),
        (["-o", "a" * 300 + ".jsonl"], "aaa.jsonl: File name too long; choose another -o"),
        (
            ["-o", "out.jsonl", "--report", "a" * 300 + ".html"],
            "aaa.html: File name too long; choose another --rep",
        ),
        (["-o", "out.jsonl", "--max-num-seqs", "0"], "max_num_seqs must be at least 1, not 0"),
        (["-o", "out.jsonl", "--template", "{"], "the template '{': Single '{' encountered"),
        (["-o", "out.jsonl", "--format", "csv", "--prompt-column", "q"], "has no column 'q', but '"),
        (["-o", "out.jsonl", "--prompt-column", "q"], "rows have no column 'q', but 'custom_id', 'url'"),
        (["-o", "out.parquet"], "pip install 'nanovllm[jobs]'"),
        (["-o", "out.csv"], "an OpenAI batch is answered in a .jsonl file"),
        (["-o", "out.jsonl", "--id-column", "custom_id"], "have no column 'prompt' or 'messages', but 'cust"),
        (["-o", "out.jsonl", "--format", "csv"], "has no column 'prompt' or 'messages', but '"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    tmp_path: Path,
    argv: list[str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as if pyarrow were not installed
    write_rows(tmp_path / "in.jsonl", [{"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "a"}}])
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "itself.jsonl").symlink_to("itself.jsonl")
    before = files(tmp_path)
    assert run("in.jsonl", *argv) == 2
    assert error in capsys.readouterr().out
    assert files(tmp_path) == before


@pytest.mark.parametrize("argv", [(), ("--prompt-column", "text")], ids=str)
def test_a_table_without_columns_says_where_they_stand(
    tmp_path: Path, argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "empty.csv"
    source.touch()
    assert run(source, "-o", tmp_path / "out.jsonl", *argv) == 2
    assert "empty.csv has no columns: name them in the first line of a CSV file" in capsys.readouterr().out
    assert files(tmp_path) == {"empty.csv"}


def test_a_report_that_is_the_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "in.html", rows_of(3))
    before = source.read_bytes()
    assert run(source, "--format", "jsonl", "-o", tmp_path / "out.jsonl", "--report", source) == 2
    assert "in.html is the input; choose another --report" in capsys.readouterr().out
    assert source.read_bytes() == before and files(tmp_path) == {"in.html"}


def test_a_column_that_no_row_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "in.jsonl", [b"{\n", {"text": "a", "id": 1}, {"text": "b", "key": 2}])
    assert run(source, "-o", tmp_path / "out.jsonl") == 2
    assert "have no column 'prompt' or 'messages', but 'text', 'id', 'key': say" in capsys.readouterr().out
    assert files(tmp_path) == {"in.jsonl"}
    assert run(source, "-o", tmp_path / "out.jsonl", "--prompt-column", "text") == 1


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(37, "No locks available")))
    assert run(write_rows(tmp_path / "in.jsonl", rows_of(3)), "-o", tmp_path / "out.jsonl") == 2
    printed = capsys.readouterr().out
    assert "out.jsonl.nanovllm.lock cannot be locked: No locks available; choose an -o on" in printed
    assert files(tmp_path) == {"in.jsonl"}


def test_an_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "in.jsonl", rows_of(3))
    assert run(source, "-o", "/proc/out.jsonl") == 2
    assert "/proc" in capsys.readouterr().out


def test_an_engine_that_does_not_start_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(3)), tmp_path / "out.jsonl"

    def make(*args: object, **options: object) -> FakeLLM:
        raise ValueError("device='cuda', and torch sees no CUDA device")

    assert run(source, "-o", out, make_llm=make) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().out
    assert run(source, "-o", out) == 0


def test_a_model_without_a_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows with messages become error rows. If all rows are conversations, the job is refused."""
    rows = rows_of(5)
    rows[2] = {"id": "c", "messages": [{"role": "user", "content": "Hi"}]}
    source, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"

    class WithoutTemplate(FakeLLM):
        tokenizer = Mock(chat_template=None, return_value={"input_ids": [[1]]})

    for more in (["--messages-column", "messages"], ["--chat-template-kwargs", '{"a": 1}']):
        assert run(source, "-o", out, *more, make_llm=WithoutTemplate) == 2
        assert "rows with messages: this model has no chat template" in capsys.readouterr().out
        assert out.read_bytes() == b""
    assert run(source, "-o", out, make_llm=WithoutTemplate) == 1
    found = read_rows(out)
    assert [row["error"] is None for row in found] == [True, True, False, True, True]
    assert found[2]["id"] == "c" and "this model has no chat template; put" in found[2]["error"]


# -- an engine that fails, and signals ---------------------------------------------------------------------


def test_an_unexpected_error_has_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nanovllm.jobs.run.open_job", Mock(side_effect=OSError(5, "Input/output error")))
    source = write_rows(tmp_path / "in.jsonl", rows_of(3))
    argv = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--model", jobs.demo_model_path()]
    assert program.main(argv) == 4
    assert "Input/output error" in capsys.readouterr().err


def test_a_worker_that_dies_at_the_start_leaves_a_job_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(3)), tmp_path / "out.jsonl"
    killed = Mock(side_effect=WorkerError("replica 0 was killed by SIGKILL, at its start"))
    assert run(source, "-o", out, make_llm=killed) == 4
    printed = capsys.readouterr().err
    assert "failed: WorkerError: replica 0 was killed" in printed and "Traceback" not in printed
    assert run(source, "-o", out) == 0


def test_an_engine_that_fails_leaves_a_job_that_goes_on(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(300)), tmp_path / "out.jsonl"

    class Failing(FakeLLM):
        def answer(self, index: int, prompt: Any, params: SamplingParams) -> Any:
            if index == 200:
                raise RuntimeError("CUDA error")
            return super().answer(index, prompt, params)

    assert run(source, "-o", out, make_llm=Failing) == 4
    assert 0 < len(read_rows(out)) < 200
    assert "failed: RuntimeError: CUDA error" in (tmp_path / "out.jsonl.job.json").read_text()
    assert run(source, "-o", out) == 0
    assert [row["index"] for row in read_rows(out)] == list(range(300))


def test_sigterm_that_ends_a_worker_too(tmp_path: Path) -> None:
    """A scheduler sends SIGTERM to all processes of a job, while the engine delays interrupts during its
    steps.
    """
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(300)), tmp_path / "out.jsonl"

    def terminate(number: int) -> None:
        if number == 50:
            before = signal.signal(signal.SIGINT, lambda number, frame: None)
            os.kill(os.getpid(), signal.SIGTERM)
            signal.signal(signal.SIGINT, before)
            raise WorkerError("rank 1 was killed by SIGTERM")

    assert run(source, "-o", out, make_llm=watched(terminate)) == 143
    assert "stopped by SIGTERM" in (tmp_path / "out.jsonl.job.json").read_text()
    assert run(source, "-o", out) == 0


def test_sigterm_that_ends_a_worker_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def terminated(number: int) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        raise WorkerError("rank 1 was killed by SIGTERM")

    source = write_rows(tmp_path / "in.jsonl", rows_of(100))
    assert run(source, "-o", tmp_path / "out.jsonl", make_llm=watched(terminated)) == 143
    printed = capsys.readouterr().err
    assert "stopped by SIGTERM; the same command resumes" in printed and "Traceback" not in printed


# -- files that change while a job runs --------------------------------------------------------------------


def test_an_input_that_changes_while_the_job_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(200)), tmp_path / "out.jsonl"

    class Appending(FakeLLM):
        def answer(self, index: int, prompt: Any, params: SamplingParams) -> Any:
            if index == 50:
                write_rows(source, rows_of(150))
            return super().answer(index, prompt, params)

    assert run(source, "-o", out, make_llm=Appending) == 4
    assert "was changed while the job ran" in capsys.readouterr().err
    assert run(source, "-o", out) == 2


def test_an_input_that_is_only_touched_while_the_job_runs(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(200)), tmp_path / "out.jsonl"
    assert run(source, "-o", out, make_llm=watched(lambda number: os.utime(source, (number, number)))) == 0


@pytest.mark.parametrize("more", [[], ["--ordered"]])
@pytest.mark.parametrize("change", ["replace", "truncate", "delete"])
def test_an_output_that_another_program_changes(
    tmp_path: Path, change: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(200)), tmp_path / "out.jsonl"

    def disturb(number: int) -> None:
        if number == 50 and change == "replace":  # as editors do
            (tmp_path / "saved").write_bytes(out.read_bytes())
            (tmp_path / "saved").replace(out)
        elif number == 50:
            out.write_bytes(b"") if change == "truncate" else out.unlink()

    assert run(source, "-o", out, *more, make_llm=watched(disturb)) == 4
    assert "changed" in (error := capsys.readouterr().err) or "No such file" in error
    assert run(source, "-o", out) == 0
    assert [row["index"] for row in read_rows(out)] == list(range(200))


def test_lines_of_rows_that_the_input_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(20)), tmp_path / "out.jsonl"
    assert run(source, "-o", out) == 0
    whole = out.read_bytes()
    out.write_bytes(whole + b'{"index": 20, "error": null}\n{"index": 9999, "error": null}\n')
    assert run(source, "-o", out, make_llm=no_model) == 4
    assert "it has 1 line for rows that are not in the input" in capsys.readouterr().err
    out.write_bytes(out.read_bytes().replace(b'{"index": 20, "error": null}\n', b""))
    assert run(source, "-o", out, make_llm=no_model) == 0 and out.read_bytes() == whole


# -- a disk that fails -------------------------------------------------------------------------------------


def test_a_file_that_may_grow_no_further(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(400)), tmp_path / "out.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = 0
    for limit in (10_000, 20_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            assert run(source, "-o", out) == 4
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "File too large, after" in capsys.readouterr().err
        assert size < out.stat().st_size <= limit and out.read_bytes().endswith(b"\n")
        size = out.stat().st_size
    assert run(source, "-o", out) == 0
    assert [row["index"] for row in read_rows(out)] == list(range(400))


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_full_disk(tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A small tmpfs that has no space for the journal, for some rows, or for the last step."""
    source, disk = write_rows(tmp_path / "in.jsonl", rows_of(400)), tmp_path / "disk"
    disk.mkdir()
    out, lines = disk / f"out.{ending}", disk / ("out.jsonl" if ending == "jsonl" else "out.csv.rows.jsonl")
    argv = [source, "-o", out, "--columns", "none"]
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this user cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        (disk / "other").write_bytes(bytes(4096))
        assert run(*argv) == 2
        assert "cannot be written: No space left on device" in capsys.readouterr().out
        assert files(disk) == {"other"}
        (disk / "other").unlink()
        for size, error in ((24, "left on device, after"), (64, "could not be finished: No space left")):
            subprocess.run(["mount", "-o", f"remount,size={size}k", disk], check=True)
            assert run(*argv) == 4
            assert error in capsys.readouterr().err
            assert lines.read_bytes().endswith(b"\n") and not list(disk.glob("*.tmp"))
        assert len(read_rows(lines)) == 400
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        assert run(*argv) == 0
        assert [row["index"] for row in read_rows(lines)] == list(range(400))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_line_that_does_not_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(200)), tmp_path / "out.jsonl"

    def broken(output: Output) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Output, "sync", broken)
        assert run(source, "-o", out) == 4
    assert "Input/output error" in (tmp_path / "out.jsonl.job.json").read_text()
    assert run(source, "-o", out) == 0


def test_a_disk_that_is_full_at_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(200)), tmp_path / "out.jsonl"

    def full(path: Path, num_rows: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nanovllm.jobs.run.put_in_order", full)
        assert run(source, "-o", out) == 4
    assert len(read_rows(out)) == 200
    assert run(source, "-o", out, make_llm=no_model) == 0
    assert [row["index"] for row in read_rows(out)] == list(range(200))
