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
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from os import scandir
from time import monotonic, sleep
from typing import Any, NoReturn

from nanovllm.device import Device
from nanovllm.errors import WorkerError
from nanovllm.parallel.channel import ChannelReader, Received
from nanovllm.parallel.group import TPGroup
from nanovllm.parallel.halves import OVERLAP_TOKENS, rows_of_half
from nanovllm.parallel.peer_memory import PeerMemorySizes
from nanovllm.parallel.rendezvous import Rendezvous
from nanovllm.parallel.watch import Failure, Progress
from nanovllm.runner.model_runner import ModelRunner, RankSetup
from nanovllm.runner.ranks import called

EXIT_SECONDS = 5.0  # time for workers to exit on request; then they are killed
OWN_FILES, FILES_PER_PROCESS = 16, 8  # that may be open at once: weights, pipes, sockets
_PARENT_SECONDS = 0.5  # how often a worker checks that rank 0 is alive
_REMOVALS = 10  # attempts to remove a folder


UNANSWERED: set[Callable[..., object]] = {ModelRunner.launch, ModelRunner.draw}


@dataclass(frozen=True)
class Member:
    """A rank among several, and where they meet."""

    setup: RankSetup
    rendezvous: str  # the folder of the Rendezvous

    def join_group(self, device: Device, rendezvous: Rendezvous) -> TPGroup:
        """Connect to the other ranks, which make the same call."""
        setup, config, model = self.setup, self.setup.config, self.setup.model_config
        group = TPGroup.connect(setup.rank, setup.size, device, rendezvous)
        copied_rows = rows_of_half(config.max_num_batched_tokens, setup.size)
        max_rows = config.max_num_seqs
        if setup.size == 2:  # also short prefill steps: one shot moves as much as NCCL, and includes the norm
            max_rows = max(max_rows, min(config.max_num_batched_tokens, OVERLAP_TOKENS - 1))
        sizes = PeerMemorySizes(
            device.resolve_dtype(config.dtype, model.dtype),
            max_rows,
            model.hidden_size,
            copied_rows,
            logit_rows=config.max_num_seqs,
            vocab_size=model.vocab_size,
        )
        group.make_peer_memory(sizes, device)
        return group

    def load(self, device: Device, group: TPGroup, check: Callable[[], None]) -> ModelRunner:
        """As `RankSetup.load`."""
        return self.setup.load(device, group, check)


# -- in the worker ------------------------------------------------------------------------------------------


def worker_main(member: Member, reader: ChannelReader, replies: Connection, parent: int) -> None:
    """The main function of a worker process; it never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    threading.Thread(target=exit_with, args=(parent, member.rendezvous), daemon=True).start()
    setup = member.setup
    try:
        with Device(setup.device).share_of_threads(setup.size, setup.config.num_threads):
            loop(member, reader, replies)
    except BaseException:  # report everything to rank 0
        failure = Failure(setup.rank, f"failed:\n{traceback.format_exc()}", False, monotonic())
        try:
            replies.send(failure)
        except OSError:  # rank 0 is gone, and what it owned remains
            exit_with(parent, member.rendezvous)
    leave()  # at once: the libraries' clean-up may wait for ranks that are gone


def leave() -> NoReturn:
    """End this process without Python's clean-up. Its streams may be closed, or their reader gone."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(0)


def loop(member: Member, reader: ChannelReader, replies: Connection) -> None:
    """Repeat rank 0's calls until it calls `ModelRunner.exit`. The first one is `Member.load`, once the
    weights of all ranks fit. Answer all but UNANSWERED."""
    device = Device(member.setup.device)
    replies.send(device.memory())
    runner: ModelRunner | None = None
    for call, args in _calls(reader):
        result = None
        if runner is None:
            assert call is Member.load, "nothing runs before the model is loaded"
            group = member.join_group(device, Rendezvous(member.rendezvous))
            runner = member.load(device, group, lambda: replies.send(Progress()))
            gc.freeze()  # existing objects stay: no full collection while all ranks wait
        else:
            result = called(runner, call, args)
        if call not in UNANSWERED:
            replies.send(result)
    if runner is not None:
        runner.exit()


def _calls(reader: ChannelReader) -> Iterator[Received]:
    """Rank 0's calls, up to `ModelRunner.exit`."""
    while True:
        received = reader.receive(timeout=60.0)
        if received is not None:
            if received[0] is ModelRunner.exit:
                return
            yield received


def exit_with(parent: int, folder: str = "") -> None:
    """End this process, whatever it does, once its parent is gone. folder: the parent's, to remove."""
    while os.getppid() == parent:
        sleep(_PARENT_SECONDS)
    for _ in range(_REMOVALS):  # a rank that waits there makes its file again
        if not os.path.exists(folder):
            break
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
    resource_tracker.ensure_running()  # its start unblocks SIGINT
    main = sys.modules["__main__"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        sys.modules["__main__"] = types.ModuleType("__main__")
        process.start()
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
