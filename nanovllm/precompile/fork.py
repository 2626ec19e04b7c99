"""Fork: a fork of this process that runs other code. A fresh interpreter would import torch, for seconds.

It uses nothing of its parent but the imported modules. Does not know what it runs.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from typing import NoReturn

import torch

from nanovllm.kernels.compat import uses_cuda


def can_fork() -> bool:
    """Whether a fork of this process may run code: no other thread holds a lock, and nothing of a GPU or of a
    group of processes would be shared."""
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    alone = threading.enumerate() == [threading.current_thread()]
    return sys.platform == "linux" and alone and not (uses_cuda() or group)


class Fork:
    """As `subprocess.Popen([sys.executable, "-c", code, own pid])` with pipes, in a session of its own."""

    def __init__(self, code: str, quiet: bool) -> None:
        """quiet: standard error goes nowhere."""
        stdin, to_child = os.pipe()
        from_child, stdout = os.pipe()
        self.returncode: int | None = None
        # Ctrl-C in a fork that still has the parent's handlers would go on with the parent's code.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's, about threads of libraries
                parent, self.pid = os.getpid(), os.fork()
                if not self.pid:
                    _run(code, parent, stdin, stdout, quiet)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(to_child, "wb"), os.fdopen(from_child, "rb", 0)

    def wait(self) -> None:
        """Wait for its end."""
        self.returncode = 0
        with suppress(ChildProcessError):  # this process ignores the ends of its children
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run(code: str, parent: int, stdin: int, stdout: int, quiet: bool) -> NoReturn:
    try:
        kept = sys.stdin, sys.stdout, sys.stderr  # the end of one would write what it holds
        _leave(stdin, stdout, quiet)
        sys.argv = ["-c", str(parent)]
        exec(code, {"__name__": "__main__", "kept": kept})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)  # the code's result is what it writes; nothing that the parent has registered runs


def _leave(stdin: int, stdout: int, quiet: bool) -> None:
    """In a fork, give up what it shares with its parent."""
    os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.freeze()  # an object of the parent may remove files at its end
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    if quiet:
        os.dup2(nothing, 2)
    # Not closed: a new file would take the number of one that an object of the parent still writes to.
    for each in map(int, os.listdir("/proc/self/fd")):
        if each > 2 and each != nothing:
            os.dup2(nothing, each, inheritable=False)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)  # threads of the parent's pool are not here
