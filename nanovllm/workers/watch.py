"""Watch over worker processes: a thread that takes in their answers and finds out why one ended.

Kills all when one has failed, and lets go of what waits for them. Starts no process, imports no torch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

from nanovllm.errors import WorkerError

POLL_SECONDS = 0.05  # how often rank 0 looks, while it waits for workers, whether one has failed
CAUSE_SECONDS = 0.3  # after the first sign of a failure: until then, an earlier or clearer one counts


@dataclass(frozen=True)
class Failure:
    """Why a worker ended. A signal comes before errors, and of these the first: the others follow from it."""

    rank: int
    what: str
    by_signal: bool
    time: float  # seconds of the host's monotonic clock, the same for all processes


class Watch:
    """The worker processes, what they have answered, and the first reason that one of them ended."""

    def __init__(self, num_workers: int) -> None:
        self.processes: list[BaseProcess] = []
        self.failure: Failure | None = None
        self.ended = threading.Event()  # a worker failed, or rank 0 gave them up
        self.stopping = False  # they are to exit: that is no failure
        self._release: Callable[[], None] = lambda: None  # nothing waits yet
        self._pipes: list[Connection] = []
        self._replies: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(num_workers)]
        self._thread: threading.Thread | None = None
        self._giving_up = threading.Lock()

    def add(self, process: BaseProcess, pipe: Connection) -> None:
        """Take a process that is about to be started, and the pipe of its answers."""
        self.processes.append(process)
        self._pipes.append(pipe)

    def start(self) -> None:
        """Watch, in a thread of its own, until all workers have ended."""
        self._thread = threading.Thread(target=self._run, name="nanovllm workers", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise WorkerError if the workers are gone."""
        if self.ended.is_set():
            raise self.error()

    def error(self) -> WorkerError:
        if self.failure is None:
            return WorkerError("the workers were ended by an earlier error; make a new LLM")
        return WorkerError(f"rank {self.failure.rank} {self.failure.what}")

    def wait_for_reply(self, index: int) -> Any:
        """Return the next answer of the worker at `index`. Raises WorkerError when none will come."""
        while True:
            try:
                return self._replies[index].get(timeout=POLL_SECONDS)
            except Empty:
                self.check()

    def on_failure(self, release: Callable[[], None]) -> None:
        """Have `release` called once the workers are given up, at once if they have been."""
        with self._giving_up:
            if not self.ended.is_set():
                self._release = release
                return
        release()

    def give_up(self) -> None:
        """Kill all workers, and let go of what waits for them in rank 0."""
        with self._giving_up:  # the thread here and rank 0's own may come at once: let go a single time
            self.stopping = True
            for process in self.processes:
                if process.pid is not None:
                    process.kill()
            self.ended.set()
            release, self._release = self._release, lambda: None
            release()

    def join(self, seconds: float) -> None:
        """Wait for all workers to end, and kill those that have not in time."""
        if self._thread is None:  # not all of them were started
            for process in self.processes:
                if process.pid is not None:
                    process.join()
        elif self._thread is not threading.current_thread():
            self._thread.join(seconds)
            if self._thread.is_alive():
                for process in self.processes:
                    process.kill()
                self._thread.join()
        for pipe in self._pipes:
            pipe.close()

    def _run(self) -> None:
        failures: list[Failure] = []
        deadline: float | None = None
        pending: dict[Any, int] = {pipe: index for index, pipe in enumerate(self._pipes)}
        pending |= {process.sentinel: index for index, process in enumerate(self.processes)}
        while pending and (deadline is None or monotonic() < deadline):
            timeout = None if deadline is None else max(0.0, deadline - monotonic())
            for ready in connection.wait(list(pending), timeout):
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
            self.give_up()
        for process in self.processes:  # until all are gone, not only until the cause is known
            process.join()

    def _receive(self, pipe: Connection, index: int) -> Failure | None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):  # its process ends: the sentinel says how
            pipe.close()
            return None
        if isinstance(message, Failure):
            return message
        self._replies[index].put(message)
        return None

    def _ended(self, index: int) -> Failure:
        process = self.processes[index]
        process.join()
        while (code := process.exitcode) is None:  # another thread reaped it, and has not written it down yet
            sleep(0.001)
        return Failure(index + 1, how_it_ended(code), code < 0, monotonic())


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended by itself with exit code {code}"
    name = signal.Signals(-code).name
    hint = ", perhaps because the host ran out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
