"""Worker processes: ranks 1..N-1 of a tensor-parallel engine, which repeat every call of rank 0.

Owns the processes, their channel and their watch, and cleans up after them. Never schedules.
"""

# Rank 0 sends a call through the channel and makes the same call; the ranks meet in the model's collectives.
# Results and errors come back through one pipe per worker, which `Watch` reads. A worker watches its parent.

from __future__ import annotations

import gc
import multiprocessing.process
import os
import resource
import shutil
import signal
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from os import scandir
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NoReturn, TypeVar

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.distributed.group import TPGroup
from nanovllm.distributed.peer_memory import PeerMemorySizes
from nanovllm.distributed.rendezvous import Rendezvous
from nanovllm.errors import WorkerError
from nanovllm.lifecycle import finalize
from nanovllm.models.config import ModelConfig
from nanovllm.runner.overlap import OVERLAP_TOKENS, rows_of_half
from nanovllm.runner.residency import ResidentModelRunner
from nanovllm.workers.channel import Channel, ChannelReader
from nanovllm.workers.interrupts import held_interrupts
from nanovllm.workers.watch import POLL_SECONDS, Failure, Progress, Watch

T = TypeVar("T")

BLAME_SECONDS = 2.0  # after an error in rank 0, wait this long for a worker's failure as its cause
EXIT_SECONDS = 5.0  # time for workers to exit on request; then they are killed
OWN_FILES, FILES_PER_PROCESS = 16, 8  # that may be open at once: weights, pipes, sockets
PARENT_SECONDS = 0.5  # how often a worker checks that rank 0 is alive
PHASES = {
    "launch": "a step",
    "draw": "a step",
    "load_tensors": "update_weights",
    "finish_update": "update_weights",
}


@dataclass(frozen=True)
class RankSetup:
    """Everything that a process needs to become rank `rank` of `size`."""

    rank: int
    size: int
    device: str
    rendezvous: str  # the folder of the Rendezvous
    config: Config
    model_config: ModelConfig
    model_path: Path
    max_model_len: int

    def join_group(self, device: Device, rendezvous: Rendezvous) -> TPGroup:
        """Connect to the other ranks, which make the same call."""
        group = TPGroup.connect(self.rank, self.size, device, rendezvous)
        dtype = device.resolve_dtype(self.config.dtype, self.model_config.dtype)
        copied_rows = rows_of_half(self.config.max_num_batched_tokens, self.size)
        max_rows = self.config.max_num_seqs
        if self.size == 2:  # also short prefill steps: one shot moves as much as NCCL, and includes the norm
            max_rows = max(max_rows, min(self.config.max_num_batched_tokens, OVERLAP_TOKENS - 1))
        sizes = PeerMemorySizes(
            dtype,
            max_rows,
            self.model_config.hidden_size,
            copied_rows,
            logit_rows=self.config.max_num_seqs,
            vocab_size=self.model_config.vocab_size,
        )
        group.make_peer_memory(sizes, device)
        return group

    def load(
        self, device: Device, group: TPGroup, check: Callable[[], None] = lambda: None
    ) -> ResidentModelRunner:
        """Load this rank's part of the model; `check` as in `ModelRunner`."""
        return ResidentModelRunner(
            self.config, self.model_config, self.model_path, device, group, self.max_model_len, check
        )


# -- in the worker ------------------------------------------------------------------------------------------


def worker_main(setup: RankSetup, reader: ChannelReader, replies: Connection, parent: int) -> None:
    """The main function of a worker process; it never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    threading.Thread(target=exit_with, args=(parent, setup.rendezvous), daemon=True).start()
    try:
        loop(setup, reader, replies)
    except BaseException:  # report everything to rank 0
        failure = Failure(setup.rank, f"failed:\n{traceback.format_exc()}", False, monotonic())
        with suppress(OSError):  # rank 0 is gone
            replies.send(failure)
    leave()  # at once: the libraries' clean-up may wait for ranks that are gone


def leave() -> NoReturn:
    """End this process without Python's clean-up. Its streams may be closed, or their reader gone."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(0)


def loop(setup: RankSetup, reader: ChannelReader, replies: Connection) -> None:
    """Repeat rank 0's calls until it calls `exit`. Answer all calls except `launch` and `draw`."""
    device = Device(setup.device)
    replies.send(device.memory())
    runner: ResidentModelRunner | None = None
    while True:
        call = reader.receive(timeout=60.0)
        if call is None:
            continue
        method, args = call
        result = None
        if method == "load":
            group = setup.join_group(device, Rendezvous(setup.rendezvous))
            runner = setup.load(device, group, lambda: replies.send(Progress()))
            gc.freeze()  # existing objects stay: no full collection while all ranks wait
        elif runner is not None:
            result = getattr(runner, method)(*args)
        if method == "exit":
            return
        if method not in ("launch", "draw"):
            replies.send(result)


def exit_with(parent: int, folder: str = "") -> None:
    """End this process, whatever it does, once its parent is gone. folder: the parent's, to remove."""
    while os.getppid() == parent:
        sleep(PARENT_SECONDS)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


# -- in rank 0 ----------------------------------------------------------------------------------------------


class Workers:
    """Rank 0's handle for ranks 1..N-1. Without other ranks, calls run on rank 0 alone.

    After a failure all workers are gone, and every call raises the same WorkerError.
    """

    def __init__(
        self, setups: list[RankSetup], limit: float, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Start a process for each setup. limit, on_progress: as in `Watch`.

        Raises RuntimeError if this process cannot start processes, WorkerError if it may open too few files.
        """
        self.watch = Watch(len(setups), limit, on_progress)
        self._channel: Channel | None = None
        self._stop: Callable[[], object] = lambda: None
        if not setups:
            return
        if current_process().daemon:
            raise RuntimeError(
                "a daemonic process cannot start workers: create an LLM with tensor_parallel_size > 1 in the "
                "main process, or in one started with daemon=False"
            )
        check_open_files("tensor_parallel_size", len(setups))
        try:
            with held_interrupts():
                self._start(setups)
        except BaseException:
            self.kill()
            raise

    def _start(self, setups: list[RankSetup]) -> None:
        context = get_context("spawn")
        self._channel = channel = Channel(len(setups))
        self._stop = finalize(self, _stop, self.watch, channel)
        os.register_at_fork(after_in_child=partial(disown, weakref.ref(self.watch)))
        for setup, reader in zip(setups, channel.readers, strict=True):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=worker_main,
                args=(setup, reader, sender, os.getpid()),
                name=f"nanovllm rank {setup.rank}",
                daemon=True,
            )
            self.watch.add(process, receiver)
            start_process(process)
            sender.close()  # the worker has the only copy, so the pipe ends with the worker
        channel.readers.clear()
        self.watch.start()

    def run(self, own: Callable[..., T], method: str, *args: object) -> T:
        """Call `method` on every worker and `own` here, with the same arguments; return the result of `own`.

        Raises WorkerError if a worker fails meanwhile. After any exception the workers are ended, because
        they cannot know how far rank 0 got.
        """
        if self._channel is None:
            return own(*args)
        with self.kill_on_error(PHASES.get(method, method)):
            self.watch.check()
            self._channel.send(method, *args, check_alive=self.watch.check)
            return own(*args)

    def call(self, own: Callable[..., T], method: str, *args: object) -> list[T]:
        """As `run`, for a method with an answer: return the results of all ranks, rank 0's first."""
        return [self.run(own, method, *args), *self.collect(PHASES.get(method, method))]

    def collect(self, phase: str) -> list[Any]:
        """Wait for the next answer of every worker. phase: as in `kill_on_error`."""
        with self.kill_on_error(phase):
            answers = [self.watch.wait_for_reply(index) for index in range(len(self.watch.processes))]
            self.watch.progress()
            return answers

    @contextmanager
    def kill_on_error(self, phase: str) -> Iterator[None]:
        """On an exception in the block, end all workers and raise the WorkerError behind it, if any.

        phase: what the block does, for the error of a wait that reaches the watch's limit.
        """
        try:
            with self.watch.waiting(phase):
                yield
            self.watch.check()  # a failed worker ends waits without a result
        except BaseException as error:
            if not self.watch.processes:
                raise
            with held_interrupts():
                is_cause = isinstance(error, (WorkerError, KeyboardInterrupt))
                if not is_cause:
                    self.watch.ended.wait(BLAME_SECONDS)
                self.kill()
                if not is_cause and self.watch.failure is not None:
                    # Without this frame: with it, error and traceback would be a reference cycle.
                    inner = getattr(error.__traceback__, "tb_next", None)
                    raise self.watch.error() from error.with_traceback(inner)
                raise

    def watched(self, work: Callable[[], T]) -> T:
        """Run `work` in another thread; abandon that thread if a worker fails or on Ctrl-C.

        For library calls that wait for other ranks and that no signal and no `release` can end.
        """
        if not self.watch.processes:
            return work()
        outcome: Future[T] = Future()
        thread = threading.Thread(
            target=_complete, args=(outcome, work), name="nanovllm start-up", daemon=True
        )
        thread.start()
        try:
            while thread.is_alive():
                self.watch.check()
                thread.join(POLL_SECONDS)
            return outcome.result()
        finally:
            del outcome  # see `_complete`

    def stop(self) -> None:
        """Ask the workers to exit and wait until they are gone; a second call does nothing."""
        with held_interrupts():
            self._stop()

    def kill(self) -> None:
        with held_interrupts():
            self.watch.kill()
            self._stop()


def _complete(outcome: Future[T], work: Callable[[], T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)
        # The error refers to this frame. A reference cycle would keep the ports that `work` opened until the
        # next garbage collection.
        del outcome


def _stop(watch: Watch, channel: Channel) -> None:
    """End all workers, on request if nothing failed, and unlink the channel. Also called at process exit."""
    if not watch.ended.is_set():
        watch.stopping = True
        try:
            channel.send("exit", check_alive=_until(monotonic() + EXIT_SECONDS, watch))
        except WorkerError:
            watch.kill()
    watch.join(EXIT_SECONDS)
    channel.close()


def _until(deadline: float, watch: Watch) -> Callable[[], None]:
    """A check that raises WorkerError when no worker is left, and after `deadline`."""

    def check() -> None:
        watch.check()
        if monotonic() > deadline:
            raise WorkerError("a worker reads nothing")

    return check


def disown(owner: weakref.ref[Any]) -> None:
    """In a forked process, make multiprocessing forget `processes`; else it would end them at exit."""
    if (known := owner()) is not None:
        children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]
        children.difference_update(known.processes)


def check_open_files(option: str, count: int) -> None:
    """Raise WorkerError if this process may not open the files that `count` more processes need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with scandir("/proc/self/fd") as entries:
        is_open = sum(1 for _ in entries)
    need = OWN_FILES + FILES_PER_PROCESS * count
    if limit != resource.RLIM_INFINITY and limit - is_open < need:
        raise WorkerError(
            f"{option} above 1 needs {need} more open files here, and the limit of open files is {limit}, of "
            f"which {is_open} are in use; raise the limit, for example with `ulimit -n 1024`"
        )


def start_process(process: multiprocessing.process.BaseProcess) -> None:
    """Start a process that does not import the caller's script again, with SIGINT blocked.

    `spawn` takes the script from sys.modules["__main__"], which is empty here. So scripts need no __main__
    guard. A terminal sends Ctrl-C to every process; rank 0 handles it.
    """
    main = sys.modules["__main__"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        sys.modules["__main__"] = types.ModuleType("__main__")
        process.start()
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
