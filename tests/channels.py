"""Channels that tests open: readers that listen in threads, and the files that must be gone at the end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path

import inside

from nanovllm.parallel.channel import Channel, ChannelReader

SHM = Path("/dev/shm")
SECONDS = 60  # far more than anything here takes


def called(*args: object) -> None:
    """What messages of tests call, by its name."""


def last(*args: object) -> None:
    """Another one."""


class DeadWorkerError(Exception):
    pass


def dead() -> None:
    raise DeadWorkerError


def shm_files(channel: Channel) -> list[Path]:
    """The files of the shared memory segment and of all semaphores."""
    names = [each._semlock.name.removeprefix("/") for each in inside.semaphores(channel)]
    return [SHM / inside.segment_name(channel), *(SHM / f"sem.{name}" for name in names)]


@contextmanager
def opened(num_readers: int, **sizes: int) -> Iterator[Channel]:
    """A channel and all its readers, closed at the end."""
    channel = Channel(num_readers, **sizes)
    readers = channel.readers.copy()
    yield channel
    for reader in readers:
        reader.close()
    channel.close()


@contextmanager
def listening(
    channel: Channel, count: int, delays: Sequence[Sequence[float]] = ((0,), (0,))
) -> Iterator[list[list[object]]]:
    """Receive `count` calls with each reader in a thread, all before the block ends. A reader sleeps for its
    `delays` in turn, like a slow worker.
    """
    calls: list[list[object]] = [[] for _ in channel.readers]

    def listen(reader: ChannelReader, delays: Sequence[float], calls: list[object]) -> None:
        deadline = time.monotonic() + SECONDS
        while len(calls) < count and time.monotonic() < deadline:
            time.sleep(delays[len(calls) % len(delays)])
            call = reader.receive(timeout=0.01)
            if call is not None:
                calls.append(call)

    rows = zip(channel.readers, delays, calls, strict=True)
    threads = [threading.Thread(target=listen, args=row) for row in rows]
    for thread in threads:
        thread.start()
    yield calls
    for thread in threads:
        thread.join()


def wait_for_calls(reader: ChannelReader, ready: Connection) -> None:
    ready.send(reader.receive(0))
    while os.getppid() == parent_process().pid:
        reader.receive(timeout=0.2)
