"""Ranks: one model on several ranks. Rank 0's runner lives here; the workers repeat its calls.

Owns the processes, their channel and their watch, and cleans up after them. Never schedules.
"""

# Rank 0 sends a call through the channel and makes the same call; the ranks meet in the model's collectives.
# Results and errors come back through one pipe per worker, which `Watch` reads.

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import current_process, get_context
from threading import Thread
from time import monotonic
from typing import Any, Concatenate

from nanovllm.device import Device
from nanovllm.errors import WorkerError
from nanovllm.lifecycle import held_interrupts
from nanovllm.parallel.channel import Channel
from nanovllm.parallel.owned import finalize
from nanovllm.parallel.rendezvous import Rendezvous
from nanovllm.parallel.watch import POLL_SECONDS, Watch
from nanovllm.parallel.worker import (
    EXIT_SECONDS,
    Member,
    check_open_files,
    disown,
    start_process,
    worker_main,
)
from nanovllm.residency.runner import ResidentModelRunner
from nanovllm.runner.model_runner import ModelRunner, RankSetup
from nanovllm.runner.ranks import OneRank, P, R, T, called

_BLAME_SECONDS = 2.0  # after an error in rank 0, wait this long for a worker's failure as its cause
PHASES: dict[Callable[..., object], str] = {
    ModelRunner.launch: "a step",
    ModelRunner.draw: "a step",
    ResidentModelRunner.load_tensors: "update_weights",
    ResidentModelRunner.finish_update: "update_weights",
}


def phase_of(call: Callable[..., object]) -> str:
    """What the ranks do in a call, for messages."""
    return PHASES.get(call, call.__name__)


class Ranks(OneRank):
    """Calls of all ranks of a model.

    After a failure all workers are gone, and every call raises the same WorkerError.
    """

    def __init__(self, setup: RankSetup, device: Device, on_progress: Callable[[], None]) -> None:
        """Start a process for each rank but the first.

        Raises RuntimeError if this process cannot start processes, WorkerError if it may open too few files.
        """
        self.size = setup.size
        devices = device.ranks(setup.size)
        self.watch = Watch(setup.size - 1, setup.config.distributed_timeout_seconds, on_progress)
        super().__init__(setup, device, self.watch.progress)
        self._stop: Callable[[], object] = lambda: None
        if current_process().daemon:
            raise RuntimeError(
                "a daemonic process cannot start workers: create an LLM with tensor_parallel_size > 1 in the "
                "main process, or in one started with daemon=False"
            )
        check_open_files("tensor_parallel_size", setup.size - 1)
        self._rendezvous = Rendezvous()
        members = [
            Member(replace(setup, rank=rank, device=devices[rank]), self._rendezvous.folder)
            for rank in range(setup.size)
        ]
        self._member = members[0]
        try:
            with held_interrupts():
                self._start(members[1:])
        except BaseException:
            self.abandon()
            raise

    @property
    def has_ended(self) -> bool:  # type: ignore[override]
        return self.watch.ended.is_set()

    def _start(self, members: list[Member]) -> None:
        context = get_context("spawn")
        self._channel = channel = Channel(len(members))
        self._stop = finalize(self, _stop, self.watch, channel)
        os.register_at_fork(after_in_child=partial(disown, weakref.ref(self.watch)))
        for member, reader in zip(members, channel.readers, strict=True):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=worker_main,
                args=(member, reader, sender, os.getpid()),
                name=f"nanovllm rank {member.setup.rank}",
                daemon=True,
            )
            self.watch.add(process, receiver)
            start_process(process)
            sender.close()  # the worker has the only copy, so the pipe ends with the worker
        channel.readers.clear()
        self.watch.start()

    def memory(self) -> list[tuple[int, int]]:
        return [self._device.memory(), *self.collect("the start")]

    def load(self) -> None:
        """Meet the other ranks; each loads its part of the model."""
        with self._together(Member.load):
            self.watch.on_failure(self._rendezvous.leave)
            group = self._watched(lambda: self._member.join_group(self._device, self._rendezvous))
            self.watch.on_failure(group.abort)
            self.runner = self._member.load(self._device, group, self.progress)
        self.collect(phase_of(Member.load))

    def run(self, call: Callable[Concatenate[R, P], T], *args: P.args, **options: P.kwargs) -> T:
        """As in `OneRank`. Raises WorkerError if a worker fails meanwhile. After any exception the workers
        are ended, because they cannot know how far rank 0 got."""
        assert not options, "a message has positional arguments"
        with self._together(call, args):
            return called(self.runner, call, args)

    def call(self, call: Callable[Concatenate[R, P], T], *args: P.args, **options: P.kwargs) -> list[T]:
        assert not options, "a message has positional arguments"
        with self._together(call, args):
            own = called(self.runner, call, args)
        return [own, *self.collect(phase_of(call))]

    @contextmanager
    def _together(self, call: Callable[..., object], args: tuple[Any, ...] = ()) -> Iterator[None]:
        """Send a call to the workers, while rank 0 makes the same call in the block."""
        threads = self._device.share_of_threads(self.size, self._setup.config.num_threads)
        with self.kill_on_error(phase_of(call)), threads:
            self.watch.check()
            self._channel.send(call, *args, check_alive=self.watch.check)
            yield

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
            with held_interrupts():
                is_cause = isinstance(error, (WorkerError, KeyboardInterrupt))
                if not is_cause:
                    self.watch.ended.wait(_BLAME_SECONDS)
                self.kill()
                if not is_cause and self.watch.failure is not None:
                    # Without this frame: with it, error and traceback would be a reference cycle.
                    inner = getattr(error.__traceback__, "tb_next", None)
                    raise self.watch.error() from error.with_traceback(inner)
                raise

    def _watched(self, work: Callable[[], T]) -> T:
        """Run `work` in another thread; abandon that thread if a worker fails or on Ctrl-C.

        For library calls that wait for other ranks and that no signal and no `release` can end.
        """
        outcome: Future[T] = Future()
        thread = Thread(target=_complete, args=(outcome, work), name="nanovllm start-up", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                self.watch.check()
                thread.join(POLL_SECONDS)
            return outcome.result()
        finally:
            del outcome  # see `_complete`

    def stop(self) -> None:
        """Ask the workers to exit, wait until they are gone, and free this rank's memory."""
        with held_interrupts():
            self._stop()
        self.runner.exit()

    def abandon(self) -> None:
        self.kill()
        super().abandon()
        self._rendezvous.close()

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
            channel.send(ModelRunner.exit, check_alive=_until(monotonic() + EXIT_SECONDS, watch))
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
