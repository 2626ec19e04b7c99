"""The rendezvous of the ranks of a new group, and the creation of its process group."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

Backend = Any  # ProcessGroupNCCL or ProcessGroupGloo: torch's stubs do not know their collectives

CONNECT_TIMEOUT = timedelta(seconds=60)  # for ranks that are all ready
CONNECT_POLL_SECONDS = 0.01  # how often a rank checks for the others
HOST = "127.0.0.1"


class _LeavableStore(Store):
    """A store whose waits end when `left` is set; torch's own waits end only by timeout."""

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
    """The meeting point of the ranks of a new group, at a port that the system chooses.

    Rank 0 creates it, and the other ranks join by its port. The resulting group keeps it open.
    """

    def __init__(self, port: int | None = None) -> None:
        """Open a rendezvous, or join the one at `port`. RuntimeError if no one answers there."""
        host = port is None
        self.store = TCPStore(
            HOST, port or 0, is_master=host, wait_for_workers=False, timeout=CONNECT_TIMEOUT
        )
        self.port: int = self.store.port
        self.leavable_store = _LeavableStore(self.store)

    def leave(self) -> None:
        """Release a rank that waits in `leavable_store` for another; any thread may call this."""
        self.leavable_store.left.set()

    def close(self) -> None:
        """Release the port. A group that met here keeps it open until its own end."""
        del self.store, self.leavable_store


def nccl(store: Store, rank: int, size: int) -> Backend:
    # Else NCCL serves its state at the fixed port 28028 and another port until the process ends.
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")
    return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


def gloo(store: Store, rank: int, size: int) -> Backend:
    make: Any = dist.ProcessGroupGloo
    options = make._Options()
    options._devices = [make.create_device(hostname=HOST)]
    options._timeout = CONNECT_TIMEOUT
    group = make(store, rank, size, options)
    group._set_default_timeout(timedelta(days=1))  # `Watch` notices a dead rank at once
    return group
