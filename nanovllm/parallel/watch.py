"""Watch over worker processes: a thread that receives their answers, finds the reason if one ends, and limits
every wait for them.

When one fails or stalls, it kills all and releases whatever waits for them. Starts no process, imports no
torch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

from nanovllm.errors import WorkerError

POLL_SECONDS = 0.05  # how often rank 0 checks for failures while it waits for workers
KILLED_SECONDS = 10.0  # time for killed workers to end
LOOK_SECONDS = 1.0  # how often the thread compares the time without progress with its limit
CAUSE_SECONDS = 0.3  # after the first sign of a failure, wait this long for an earlier or clearer cause


@dataclass(frozen=True)
class Failure:
    """Why a worker ended. The cause is a signal if there is one, else the first error: later ones follow."""

    rank: int
    what: str
    by_signal: bool
    time: float  # seconds of the host's monotonic clock, which all processes share


class Progress:
    """A message of a worker or a replica: another tensor is loaded, or a call of all ranks has ended."""


class Watch:
    """The worker processes, their answers, and the cause of the first failure.

    Rank 0 waits for workers only within `waiting`. There, all ranks together may make no progress for `limit`
    seconds. An answer, a `Progress` and a call of `progress` are progress.
    """

    def __init__(
        self, num_workers: int, limit: float = inf, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """on_progress: called by any thread when a rank makes progress."""
        self.limit = limit
        self._on_progress = on_progress
        self._phase: str | None = None  # of the wait that goes on
        self._silent = 0.0  # seconds of it since the last progress
        self._last = [0.0] * num_workers  # when each worker last made progress
        self.processes: list[BaseProcess] = []
        self.failure: Failure | None = None
        self.ended = threading.Event()  # a worker failed, or rank 0 killed the workers
        self.stopping = False  # workers were asked to exit, so an exit is no failure
        self._release: Callable[[], None] = lambda: None
        self._pipes: list[Connection] = []
        self._replies: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(num_workers)]
        self._thread: threading.Thread | None = None
        self._kill_lock = threading.Lock()

    def add(self, process: BaseProcess, pipe: Connection) -> None:
        """Add a process that is about to start, and the pipe of its answers."""
        self.processes.append(process)
        self._pipes.append(pipe)

    def start(self) -> None:
        """Start the thread, which watches until all workers have ended."""
        self._thread = threading.Thread(target=self._run, name="nanovllm workers", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise WorkerError if the workers are gone."""
        if self.ended.is_set():
            raise self.error()

    def progress(self) -> None:
        """Rank 0 itself makes progress. Raises as `check`."""
        self._has_progressed()
        self.check()

    def _has_progressed(self) -> None:
        self._silent = 0.0
        self._on_progress()

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Limit the waits for workers in the block. phase: what they do meanwhile, for the error."""
        self._silent = 0.0
        self._phase = phase
        try:
            yield
        finally:
            self._phase = None

    def error(self) -> WorkerError:
        if self.failure is None:
            return WorkerError("the workers were ended by an earlier error; make a new LLM")
        return WorkerError(f"rank {self.failure.rank} {self.failure.what}")

    def wait_for_reply(self, index: int) -> Any:
        """Return the next answer of the worker at `index`. Raises WorkerError if none will come."""
        while True:
            try:
                return self._replies[index].get(timeout=POLL_SECONDS)
            except Empty:
                self.check()

    def on_failure(self, release: Callable[[], None]) -> None:
        """Call `release` when the workers are killed; at once if they already are."""
        with self._kill_lock:
            if not self.ended.is_set():
                self._release = release
                return
        release()

    def kill(self) -> None:
        """Kill all workers, and release whatever waits for them in rank 0."""
        with self._kill_lock:  # this thread and rank 0's may come at the same time: release once
            self.stopping = True
            for process in self.processes:
                if process.pid is not None:
                    process.kill()
            self.ended.set()
            release, self._release = self._release, lambda: None
            release()

    def join(self, seconds: float) -> None:
        """Wait for all workers to end; kill those that have not ended after `seconds`.

        A killed process that hangs in the kernel, such as in a device's driver, ends later.
        """
        if self._thread is None:  # not all of them were started
            for process in self.processes:
                if process.pid is not None:
                    process.join(KILLED_SECONDS)
        elif self._thread is not threading.current_thread():
            self._thread.join(seconds)
            if self._thread.is_alive():
                for process in self.processes:
                    process.kill()
                self._thread.join(KILLED_SECONDS)
        for pipe in self._pipes:
            pipe.close()

    def _run(self) -> None:
        failures: list[Failure] = []
        deadline: float | None = None
        pending: dict[Any, int] = {pipe: index for index, pipe in enumerate(self._pipes)}
        pending |= {process.sentinel: index for index, process in enumerate(self.processes)}
        while pending and (deadline is None or monotonic() < deadline):
            timeout = LOOK_SECONDS if deadline is None else max(0.0, deadline - monotonic())
            began = monotonic()
            found = connection.wait(list(pending), timeout)
            if not found and not failures and (stalled := self._stalled(monotonic() - began)) is not None:
                failures.append(stalled)
                break
            for ready in found:
                index = pending[ready]
                if isinstance(ready, Connection):
                    failure = self._receive(ready, index)
                    if failure is None and ready.closed:
                        del pending[ready]
                else:
                    del pending[ready]
                    failure = self._ended(index)
                if failure is not None:
                    failures.append(failure)
            if failures and deadline is None and not self.stopping:
                deadline = monotonic() + CAUSE_SECONDS
        if failures and not self.stopping:
            self.failure = min(failures, key=lambda failure: (not failure.by_signal, failure.time))
            self.kill()
        for process in self.processes:  # wait until all are gone, even if the cause is known
            process.join()

    def _receive(self, pipe: Connection, index: int) -> Failure | None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):  # the process ends; its sentinel tells how
            pipe.close()
            return None
        if isinstance(message, Failure):
            return message
        self._last[index] = monotonic()
        self._has_progressed()
        if not isinstance(message, Progress):
            self._replies[index].put(message)
        return None

    def _stalled(self, seconds: float) -> Failure | None:
        """Count seconds without a message; return a failure if they exceed the limit."""
        phase = self._phase
        if phase is None:
            return None
        self._silent += min(
            seconds, LOOK_SECONDS
        )  # the host may have been suspended, or this process stopped
        if self._silent <= self.limit:
            return None
        ranks = range(len(self.processes))
        index = min(ranks, key=lambda each: (not is_stopped(self.processes[each]), self._last[each]))
        return Failure(index + 1, stalled_for(self.processes[index], self.limit, phase), False, monotonic())

    def _ended(self, index: int) -> Failure:
        process = self.processes[index]
        process.join()
        while (code := process.exitcode) is None:  # another thread reaped it and has not stored the code yet
            sleep(0.001)
        return Failure(index + 1, how_it_ended(code), code < 0, monotonic())


def is_stopped(process: BaseProcess) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:  # it has ended, or there is no /proc
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


def stalled_for(process: BaseProcess, seconds: float, phase: str) -> str:
    """The words for a process that made no progress."""
    why = "it is stopped, by SIGSTOP or a debugger"
    if not is_stopped(process):
        why = "if it is only slow, raise distributed_timeout_seconds"
    return f"made no progress for {seconds:g} s during {phase} and was killed ({why})"


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended by itself with exit code {code}"
    name = signal.Signals(-code).name
    hint = ", perhaps because the host ran out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
