"""Jobs that a signal ends, or a second one while the engine closes: exit code, answers, files."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jobs
import pytest
import torch
from jobs import FakeLLM, Lent, files, read_rows, rows_of, run, watched, write_rows
from killed_jobs import FORKED, fork_server

from nanovllm import LLM
from nanovllm.__main__ import program as as_process
from nanovllm.batch import StepKind
from nanovllm.engine.stats import StepStats
from nanovllm.errors import ModelLoadError
from nanovllm.jobs import main as program
from nanovllm.jobs.errors import caught_signals
from nanovllm.parallel.worker import leave

SECONDS = 120  # against hangs
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
STEP = StepStats(StepKind.PREFILL, 0, 0, 0, 0.01, 0, 0, 0, 1, 0, 0.0)


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
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                time.sleep(0.001)
                self.on_step(STEP)

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


# -- any moment ---------------------------------------------------------------------------------------------


def in_a_callback() -> None:
    """Ctrl-C in the callback of a weak reference. Python drops what is raised there."""

    class Owner:
        pass

    owner = Owner()
    reference = weakref.ref(owner, lambda _: signal.raise_signal(INT))
    del owner
    assert reference() is None


@pytest.mark.parametrize("place", ["load", "answer", "close"])
def test_ctrl_c_in_a_callback_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    monkeypatch.setattr(FakeLLM, "close", lambda self: in_a_callback() if place == "close" else None)

    def make(*args: object, **options: object) -> FakeLLM:
        if place == "load":
            in_a_callback()
        return watched(lambda number: in_a_callback() if (place, number) == ("answer", 50) else None)()

    source, out = write_rows(tmp_path / "in.jsonl", rows_of(300)), tmp_path / "out.jsonl"
    assert run(source, "-o", out, make_llm=make) == 130
    assert len(read_rows(out)) == {"load": 0, "answer": 51, "close": 300}[place] and printed == []
    assert '"state": "stopped by Ctrl-C' in (tmp_path / "out.jsonl.job.json").read_text()
    assert run(source, "-o", out) == 0
    assert [row["index"] for row in read_rows(out)] == list(range(300))


def interrupted_library(*args: object, **options: object) -> Any:
    """A library in C that makes another error of an interrupt."""
    with suppress(KeyboardInterrupt):
        signal.raise_signal(INT)
    raise ModelLoadError("could not determine the shape of a tensor")


def test_an_interrupted_load_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", rows_of(3)), tmp_path / "out.jsonl"
    assert run(source, "-o", out, make_llm=interrupted_library) == 130
    assert '"state": "stopped by Ctrl-C' in (tmp_path / "out.jsonl.job.json").read_text()
    codes: list[int] = []
    monkeypatch.setattr(program, "leave", codes.append)
    monkeypatch.setattr("nanovllm.jobs.run.find_model", interrupted_library)
    program.main(["run", str(source), "-o", str(out), "--model", jobs.demo_model_path()])
    assert codes == [130] and "shape of a tensor" not in capsys.readouterr().err


def test_a_signal_at_the_end_of_the_process_changes_nothing() -> None:
    """Python takes a second to end; what a handler raises then is printed, and the exit code is lost."""
    code = "import atexit, os, runpy, signal; from nanovllm.jobs import main; main.main = lambda: 3\n"
    code += "for number in (signal.SIGINT, signal.SIGTERM): atexit.register(os.kill, os.getpid(), number)\n"
    code += "runpy.run_module('nanovllm', run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (3, "")


# Python imports this before anything else. Ctrl-C comes when a module of the package is first asked for.
SITE = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_MODULE"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
"""
SCRIPT = "import sys\nfrom nanovllm.__main__ import program\nsys.exit(program())\n"  # as pip writes it


def interrupted_import(folder: Path, module: str, *argv: object) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(SITE)
    env = {**os.environ, "PYTHONPATH": str(folder), "INTERRUPTED_MODULE": module}
    command = [sys.executable, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("module", ["nanovllm.extras", "numpy", "nanovllm.jobs.main", "nanovllm.jobs.about"])
def test_ctrl_c_while_the_package_is_imported(tmp_path: Path, module: str) -> None:
    (script := tmp_path / "nanovllm").write_text(SCRIPT)
    for command in ([script], ["-m", "nanovllm"]):
        found = interrupted_import(tmp_path, module, *command, "version")
        assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


def test_ctrl_c_while_the_package_is_imported_elsewhere(tmp_path: Path) -> None:
    """In other programs it is theirs, and where it is ignored, as in the background, it stays so."""
    (other := tmp_path / "other.py").write_text("import nanovllm")
    taken = "import sys; sys.argv.pop(); import nanovllm"  # a program that has read its arguments
    for command in (
        ["-c", "import nanovllm", "nanovllm"],
        ["-c", taken, "nanovllm"],
        [other, "-m", "nanovllm"],
    ):
        found = interrupted_import(tmp_path, "nanovllm.extras", *command)
        assert found.returncode == -INT and "KeyboardInterrupt" in found.stderr
    ignoring = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    ignoring += "os.execv(sys.executable, [sys.executable, '-m', 'nanovllm', '--version'])"
    found = interrupted_import(tmp_path, "nanovllm.extras", "-c", ignoring)
    assert found.returncode == 0 and found.stdout.startswith("nanovllm ")


def interrupted(argv: list[Any], moment: int | None, note: Path, make_llm: Callable[..., Any]) -> None:
    """Run a job as the program does; the call of a function with this number is interrupted by Ctrl-C. `note`
    gets the number of calls, then what is printed. moment: None counts nothing, as others interrupt the job:
    an interrupt while Python is in `count` would keep the call that is counted from being made. That may be
    the release of a lock of an import, and the import would wait for ever."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"
        if event == "call" and calls == moment:
            signal.raise_signal(INT)

    def main() -> int:
        os.write(file, b"0 calls\n")
        if moment is not None:
            sys.setprofile(count)
        try:
            return real_main()
        finally:
            sys.setprofile(None)
            os.write(file, f"calls: {calls}\n".encode())

    file = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, sys.stderr.fileno())
    torch.set_num_threads(1)
    real_main, program.main = program.main, main
    sys.argv = ["nanovllm", "run", *map(str, argv), "--model", jobs.demo_model_path()]
    run_job: Any = run.__globals__["run_job"]
    run_job.__defaults__ = (make_llm,)
    as_process()


def check_interrupted(process: Any, make_llm: Callable[..., Any], source: Path, *argv: object) -> int:
    """Wait for an interrupted job and check how it ended; resume it, and check its answers. Return its exit
    code."""
    process.join(SECONDS)
    folder, rows = source.parent, len(read_rows(source))
    journal, out, note = (folder / name for name in ("out.jsonl.job.json", "out.jsonl", "note"))
    code, printed = process.exitcode, note.read_text()
    assert code in (0, 130) and "Traceback" not in printed and "ignored" not in printed, (code, printed)
    state = json.loads(journal.read_text())["state"] if journal.exists() else ""
    assert (code == 0) == (state == "finished"), (code, state, printed)
    assert code == 0 or state in ("", "running", "stopped by Ctrl-C; the same command resumes"), state
    before = read_rows(out) if out.exists() else []
    assert run(source, "-o", out, *argv, make_llm=make_llm) == 0
    after = read_rows(out)
    assert [row["index"] for row in after] == list(range(rows))
    assert all(row == after[row["index"]] for row in before)
    assert files(folder) == {source.name, out.name, journal.name, note.name}
    return code


def test_ctrl_c_at_any_call(tmp_path: Path) -> None:
    rng, codes = random.Random(0), Counter[int]()
    num_calls = 0
    for number in range(25):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = write_rows(folder / "in.jsonl", rows_of(150))
        moment = rng.randrange(1, num_calls) if number else -1
        args = [source, "-o", folder / "out.jsonl"], moment, folder / "note", FakeLLM
        with fork_server():
            process = FORKED.Process(target=interrupted, args=args)
            process.start()
        codes[check_interrupted(process, FakeLLM, source)] += 1
        num_calls = num_calls or int((folder / "note").read_text().split()[-1])
    assert codes[130] >= 20 and codes[0] >= 1, codes


@pytest.mark.full
def test_ctrl_c_at_any_time(tmp_path: Path) -> None:
    """300 jobs with an engine, each interrupted at a random time between its start and its end."""
    rng, codes, seconds = random.Random(0), Counter[int](), 0.0
    options = {"device": "cpu", "max_num_seqs": 8, "num_kvcache_blocks": 200}
    flags = ["--device", "cpu", "--max-num-seqs", 8, "--num-kvcache-blocks", 200]
    flags += ["--sampling", "max_tokens=12"]
    with LLM(jobs.demo_model_path(), **options) as llm:
        for number in range(301):
            folder = tmp_path / str(number)
            folder.mkdir()
            source = write_rows(folder / "in.jsonl", rows_of(60))
            argv = [source, "-o", folder / "out.jsonl", *flags]
            with fork_server():
                process = FORKED.Process(target=interrupted, args=(argv, None, folder / "note", LLM))
                process.start()
            wait_for(lambda path=folder / "note": path.exists() and "calls" in path.read_text())
            began = time.monotonic()
            if number:
                time.sleep(rng.uniform(0, seconds))
                with suppress(ProcessLookupError):
                    os.kill(process.pid or 0, INT)
            else:
                process.join()
                seconds = time.monotonic() - began
            codes[check_interrupted(process, Lent(llm), source, *flags)] += 1
    assert codes[130] >= 200 and codes[0] >= 1, codes


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
