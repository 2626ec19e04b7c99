"""Jobs that one signal ends, or a second one while the engine closes: exit code, answers, files."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jobs
import pytest
from jobs import FakeLLM, files, read_rows, rows_of, run, write_rows
from killed_jobs import FORKED, fork_server

from nanovllm.jobs import main as program
from nanovllm.jobs.errors import caught_signals
from nanovllm.workers.worker import leave

SECONDS = 120  # against hangs
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Stubborn(FakeLLM):
    """An engine with a process of its own, whose close takes for ever."""

    def __init__(self, folder: Path, hangs: bool) -> None:
        super().__init__()
        self._folder, self._hangs = folder, hangs
        self._process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(SECONDS,))
        self._process.start()
        (folder / "pid").write_text(str(self._process.pid))
        self.sample = self._wait

    def _wait(self, number: int) -> None:
        if number == 50:
            (self._folder / "running").touch()
            time.sleep(SECONDS)

    def close(self) -> None:
        (self._folder / "closing").touch()
        if self._hangs:
            time.sleep(SECONDS)
        self._process.kill()
        self._process.join()


def job(source: Path, out: Path, notes: Path, hangs: bool) -> None:
    """Run a job as this process, like the program."""
    run_job: Any = run.__globals__["run_job"]
    run_job.__defaults__ = (lambda *args, **options: Stubborn(notes, hangs),)
    os._exit(program.main(["run", str(source), "-o", str(out), "--model", jobs.demo_model_path()]) or 77)


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("first", "second", "code", "state"),
    [
        (INT, None, 130, "Ctrl-C"),
        (TERM, None, 143, "SIGTERM"),
        (HUP, None, 129, "SIGHUP"),
        (INT, INT, 130, "Ctrl-C"),
        (TERM, TERM, 143, "SIGTERM"),
        (HUP, TERM, 129, "SIGHUP"),
        (INT, TERM, 130, "Ctrl-C"),
    ],
)
def test_signals(
    tmp_path: Path, first: signal.Signals, second: signal.Signals | None, code: int, state: str
) -> None:
    folder, notes = tmp_path / "job", tmp_path / "notes"
    folder.mkdir()
    notes.mkdir()
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(300)), folder / "out.jsonl"
    with fork_server():
        process = FORKED.Process(target=job, args=(source, out, notes, second is not None))
        process.start()
    assert process.pid is not None
    wait_for((notes / "running").exists)
    os.kill(process.pid, first)
    if second is not None:
        wait_for((notes / "closing").exists)
        os.kill(process.pid, second)
    process.join(SECONDS)
    assert process.exitcode == code
    child = int((notes / "pid").read_text())
    wait_for(lambda: not is_alive(child))
    assert len(read_rows(out)) == 50 and files(folder) == {"out.jsonl", "out.jsonl.job.json"}
    journal = json.loads((folder / "out.jsonl.job.json").read_text())
    assert journal["state"] == f"stopped by {state}; the same command resumes" and journal["rows"] == 50
    assert run(source, "-o", out) == 0 and len(read_rows(out)) == 300


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As SIGHUP under nohup; and the handlers are those of before at the end."""
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        handler = signal.getsignal(INT)
        with caught_signals() as signals, caught_signals() as inner:
            assert signals is inner
            assert signal.getsignal(HUP) is signal.SIG_IGN and signal.getsignal(INT) is not handler
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(TERM)
            signals.hold()
            signal.raise_signal(INT)
            assert signals.seen == [TERM, INT, INT] and signals.end[0] == 143
        assert signal.getsignal(INT) is handler
    finally:
        signal.signal(HUP, before)


@pytest.mark.parametrize("stream", [None, Mock(flush=Mock(side_effect=BrokenPipeError))])
def test_a_worker_ends_without_the_streams_of_its_parent(
    stream: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are None if they were closed, and raise if their reader is gone."""

    def end() -> None:
        sys.stdout = stream
        leave()

    process = multiprocessing.get_context("fork").Process(target=end)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0 and "Traceback" not in capfd.readouterr().err
