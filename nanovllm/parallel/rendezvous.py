"""The rendezvous of the ranks of a new group, and the creation of its process group.

No other user of the host can take part: the ranks meet in a private folder, and sockets are on loopback.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from nanovllm.errors import WorkerError
from nanovllm.parallel.owned import finalize

Backend = Any  # ProcessGroupNCCL or ProcessGroupGloo: torch's stubs do not know their collectives

UNLIMITED = timedelta(days=1)  # `Watch` limits all waits, and notices a dead rank at once
_FILE_TIMEOUT = timedelta(seconds=5)  # for opening the store's file
_CONNECT_POLL_SECONDS = 0.01  # how often a rank checks for the others
_HOST = "127.0.0.1"
SHARED_MEMORY = "/dev/shm"  # never a network file system, unlike the folder for temporary files


class LeavableStore(Store):
    """A store whose waits end when `left` is set; torch's own waits end only by timeout."""

    def __init__(self, store: FileStore) -> None:
        super().__init__()
        self.left = threading.Event()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = UNLIMITED) -> None:
        while not self._store.check(keys):
            if self.left.wait(_CONNECT_POLL_SECONDS):
                raise RuntimeError("the meeting of the ranks was given up")


class Rendezvous:
    """The meeting point of the ranks of a new group: a file in a folder that only this user may enter.

    Rank 0 creates it, and the other ranks join by the folder's path. Rank 0 removes the folder in `close`, or
    at the end of its process. Keep the object as long as the group: a store that ends while rank 0 removes
    its file would end the process.
    """

    def __init__(self, folder: str | None = None) -> None:
        """Open a rendezvous, or join the one in `folder`. WorkerError if there is no room for one."""
        try:
            own = f"nanovllm-{os.getpid()}-"
            self.folder = mkdtemp(prefix=own, dir=SHARED_MEMORY) if folder is None else folder
            self.close = finalize(self, shutil.rmtree, self.folder, True) if folder is None else lambda: None
            self._stores: list[FileStore] = []
            self.store = LeavableStore(self._open(_FILE_TIMEOUT))
        except (OSError, RuntimeError) as error:
            raise WorkerError(
                f"tensor_parallel_size above 1 needs a file in {SHARED_MEMORY}, and none can be made: {error}"
            ) from error

    def _open(self, timeout: timedelta) -> FileStore:
        store = FileStore(str(Path(self.folder, "store")))
        store.set_timeout(timeout)
        self._stores.append(store)
        return store

    def plain_store(self) -> Store:
        """torch's own store, whose waits nothing ends."""
        return self._open(UNLIMITED)

    def leave(self) -> None:
        """Release a rank that waits in `store` for another; any thread may call this."""
        self.store.left.set()


@contextmanager
def nccl_settings() -> Iterator[None]:
    """Settings of NCCL for a block that connects ranks: its sockets are on loopback, and it serves no state.

    The user's own settings take precedence. If this process already is part of a torch.distributed job, NCCL
    keeps the network interface of that job.
    """
    wanted = {"NCCL_RAS_ENABLE": "0"}  # else at port 28028 and another one, until the process ends
    if not dist.is_initialized():
        wanted["NCCL_SOCKET_IFNAME"] = "lo"
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def nccl(store: Store, rank: int, size: int) -> Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = UNLIMITED  # else NCCL ends the process when a rank is late
    return dist.ProcessGroupNCCL(store, rank, size, options)


def gloo(store: Store, rank: int, size: int) -> Backend:
    make: Any = dist.ProcessGroupGloo
    options = make._Options()
    options._devices = [make.create_device(hostname=_HOST)]
    options._timeout = UNLIMITED
    try:
        group = make(store, rank, size, options)
    finally:
        del options  # an error's traceback refers to this frame, and the device listens
    group._set_default_timeout(UNLIMITED)
    return group
