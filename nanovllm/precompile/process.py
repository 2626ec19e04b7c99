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
from collections import deque
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
    for module in triton.runtime.cache, triton.compiler.compiler:
        getattr(module, "triton_key", int)()  # a hash of Triton's files, once and not in each fork
    with suppress(EOFError):
        compile_all(pickle.load(sys.stdin.buffer))


def compile_all(wanted: Wanted) -> None:
    """Compile all kernels of a start, then those of the first prompts, and note it on the disk."""
    wanted.done.parent.mkdir(parents=True, exist_ok=True)
    with _alone(wanted.done):
        if wanted.done.exists():  # another process has compiled them meanwhile
            return
        forks = Forks(wanted.processes)
        parts = [forks.found for _ in steps(wanted, imitate(wanted.gpu, forks.compile))]
        for found in parts:
            forks.wait(found)
            os.write(sys.stdout.fileno(), b".")
        if not forks.failed:
            wanted.done.touch()


class Forks:
    """Processes that compile one kernel each."""

    def __init__(self, most: int) -> None:
        """most: how many run at once."""
        self._most, self._running = most, dict[int, int]()  # what number each compiles
        self._waiting = deque[tuple[Any, Any, Any]]()
        self._compile: Any = triton.compiler.compiler.compile
        self.found = self.failed = 0

    def compile(self, source: Any, target: Any, options: Any) -> None:
        """Compile in a fork, now or once one may run."""
        self._waiting.append((source, target, options))
        self.found += 1
        if len(self._running) >= self._most:
            self._end_one(os.WNOHANG)
        self._start()

    def wait(self, first: int) -> None:
        """Wait until so many kernels, those found first, are compiled."""
        while min(self._running.values(), default=first) < first:
            self._end_one()
            self._start()

    def _start(self) -> None:
        """Let as many run as may; they start in the order in which they were found."""
        while self._waiting and len(self._running) < self._most:
            number, kernel, parent = self.found - len(self._waiting), self._waiting.popleft(), os.getpid()
            if child := os.fork():
                self._running[child] = number
                continue
            status = 1
            try:
                _end_with(parent)
                source, target, options = kernel
                _compile_launcher(source, self._compile(source, target=target, options=options))
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)

    def _end_one(self, flags: int = 0) -> None:
        child, status = os.waitpid(-1, flags)
        if self._running.pop(child, None) is not None:
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
