"""A fork that compiles kernels: when it may be, and that it shares nothing with its parent."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from nanovllm.precompile.fork import can_fork

IN_A_FORK = """
import json, os, signal, sys, torch
paths = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd") if int(each) > 2]
told = {
    "files": sorted({os.readlink(each) for each in paths if os.path.exists(each)}),
    "handlers": [signal.getsignal(each).name for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "devices": os.environ["CUDA_VISIBLE_DEVICES"],
    "threads": torch.get_num_threads(),
    "CUDA": torch.cuda.is_initialized(),
    "session": os.getsid(0) == os.getpid() != int(sys.argv[1]) == os.getppid(),
}
log.write("from the fork"); log.flush()
print(json.dumps(told), flush=True)
raise END
"""
PARENT = """
import atexit, builtins, os, signal, sys, torch
from nanovllm.precompile.fork import Fork, can_fork
builtins.log = open(sys.argv[1], "w")
atexit.register(lambda: os.write(1, b"exit "))
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
torch.ones(2**22).sum()  # starts threads
log.write("held back "); sys.stdout.write("held back ")
assert can_fork()
for end in "SystemExit", "ValueError", "KeyboardInterrupt":
    fork = Fork(sys.argv[2].replace("END", end), True)
    print(fork.stdout.read().decode(), end="")
    fork.wait()
    assert fork.returncode is not None and not os.path.exists(f"/proc/{fork.pid}")
"""


def test_a_fork_shares_nothing_with_its_parent(tmp_path: Path) -> None:
    """What the parent has registered or not yet written happens once, in the parent."""
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log"), IN_A_FORK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    told = {
        "files": ["/dev/null"],
        "handlers": ["SIG_DFL"] * 3,
        "blocked": 0,
        "devices": "",
        "threads": 1,
        "CUDA": False,
        "session": True,
    }
    assert done.stdout == "held back " + 3 * (json.dumps(told) + "\n") + "exit "
    assert (tmp_path / "log").read_text() == "held back "


def test_what_refuses_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])  # as in a script
    assert can_fork()
    for owner, name in ((torch.cuda, "is_initialized"), (torch.distributed, "is_initialized")):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, lambda: True)
            assert not can_fork()
    monkeypatch.undo()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(can_fork()))
    thread.start()
    thread.join()
    assert answers == [False]
