"""Where the ranks of a new group find each other, and the process group that they make there."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

Backend = Any  # ProcessGroupNCCL or ProcessGroupGloo: torch's stubs do not know their collectives

CONNECT_TIMEOUT = timedelta(seconds=60)  # for ranks that have all said that they are ready
CONNECT_POLL_SECONDS = 0.01  # how often one looks whether the others are here
HOST = "127.0.0.1"


class _LeavableStore(Store):
    """A store in which a wait for a key ends when `left` is set: torch's own waits end by their timeout."""

    def __init__(self, store: TCPStore) -> None:
        super().__init__()
        self.left = threading.Event()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = CONNECT_TIMEOUT) -> None:
        deadline = monotonic() + CONNECT_TIMEOUT.total_seconds()
        while not self._store.check(keys):
            if self.left.wait(CONNECT_POLL_SECONDS):
                raise RuntimeError("the meeting of the ranks was given up")
            if monotonic() > deadline:
                raise RuntimeError(f"another rank did not come within {CONNECT_TIMEOUT.seconds} s")


class Rendezvous:
    """Where the ranks of a new group find each other, at a port that the system chooses.

    Rank 0 makes it, and the others join it by its port. The group that meets here keeps it open.
    """

    def __init__(self, port: int | None = None) -> None:
        """Open one, or join the one at `port`. RuntimeError when nobody answers there."""
        host = port is None
        self.store = TCPStore(
            HOST, port or 0, is_master=host, wait_for_workers=False, timeout=CONNECT_TIMEOUT
        )
        self.port: int = self.store.port
        self.leavable_store = _LeavableStore(self.store)

    def leave(self) -> None:
        """Let a rank go that waits in `leavable_store` for another; any thread may call this."""
        self.leavable_store.left.set()

    def close(self) -> None:
        """Let go of the port. A group that met here keeps it open until its own end."""
        del self.store, self.leavable_store


def nccl(store: Store, rank: int, size: int) -> Backend:
    # Else NCCL serves its state at a fixed port, 28028, and at one more, until the process ends.
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")
    return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


def gloo(store: Store, rank: int, size: int) -> Backend:
    make: Any = dist.ProcessGroupGloo
    options = make._Options()
    options._devices = [make.create_device(hostname=HOST)]
    options._timeout = CONNECT_TIMEOUT
    group = make(store, rank, size, options)
    group._set_default_timeout(timedelta(days=1))  # a rank that dies is noticed otherwise, and at once
    return group
