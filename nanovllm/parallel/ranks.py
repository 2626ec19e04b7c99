"""Ranks: one model on all its ranks. Rank 0's runner lives here; the workers repeat its calls.

Either all ranks start, with captured CUDA graphs, or nothing is left. Owns the processes, their channel and
their watch, and cleans up after them. Never schedules.
"""

# Rank 0 sends a call through the channel and makes the same call; the ranks meet in the model's collectives.
# Results and errors come back through one pipe per worker, which `Watch` reads.

from __future__ import annotations

import logging
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import current_process, get_context
from threading import Thread
from time import monotonic
from typing import Any, TypeVar

import torch

from nanovllm.device import Device
from nanovllm.errors import KVCacheMemoryError, WorkerError
from nanovllm.kv_group import slabs_of
from nanovllm.lifecycle import finalize, held_interrupts
from nanovllm.models.weights import weight_bytes
from nanovllm.parallel.channel import Channel
from nanovllm.parallel.group import TPGroup
from nanovllm.parallel.rendezvous import Rendezvous
from nanovllm.parallel.watch import POLL_SECONDS, Watch
from nanovllm.parallel.worker import (
    EXIT_SECONDS,
    RankSetup,
    check_open_files,
    disown,
    start_process,
    worker_main,
)
from nanovllm.residency.runner import ResidentModelRunner
from nanovllm.runner.memory import check_weights_fit, fit_kv_cache

logger = logging.getLogger("nanovllm")

T = TypeVar("T")

_BLAME_SECONDS = 2.0  # after an error in rank 0, wait this long for a worker's failure as its cause
_START_TRIES = _KV_CACHE_TRIES = 3
PAUSE_SECONDS = 1.0, 6.0  # between two tries of a start
PHASES = {
    "launch": "a step",
    "draw": "a step",
    "load_tensors": "update_weights",
    "finish_update": "update_weights",
}


def start_ranks(setup: RankSetup, on_progress: Callable[[], None] = lambda: None) -> Ranks:
    """Start every rank of a model, each with a KV cache of `num_blocks` blocks. setup: that of rank 0.

    Engines that start on one GPU at the same moment may need its last memory together. So a start that runs
    out of memory is tried again, after a random time.

    on_progress: called by any thread for each tensor that loads, and after each call of all ranks.
    Raises the errors of `LLMEngine`; all ranks are then ended.
    """
    device = Device(setup.device)
    for left in range(_START_TRIES)[::-1]:
        try:
            return _start_ranks(setup, device, on_progress)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            if not left:
                raise KVCacheMemoryError(
                    f"{device.torch} ran out of memory while the engine started ({error}). Close other "
                    "programs on the device, or lower gpu_memory_utilization "
                    f"(now {setup.config.gpu_memory_utilization}), max_num_batched_tokens or max_num_seqs"
                ) from error
        pause = random.uniform(*PAUSE_SECONDS)
        logger.warning(
            "%s ran out of memory while the engine started; other programs may have taken it at the same "
            "moment; trying again in %.1f s",
            *(device.torch, pause),
        )
        device.release_memory()
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device was full; a failed CUDA graph or kernel has torch's error only as its context."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA]: out of memory" in str(error):
            return True
        error = error.__context__
    return False


def _start_ranks(setup: RankSetup, device: Device, on_progress: Callable[[], None]) -> Ranks:
    """One try."""
    size, config = setup.size, setup.config
    devices = device.ranks(size)
    dtype = device.resolve_dtype(config.dtype, setup.model_config.dtype)
    need = weight_bytes(setup.model_config, TPGroup(0, size), dtype)
    rendezvous = Rendezvous() if size > 1 else None
    folder = rendezvous.folder if rendezvous else ""
    setup, *others = [
        replace(setup, rank=rank, device=devices[rank], rendezvous=folder) for rank in range(size)
    ]
    ranks = Ranks(device, others, config.distributed_timeout_seconds, on_progress, config.num_threads)
    try:
        check_weights_fit(need, [device.memory(), *ranks.collect("the start")], config, device)
        ranks.load(setup, rendezvous)
        ranks.call("calibrate_kv_cache")
        ranks.allocate_kv_cache(max(ranks.call("warmup_model")))
        ranks.call("capture_cudagraph", logger.isEnabledFor(logging.INFO))
        return ranks
    except BaseException:
        ranks.kill()
        if hasattr(ranks, "runner"):
            ranks.runner.exit()
        if rendezvous is not None:
            rendezvous.close()
        raise


class Ranks:
    """Calls of all ranks of a model. Without other ranks, they run on rank 0 alone.

    After a failure all workers are gone, and every call raises the same WorkerError.
    """

    runner: ResidentModelRunner  # rank 0's, once it has loaded
    num_blocks: int  # of every rank's KV cache

    def __init__(
        self,
        device: Device,
        setups: list[RankSetup],
        limit: float,
        on_progress: Callable[[], None] = lambda: None,
        num_threads: int | None = None,
    ) -> None:
        """Start a process for each setup. device: rank 0's. limit, on_progress: as in `Watch`.
        num_threads: as in `Config`.

        Raises RuntimeError if this process cannot start processes, WorkerError if it may open too few files.
        """
        self._device, self._num_threads = device, num_threads
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

    def load(self, setup: RankSetup, rendezvous: Rendezvous | None) -> None:
        """Meet the other ranks, if there are any; each loads its part of the model. setup: that of rank 0."""

        def load() -> ResidentModelRunner:
            group = TPGroup()
            if rendezvous is not None:
                self.watch.on_failure(rendezvous.leave)
                group = self._watched(lambda: setup.join_group(self._device, rendezvous))
                self.watch.on_failure(group.abort)
            return setup.load(self._device, group, self.watch.progress)

        self.runner = self.run("load", own=load)
        self.collect("load")

    def allocate_kv_cache(self, reserve: int) -> None:
        """Allocate the KV cache on every rank; all have as many blocks. reserve: bytes of the device to keep.

        Other processes may take memory between the measurement and the allocation; then measure again.
        """
        runner = self.runner
        config, groups, longest = runner.config, runner.layout.groups, runner.max_model_len
        each = slabs_of(groups, longest, runner.block_size, config.max_num_batched_tokens)
        most = config.max_num_seqs * each  # more blocks are of no use
        for _ in range(_KV_CACHE_TRIES):
            spaces = self.call("measure_kv_cache", reserve)
            self.num_blocks = fit_kv_cache(spaces, runner.config, runner.block_size, most)
            if all(self.call("try_kv_cache", self.num_blocks)):
                return
            logger.warning(
                "the memory for the KV cache was taken while the engine started; measuring it again"
            )
        allocated = self.call("allocate_kv_cache", self.num_blocks)
        assert set(allocated) == {self.num_blocks}, "every rank has as many blocks as the scheduler"

    def run(self, method: str, *args: object, own: Callable[..., Any] | None = None) -> Any:
        """Call a method of every rank's runner, with the same arguments; return the result of rank 0.

        own: what rank 0 calls instead. Raises WorkerError if a worker fails meanwhile. After any exception
        the workers are ended, because they cannot know how far rank 0 got.
        """
        own = own or getattr(self.runner, method)
        threads = self._device.share_of_threads(1 + len(self.watch.processes), self._num_threads)
        if self._channel is None:
            with threads:
                return own(*args)
        with self.kill_on_error(PHASES.get(method, method)), threads:
            self.watch.check()
            self._channel.send(method, *args, check_alive=self.watch.check)
            return own(*args)

    def call(self, method: str, *args: object) -> list[Any]:
        """As `run`, for a method with an answer: return the results of all ranks, rank 0's first."""
        return [self.run(method, *args), *self.collect(PHASES.get(method, method))]

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
        if not self.watch.processes:
            yield
            return
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
        if not self.watch.processes:
            return work()
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
