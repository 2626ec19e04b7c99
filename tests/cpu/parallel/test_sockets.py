"""What other users of the host can reach of an engine with two ranks: nothing. No socket listens beyond
loopback, and nobody else may open its memory and files.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import inside
import pytest
import torch
from checked_llm import CheckedLLM, make_tiny
from leftovers import SHARED_MEMORY, listening_addresses, listening_ports, wait_until_nothing_is_left

from nanovllm import SamplingParams, WorkerError
from nanovllm.device import Device
from nanovllm.parallel import rendezvous
from nanovllm.parallel.group import TPGroup
from nanovllm.parallel.peer_memory import PendingSum

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LOOPBACK = ("127.", "::1")


def ours() -> list[int]:
    """This process and its children."""
    lists = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [os.getpid(), *(int(child) for each in lists for child in each)]


@contextmanager
def watched_sockets() -> Iterator[set[str]]:
    """The addresses that this process and its children listen on at any time during the block, and the paths
    in shared memory that others may read."""
    seen: set[str] = set()
    before, ended = set(SHARED_MEMORY.iterdir()), threading.Event()

    def look() -> None:
        while not ended.is_set():
            seen.update(address for pid in ours() for address in listening_addresses(pid))
            for path in set(SHARED_MEMORY.iterdir()) - before:
                try:
                    mode = path.stat().st_mode
                except FileNotFoundError:
                    continue
                if path.name.startswith(("nanovllm-", "psm_")) and mode & 0o077:
                    seen.add(f"{path} {mode:o}")
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def live(llm: CheckedLLM) -> None:
    """All phases of an engine but its start and end."""
    [output] = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    llm.update_weights({"model.norm.weight": inside.model(llm).model.norm.weight.clone()})
    llm.sleep()
    llm.wake_up()
    [again] = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert again["token_ids"] == output["token_ids"]


def test_no_socket_listens_beyond_loopback_through_a_whole_life(model: Path) -> None:
    with watched_sockets() as seen:
        with make_tiny(model, tensor_parallel_size=2) as one, make_tiny(model, tensor_parallel_size=2) as two:
            meetings = list(SHARED_MEMORY.glob(f"nanovllm-{os.getpid()}-*"))
            assert meetings == [], "a meeting point is gone as soon as all ranks are there"
            live(one)
            live(two)
        assert wait_until_nothing_is_left() == []
    assert seen, "gloo listens on loopback"
    assert [each for each in seen if not each.startswith(LOOPBACK)] == []


def test_a_failed_engine_is_freed_at_once(model: Path) -> None:
    """Its port while the error is kept; all of it without the garbage collector, once both are dropped."""
    before, llm = listening_ports(), make_tiny(model, tensor_parallel_size=2)
    gc.collect()
    gc.disable()
    try:
        os.kill(inside.workers(llm).watch.processes[0].pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerError) as kept:  # noqa: PT012
            while True:
                llm.generate([[5, 6]], GREEDY, use_tqdm=False)
        llm.close()
        assert listening_ports() == before
        freed = weakref.ref(llm)
        del llm, kept
        assert freed() is None
    finally:
        gc.enable()


KILLED = """
import os, signal
from nanovllm.parallel.worker import Member
def killed(self, device, rendezvous):
    print(rendezvous.folder, os.stat(rendezvous.folder).st_mode & 0o777, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
Member.join_group = killed  # of rank 0 alone
import nanovllm
nanovllm.LLM({model!r}, tensor_parallel_size=2, device="cpu", skip_tokenizer_init=True, max_model_len=64)
"""


def test_a_caller_that_is_killed_while_its_ranks_meet_leaves_no_folder(model: Path) -> None:
    code = KILLED.format(model=str(model))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == -signal.SIGKILL, result
    folder, mode = result.stdout.split()
    assert int(mode) == 0o700
    deadline = time.monotonic() + 60
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists(), "the worker removes it"


def test_a_forked_process_leaves_the_meeting_point() -> None:
    meeting = rendezvous.Rendezvous()
    pid = os.fork()
    if pid == 0:
        meeting.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0 and Path(meeting.folder).exists()
    meeting.close()
    assert not Path(meeting.folder).exists()


Operation = Callable[[TPGroup], object]


def start_sum(group: TPGroup) -> PendingSum:
    return group.start_sum(torch.zeros(4, 8), torch.zeros(4, 8), torch.ones(8), 1e-6, True)


OPERATIONS: dict[str, Operation] = {
    "all_reduce": lambda group: group.all_reduce(torch.zeros(2)),
    "start_sum": lambda group: start_sum(group).finish(),
    "a_sum_in_progress": lambda group: (start_sum(group), group.all_reduce(torch.zeros(2))),
    "whole_rows": lambda group: group.whole_rows(torch.zeros(2, 4), 8),
    "join_rows": lambda group: group.join_rows(
        torch.zeros(2, dtype=torch.int64), slice(0, 2), torch.zeros(2, 8)
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_error_that_is_kept_keeps_no_port(operation: Operation) -> None:
    """The frames of its traceback stay, and with them whatever they refer to."""
    before, meeting = listening_ports(), rendezvous.Rendezvous()
    joined = rendezvous.Rendezvous(meeting.folder)
    with ThreadPoolExecutor(1) as other:
        connected = other.submit(TPGroup.connect, 1, 2, Device("cpu"), joined)
        group = TPGroup.connect(0, 2, Device("cpu"), meeting)
        connected.result().close()
        del connected
    assert listening_ports() > before
    with pytest.raises(RuntimeError) as kept:
        operation(group)
    group.close()
    assert listening_ports() == before, kept


def test_an_error_while_ranks_connect_keeps_no_port() -> None:
    before, meeting = listening_ports(), rendezvous.Rendezvous()
    meeting.leave()
    with pytest.raises(RuntimeError, match="given up") as kept:
        TPGroup.connect(0, 2, Device("cpu"), meeting)
    meeting.close()
    assert listening_ports() == before, kept


def test_settings_of_nccl_are_those_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL itself needs GPUs; it reads these when ranks connect."""
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with rendezvous.nccl_settings():
        assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["NCCL_RAS_ENABLE"]) == ("lo", "0")
    assert dict(os.environ) == before
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    with rendezvous.nccl_settings():
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setattr(rendezvous.dist, "is_initialized", lambda: True)
    with rendezvous.nccl_settings():
        assert "NCCL_SOCKET_IFNAME" not in os.environ, "this process is part of a job with its own interface"
