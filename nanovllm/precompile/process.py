"""The process that compiles: it finds the kernels by steps on an imitated GPU, and each compiles in a fork.

Kernels go to Triton's cache, where a launch looks for them. It has no CUDA context, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanovllm.kernels.compat import triton
from nanovllm.precompile.ahead import Wanted
from nanovllm.precompile.imitation import imitate, steps

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Compile what standard input names; write a byte to standard output after each part."""
    _end_with(int(sys.argv[1]))
    with suppress(EOFError):
        compile_all(pickle.load(sys.stdin.buffer))


def compile_all(wanted: Wanted) -> None:
    """Compile all kernels of a start, then those of the first prompts, and note it on the disk."""
    wanted.done.parent.mkdir(parents=True, exist_ok=True)
    with _alone(wanted.done):
        if wanted.done.exists():  # another process has compiled them meanwhile
            return
        forks = Forks(wanted.processes)
        for _ in steps(wanted, imitate(wanted.gpu, forks.compile)):
            forks.wait()
            os.write(sys.stdout.fileno(), b".")
        if not forks.failed:
            wanted.done.touch()


class Forks:
    """Processes that compile one kernel each."""

    def __init__(self, most: int) -> None:
        """most: how many run at once."""
        self._most, self._running = most, set[int]()
        self._compile: Any = triton.compiler.compiler.compile
        self.failed = 0

    def compile(self, source: Any, target: Any, options: Any) -> None:
        """Compile in a fork, once one may run."""
        if len(self._running) >= self._most:
            self._end_one()
        parent = os.getpid()
        if child := os.fork():
            self._running.add(child)
            return
        status = 1
        try:
            _end_with(parent)
            kernel = self._compile(source, target=target, options=options)
            _compile_launcher(source, kernel)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)

    def wait(self) -> None:
        """Wait until all are compiled."""
        while self._running:
            self._end_one()

    def _end_one(self) -> None:
        child, status = os.wait()
        self._running.discard(child)
        self.failed += status != 0


def _compile_launcher(source: Any, kernel: Any) -> None:
    """Also compile the C code that launches a kernel, where this version of Triton makes some for each."""
    driver = sys.modules[triton.backends.backends["nvidia"].driver.__module__]
    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(source, kernel.metadata)


def _end_with(parent: int) -> None:
    """Let the end of `parent`, which has started this process, be its end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


@contextmanager
def _alone(done: Path) -> Iterator[None]:
    """Only one process compiles for an engine of this kind at a time."""
    with open(done.with_suffix(".lock"), "w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
