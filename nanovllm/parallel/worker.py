"""A worker process: rank 1..N-1 of a tensor-parallel engine, which repeats every call of rank 0.

Also what starts processes, of workers and of replicas. A worker watches its parent, and ends with it.
"""

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from os import scandir
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NoReturn

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.errors import WorkerError
from nanovllm.models.config import ModelConfig
from nanovllm.parallel.channel import ChannelReader
from nanovllm.parallel.group import TPGroup
from nanovllm.parallel.peer_memory import PeerMemorySizes
from nanovllm.parallel.rendezvous import Rendezvous
from nanovllm.parallel.watch import Failure, Progress
from nanovllm.residency.runner import ResidentModelRunner
from nanovllm.runner.inputs import OVERLAP_TOKENS, rows_of_half

EXIT_SECONDS = 5.0  # time for workers to exit on request; then they are killed
OWN_FILES, FILES_PER_PROCESS = 16, 8  # that may be open at once: weights, pipes, sockets
_PARENT_SECONDS = 0.5  # how often a worker checks that rank 0 is alive


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
        with Device(setup.device).share_of_threads(setup.size, setup.config.num_threads):
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
        sleep(_PARENT_SECONDS)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


# -- processes, of workers and replicas ----------------------------------------------------------------------


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
