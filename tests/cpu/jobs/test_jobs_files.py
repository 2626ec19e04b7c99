"""The files that a job makes beside its output: what others put in their place; their mode and owner."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from jobs import FakeLLM, files, read_rows, rows_of, run, watched, write_rows

from nanovllm.jobs.side_files import new_file
from nanovllm.report import write_report

NAMES = {  # that a job with every flag creates, from `-` to out.csv, with a report
    "out.csv.nanovllm.lock",
    "out.csv.nanovllm.stdin",
    "out.csv.nanovllm.tmp",
    "out.csv.job.json.nanovllm.tmp",
    "out.csv.rows.jsonl",
    "out.csv.rows.jsonl.nanovllm.tmp",
    f"report.html.nanovllm.{os.getpid()}.tmp",
}
OTHER = 12345  # another user
opened: list[tuple[Path, int]] | None = None  # (file, flags) of all files that this process opens


def note(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and opened is not None and isinstance(args[0], (str, os.PathLike)):
        opened.append((Path(args[0]), args[2]))


sys.addaudithook(note)


@contextmanager
def noted() -> Iterator[list[tuple[Path, int]]]:
    global opened
    opened = found = []
    try:
        yield found
    finally:
        opened = None


@pytest.fixture
def whole_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job with every flag, in tmp_path/job; its engine also makes a report."""
    source = write_rows(tmp_path / "in.jsonl", rows_of(200))
    (tmp_path / "job").mkdir()

    def report(path: Path, *args: Any, **options: Any) -> None:
        monkeypatch.setattr("nanovllm.report.page.make_report", lambda *args, **options: "<html/>")
        write_report(path, FakeLLM())  # type: ignore[arg-type]

    monkeypatch.setattr("nanovllm.jobs.run.write_report", report)
    monkeypatch.setattr("nanovllm.jobs.run.GPUMonitor", lambda llm: nullcontext())

    def job(make_llm: Any = FakeLLM) -> int:
        with source.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            folder = tmp_path / "job"
            more = ["--report", folder / "report.html"]
            return run("-", "-o", folder / "out.csv", *more, make_llm=make_llm)

    return job


def test_every_file_is_opened_in_one_safe_way(tmp_path: Path, whole_job: Any) -> None:
    folder = tmp_path / "job"
    with noted() as found:
        assert whole_job() == 0
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    written = [(path.name, flags) for path, flags in found if path.parent == folder and flags & writes]
    assert {name for name, _ in written} == NAMES
    assert all(flags & os.O_NOFOLLOW for _, flags in written)
    assert files(folder) == {"out.csv", "out.csv.job.json", "out.csv.rows.jsonl", "report.html"}


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "another user's file"])
@pytest.mark.parametrize(
    "name",
    sorted(NAMES | {"out.csv.job.json"}),
    ids=lambda name: name.replace(str(os.getpid()), "PID"),  # every process that runs tests has its own
)
def test_what_another_user_puts_in_the_place_of_a_file_is_not_touched(
    tmp_path: Path, whole_job: Any, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, victim = tmp_path / "job" / name, tmp_path / "victim"
    victim.write_text("valuable")
    if kind == "link":
        planted.symlink_to(victim)
    elif kind == "dangling link":
        planted.symlink_to(tmp_path / "nothing")
    elif kind == "hard link":
        planted.hardlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(planted)
    elif os.geteuid():
        pytest.skip("only root can give files away")
    else:
        planted.write_text("other")
        os.chown(planted, OTHER, OTHER)
    before = planted.lstat()
    code = whole_job()
    printed = "".join(capsys.readouterr())
    assert str(planted) in printed
    assert "it is neither read nor written" in printed or "has no journal, so it is no output" in printed
    assert victim.read_text() == "valuable" and not (tmp_path / "nothing").exists()
    assert os.path.samestat(planted.lstat(), before)
    assert code == (
        0 if "report" in name else 4 if name.endswith((".csv.nanovllm.tmp", ".jsonl.nanovllm.tmp")) else 2
    )
    if code == 4:
        assert len(read_rows(tmp_path / "job" / "out.csv.rows.jsonl")) == 200  # answers are kept
    planted.unlink()
    assert whole_job() == 0


@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_new_files_follow_the_umask(tmp_path: Path, whole_job: Any, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert whole_job() == 0
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "job").iterdir()}
    assert modes.keys() == {"out.csv", "out.csv.job.json", "out.csv.rows.jsonl", "report.html"}
    assert set(modes.values()) == {0o666 & ~umask}


def test_files_have_the_mode_and_owner_of_the_output(tmp_path: Path, whole_job: Any) -> None:
    folder, owner = tmp_path / "job", OTHER if os.geteuid() == 0 else os.geteuid()
    for name in ("out.csv", "report.html"):
        (folder / name).touch(0o640)
        (folder / name).chmod(0o640)
        os.chown(folder / name, owner, -1)

    def check(number: int = 0) -> None:
        for path in folder.iterdir():
            found = path.stat()
            assert (path.name, stat.S_IMODE(found.st_mode), found.st_uid) == (path.name, 0o640, owner)

    def stop(number: int) -> None:
        check()
        assert {"out.csv.nanovllm.lock", "out.csv.nanovllm.stdin"} <= files(folder)
        if number == 50:
            raise KeyboardInterrupt

    assert whole_job(watched(stop)) == 130
    check()
    assert whole_job(watched(check)) == 0
    check()
    assert files(folder) == {"out.csv", "out.csv.job.json", "out.csv.rows.jsonl", "report.html"}


def test_another_users_link_as_output_in_a_shared_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    source, shared = write_rows(tmp_path / "in.jsonl", rows_of(3)), tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "victim.jsonl").touch()
    link = shared / "out.jsonl"
    link.symlink_to(tmp_path / "victim.jsonl")
    assert run(source, "-o", link) == 0
    (tmp_path / "victim.jsonl").write_bytes(b"")
    os.lchown(link, OTHER, OTHER)
    assert run(source, "-o", link) == 2 and (tmp_path / "victim.jsonl").read_bytes() == b""
    assert f"is a link of user {OTHER} in a folder that everyone may write" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["-o", "--report"])
def test_a_name_that_is_too_long(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "in.jsonl", rows_of(3))
    names = {"-o": tmp_path / "out.jsonl", "--report": tmp_path / "r.html"}
    names[option] = tmp_path / ("x" * 240 + names[option].suffix)
    argv = [each for pair in names.items() for each in pair]
    assert run(source, *argv) == 2
    printed = capsys.readouterr().out
    assert "the name xxxxxxxxxxxxxxxxxxxx... is" in printed and "choose a shorter name" in printed
    assert files(tmp_path) == {"in.jsonl"}


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.nanovllm.tmp"
    path.write_text("left by a killed process")
    with new_file(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
