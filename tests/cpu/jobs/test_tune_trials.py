"""A trial of `nanovllm tune`, in a process of its own: what it measures, and why it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from inside_kinds import stop_fork_server
from jobs import write_rows

from nanovllm import demo_model_path
from nanovllm.errors import EngineClosedError
from nanovllm.jobs.main import parse_args
from nanovllm.jobs.run import run
from nanovllm.parallel import channel, ranks
from nanovllm.parallel.rendezvous import SHARED_MEMORY
from nanovllm.tune import trial
from nanovllm.tune.halving import Failed, Measured
from nanovllm.tune.process import Timed, run_trial
from nanovllm.tune.sample import job_arguments, write_sample
from nanovllm.tune.settings import Setting
from nanovllm.tune.trial import Trials

HANG_SECONDS = 500.0


@pytest.fixture(autouse=True, scope="module")
def own_fork_server() -> Iterator[None]:
    """As that of the command: trials start with SIGINT blocked, and processes of other tests do not."""
    stop_fork_server()
    yield
    stop_fork_server()


def trials_of(tmp_path: Path, rows: list[object], *more: object, warm_up: bool = False) -> Trials:
    source = write_rows(tmp_path / "rows.jsonl", rows)
    flags = ["--sampling", "temperature=0,max_tokens=4", *map(str, more)]
    args = parse_args(["tune", demo_model_path(), str(source), *flags])
    write_sample(args, tmp_path / "sample.jsonl")
    return Trials(job_arguments(args, tmp_path / "sample.jsonl", tmp_path / "out.jsonl"), warm_up)


def test_a_trial_counts_rows_and_tokens(tmp_path: Path) -> None:
    """Of the first rows of the sample; another setting needs too much memory, as its reason says."""
    trials = trials_of(tmp_path, [{"prompt": f"What is {number} + 3?"} for number in range(20)])
    found = trials.measure((("max_num_seqs", 4),), 5, HANG_SECONDS)
    assert isinstance(found, Measured)
    assert found.rows == 5 and found.written <= 20 and found.read >= 5 * 8
    assert found.seconds > 0 and found.loading > 0
    refused = trials.measure((("num_kvcache_blocks", 10**9),), 5, HANG_SECONDS)
    assert isinstance(refused, Failed) and "no room for the KV cache" in refused.reason


@pytest.mark.parametrize("options", [(), (("data_parallel_size", 2),)], ids=["one", "replicas"])
def test_a_trial_that_warms_up_counts_its_later_passes(tmp_path: Path, options: Setting) -> None:
    """Which find nothing of the first one in the cache of prefixes."""
    rows = [{"prompt": f"What is {number} + 3?"} for number in range(20)]
    cold, warm = (
        trials_of(tmp_path, rows, warm_up=each).measure(options, 20, HANG_SECONDS) for each in (False, True)
    )
    assert isinstance(cold, Measured) and isinstance(warm, Measured)
    assert cold.others == 0.0 and warm.running > warm.seconds
    assert (warm.rows, warm.read, warm.written) == (cold.rows, cold.read, cold.written)


def test_a_trial_that_would_warm_up_needs_too_much_memory(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, [{"prompt": "What is 2 + 3?"}], warm_up=True)
    refused = trials.measure((("num_kvcache_blocks", 10**9),), 1, HANG_SECONDS)
    assert isinstance(refused, Failed) and "no room for the KV cache" in refused.reason


def test_the_engine_of_a_trial_computes_a_pass_again(tmp_path: Path) -> None:
    rows = [{"prompt": f"The same beginning of a text, and an end: {number}"} for number in range(8)]
    source, timed = write_rows(tmp_path / "rows.jsonl", rows), Timed()
    computed, seconds = [], []
    for make_llm in (timed.engine(), timed.again):
        words = ["run", str(source), "-o", str(tmp_path / f"{len(computed)}.jsonl"), "--model"]
        assert run(parse_args([*words, demo_model_path()]), make_llm) == 0
        assert timed.llm is not None
        computed.append(timed.llm.stats().num_computed_tokens)
        seconds.append(timed.ended - timed.began)
    assert computed[1] == 2 * computed[0] and min(seconds) > 0
    llm = timed.llm
    timed.close()
    with pytest.raises(EngineClosedError):
        llm.generate("a")


def test_a_trial_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, [{"prompt": "a"}])
    found = trials.measure((), 1, 0.01)
    assert isinstance(found, Failed) and found.is_late and found.reason == "not done after 0 s"


# -- processes in place of trials ---------------------------------------------------------------------------


class Nobody:
    def send(self, reply: object) -> None:
        pass


def send_threads(job: dict[str, Any], warm_up: bool, said: str, sender: Connection) -> None:
    run_trial(job, warm_up, said, Nobody())  # type: ignore[arg-type]
    sender.send({"error": str(torch.get_num_threads())})


def without_output(job: dict[str, Any], warm_up: bool, said: str, sender: Connection) -> None:
    run_trial({}, warm_up, said, sender)


def kill_itself(job: dict[str, Any], warm_up: bool, said: str, sender: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt_itself(job: dict[str, Any], warm_up: bool, said: str, sender: Connection) -> None:
    """As Ctrl-C in a terminal does before the trial has left the session of its command."""
    os.kill(os.getpid(), signal.SIGINT)
    run_trial(job, warm_up, said, sender)


def reply_and_stay(job: dict[str, Any], warm_up: bool, said: str, sender: Connection) -> None:
    os.setsid()
    Path(job["output"]).write_text(str(os.getpid()))
    sender.send({"rows": 1, "seconds": 0.5, "read": 2, "written": 3, "others": 0.25})
    time.sleep(2 * HANG_SECONDS)


def start_another(job: dict[str, Any], warm_up: bool, said: str, sender: Connection) -> NoReturn:
    os.setsid()
    other = subprocess.Popen(["sleep", "1000"])
    Path(job["output"]).write_text(str(other.pid))
    while True:
        time.sleep(1)


class NotedMemory(SharedMemory):
    """Knows the path of the one made last."""

    path: Path

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        NotedMemory.path = Path(SHARED_MEMORY, self.name)


def note_memory(job: dict[str, Any], warm_up: bool, said: str, sender: Connection) -> None:
    """Write the path of the shared memory, and the pattern of this process's folders, into the file `note`
    once the worker has what it needs."""

    def start_process(process: BaseProcess) -> None:
        start(process)
        own = (NotedMemory.path, Path(SHARED_MEMORY, f"nanovllm-{os.getpid()}-*"))
        Path(job["output"]).with_name("note").write_text("".join(f"{each}\n" for each in own))

    start, ranks.start_process = ranks.start_process, start_process  # type: ignore[attr-defined]
    channel.SharedMemory = NotedMemory  # type: ignore[misc]
    run_trial(job, warm_up, said, sender)


def note_memory_and_stay(job: dict[str, Any], warm_up: bool, said: str, sender: Connection) -> None:
    """Is deaf to what asks it to end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    note_memory(job, warm_up, said, sender)


def test_a_trial_has_the_threads_of_a_fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though other forks of a process with the CPU's kernels have one."""
    trials = trials_of(tmp_path, [{"prompt": "a"}])
    monkeypatch.setattr(trial, "run_trial", send_threads)
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    fresh = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    found = trials.measure((), 1, HANG_SECONDS)
    assert isinstance(found, Failed) and found.reason == fresh


def test_the_process_that_trials_are_forked_from_uses_no_gpu() -> None:
    """A fork of a process that has used CUDA cannot use it."""
    code = """
import torch
def used(*given): raise AssertionError("CUDA is used")
for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, used)
for name in [name for name in dir(torch._C) if name.startswith("_cuda_")]:
    setattr(torch._C, name, used)
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print("done")
"""
    command = [sys.executable, "-c", code, *trial.PRELOADED]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout == "done\n", found.stderr


def test_why_a_trial_ended_without_a_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = trials_of(tmp_path, [{"prompt": "a"}])
    monkeypatch.setattr(trial, "run_trial", without_output)
    assert trials.measure((), 1, HANG_SECONDS) == Failed("KeyError: 'output'")
    monkeypatch.setattr(trial, "run_trial", kill_itself)
    killed = trials.measure((), 1, HANG_SECONDS)
    assert isinstance(killed, Failed) and "memory of this machine was full" in killed.reason
    monkeypatch.setattr(trial, "run_trial", interrupt_itself)
    assert trials.measure((), 1, HANG_SECONDS) == Failed("KeyboardInterrupt")  # which no terminal shows


def test_a_trial_that_hangs_after_its_reply_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = trials_of(tmp_path, [{"prompt": "a"}])
    monkeypatch.setattr(trial, "run_trial", reply_and_stay)
    monkeypatch.setattr(trial, "LEAVE_SECONDS", 1.0)
    found = trials.measure((), 1, HANG_SECONDS)
    assert isinstance(found, Measured) and (found.rows, found.read, found.written) == (1, 2, 3)
    assert not Path(f"/proc/{(tmp_path / 'out.jsonl').read_text()}").exists()


def test_what_a_late_trial_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = trials_of(tmp_path, [{"prompt": "a"}])
    monkeypatch.setattr(trial, "run_trial", start_another)
    monkeypatch.setattr(trial, "WORKER_SECONDS", 0.5)
    started = tmp_path / "out.jsonl"
    for seconds in (1.0, 4.0, 16.0, 64.0, HANG_SECONDS):  # until the process was fast enough to start another
        found = trials.measure((), 1, seconds)
        assert isinstance(found, Failed) and found.is_late
        if started.exists() and started.read_text():
            break
    pid = int(started.read_text())
    deadline = time.monotonic() + HANG_SECONDS
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, "it runs on"
        time.sleep(0.05)


@pytest.mark.parametrize("run", [note_memory, note_memory_and_stay])
def test_a_late_trial_of_two_ranks_leaves_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    """One that answers frees what it has; of one that does not its worker removes the folder where they met,
    and Python the memory when this process ends."""
    more = ("--device", "cpu", "--tensor-parallel-size", 2, "--sampling", "max_tokens=9999,ignore_eos=true")
    trials = trials_of(tmp_path, [{"prompt": "a"}], *more)
    monkeypatch.setattr(trial, "run_trial", run)
    monkeypatch.setattr(trial, "CLOSE_SECONDS", 1.0 if run is note_memory_and_stay else HANG_SECONDS)
    monkeypatch.setattr(trial, "WORKER_SECONDS", HANG_SECONDS)
    note = tmp_path / "note"
    seconds = 2.0
    while not note.exists():  # until the process was fast enough
        found = trials.measure((), 1, seconds)
        assert isinstance(found, Failed) and found.is_late
        seconds *= 2
    memory, folders = map(Path, note.read_text().splitlines())
    assert not list(folders.parent.glob(folders.name))
    assert memory.exists() == (run is note_memory_and_stay)


BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)"


@pytest.mark.parametrize("kind", ["forkserver", "spawn"])
def test_ctrl_c_does_not_reach_the_first_process(kind: str) -> None:
    """Python's process for shared resources, which starts before the first one, unblocks SIGINT."""
    code = f"""
from multiprocessing import get_context
from nanovllm.parallel.worker import start_process
process = get_context({kind!r}).Process(target=exec, args=({BLOCKED!r},))
start_process(process)
process.join()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "True\n", found.stderr


def test_a_trial_where_no_socket_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a temporary folder with a long path: a fresh process runs it."""

    def refuse(fds: list[int]) -> NoReturn:
        raise OSError("AF_UNIX path too long")

    trials = trials_of(tmp_path, [{"prompt": "a"}])
    monkeypatch.setattr(forkserver, "connect_to_new_process", refuse)
    found = trials.measure((), 1, HANG_SECONDS)
    assert isinstance(found, Measured) and found.rows == 1


def test_a_trial_that_is_forked_after_its_command_ended(tmp_path: Path) -> None:
    """It runs no job, and says nothing."""
    code = "import sys; from nanovllm.tune.process import run_trial; run_trial({}, False, sys.argv[1], None)"
    command = [sys.executable, "-c", code, str(tmp_path / "gone")]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_ctrl_c_in_a_terminal_while_the_first_trial_starts(tmp_path: Path) -> None:
    """It reaches every process. None of them says why it ends, and no file of theirs is left."""
    source, folder = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}] * 40), tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "nanovllm", "tune", demo_model_path(), str(source), "--device", "cpu"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        assert process.stderr is not None
        said = [process.stderr.readline()]
        while "with the job's own" not in said[-1]:
            assert said[-1]
            said.append(process.stderr.readline())
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=HANG_SECONDS)
    assert err == "nanovllm tune: stopped by Ctrl-C before the first trial ended, so nothing is known\n"
    assert process.returncode == 130 and not list(folder.iterdir())
