"""TPGroup: the ranks that share one model, and the collectives that they need.

The only module that speaks to torch.distributed. It starts no process, and touches no default process
group: every engine has a group of its own.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from time import monotonic
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore, _register_process_group, _SymmetricMemory

from nanovllm.device import Device
from nanovllm.kernels.all_reduce import (
    EMPTY,
    TURNS,
    Peers,
    all_reduce_add_rms_norm_triton,
    all_reduce_triton,
)
from nanovllm.kernels.compat import HAS_TRITON
from nanovllm.kernels.copied_sum import PeerCopies, PendingSum
from nanovllm.kernels.rms_norm import add_rms_norm

logger = logging.getLogger("nanovllm")

Backend = Any  # ProcessGroupNCCL or ProcessGroupGloo: torch's stubs do not know their collectives

CONNECT_TIMEOUT = timedelta(seconds=60)  # for ranks that have all said that they are ready
CONNECT_POLL_SECONDS = 0.01  # how often one looks whether the others are here
HOST = "127.0.0.1"
TWO_SHOT_ROWS = 48  # rows from which a sum over more than two GPUs goes in two shots


class TPGroup:
    """Rank `rank` of `size` tensor-parallel ranks. With one rank every collective is the identity.

    Without a `process_group` the group of several ranks still says which shard a layer owns, but cannot
    communicate: calling a collective is then a RuntimeError.
    """

    def __init__(self, rank: int = 0, size: int = 1, process_group: Backend | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), not {rank}")
        self.rank = rank
        self.size = size
        self._process_group = process_group
        self._peer_memory: PeerMemory | None = None
        self._rendezvous: Rendezvous | None = None

    @classmethod
    def connect(cls, rank: int, size: int, device: Device, rendezvous: Rendezvous) -> TPGroup:
        """Meet the other ranks at `rendezvous` and return the group, over NCCL on GPUs and gloo on a CPU.

        Blocks until all ranks are here, a minute at most.
        """
        device.make_current()
        connect, store = (_nccl, rendezvous.store) if device.is_cuda else (_gloo, rendezvous.leavable_store)
        group = cls(rank, size, connect(store, rank, size))
        group._rendezvous = rendezvous
        group.all_reduce(torch.zeros(1, device=device.torch))  # NCCL connects at the first call
        device.synchronize()
        return group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over the ranks, on each of them; `x` may be overwritten."""
        if self.size == 1:
            return x
        peer_memory = self.peer_memory_for(x)
        if peer_memory is not None:
            return peer_memory.all_reduce(x)
        options = dist.AllreduceOptions()
        options.asyncOp = False  # on the current stream, which is what a CUDA graph captures best
        _wait(self._group().allreduce([x], options))
        return x

    def start_sum(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, whole: bool
    ) -> PendingSum:
        """Begin `add_rms_norm` of the sum of `x` [T, n] over the ranks; `x` is not to be touched any more.

        Unless `whole` the second result may be some of its rows, for another `start_sum` to take as its
        residual. At most two sums may be under way, and all ranks begin, advance and finish them in the same
        order. Other use of both results must be queued before the second sum after this one is begun.
        """
        copies = None if self._peer_memory is None else self._peer_memory.copies
        if copies is not None and copies.fits(x):
            return copies.start(x, residual, weight, eps, whole)
        options = dist.AllreduceOptions()
        options.asyncOp = True
        work = self._group().allreduce([x], options)

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            _wait(work)
            return add_rms_norm(x, residual, weight, eps)

        return PendingSum(finish)

    def gather_last_dim(self, x: torch.Tensor) -> torch.Tensor | None:
        """Concatenate the ranks' `x` [..., n] to [..., size * n] on rank 0; the others get None."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        _wait(self._group().gather(parts, x, 0))
        return torch.cat(parts, dim=-1) if parts else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `x` on every rank; the others bring a contiguous tensor of its shape and dtype."""
        if self.size > 1:
            _wait(self._group().broadcast(x, 0))
        return x

    def make_peer_memory(
        self, max_rows: int, n: int, dtype: torch.dtype, device: Device, copied_rows: int = 0
    ) -> None:
        """Let sums of up to `max_rows` rows of `n` go through memory that all GPUs of the group can read.

        Sums of shorter rows do too, of any float dtype of 16 or 32 bits, and those that `start_sum` begins,
        of up to `copied_rows`. A collective call. Where they cannot, and on a CPU, all sums go through the
        process group.
        """
        power_of_2 = self.size & (self.size - 1) == 0
        if self._rendezvous is not None and device.is_cuda and power_of_2 and HAS_TRITON:
            self._peer_memory = PeerMemory.make(
                self, self._rendezvous, max_rows, n, dtype, device, copied_rows
            )

    def peer_memory_for(self, x: torch.Tensor) -> PeerMemory | None:
        """The memory through which `x` can be summed over the ranks, if it is of such a kind."""
        if self._peer_memory is None or x.dim() != 2 or not x.is_contiguous():
            return None
        return self._peer_memory if self.sums_in_peer_memory(len(x), x.shape[1], x.dtype) else None

    def sums_in_peer_memory(self, rows: int, n: int, dtype: torch.dtype) -> bool:
        """Whether sums of [rows, n] need neither NCCL nor gloo, and so may be in a CUDA graph."""
        return self._peer_memory is not None and self._peer_memory.fits(rows, n, dtype)

    def abort(self) -> None:
        """Let go of the other ranks, whether they live or not; whatever waits for them ends, with garbage.

        Any thread may call this, also while another one waits in a collective; a second call does nothing.
        """
        if self._peer_memory is not None:
            self._peer_memory.release_waiters()  # first: NCCL's abort waits for the whole device
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            process_group.abort()

    def close(self) -> None:
        """Leave the group, on which nothing may be waiting any more, and free its memory and its port."""
        self._peer_memory = None
        self.abort()
        self._rendezvous = None

    def _group(self) -> Backend:
        if self._process_group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group to communicate through")
        return self._process_group


class PeerMemory:
    """Memory that every GPU of the group writes to directly, for sums of few rows in one kernel.

    Allocated by torch's symmetric memory, which exchanges the addresses. Holds what `Peers` describes.
    """

    def __init__(
        self, group: TPGroup, device: Device, buffer: torch.Tensor, handle: Any, max_rows: int, n: int
    ) -> None:
        """buffer: this rank's, of `numel(...)` elements of the rows' dtype; handle: torch's, of all."""
        self.copies: PeerCopies | None = None  # of sums of many rows, at the buffer's end
        self.group_name = ""  # torch's own operations on the buffer would need it
        self._store: Store | None = None
        self._buffer = buffer
        self._handle = handle  # keeps the other ranks' memory mapped
        self._device = device
        self._beside = device.side_stream()
        self._one = device.host_buffer(1, torch.int32).fill_(1)
        row_bytes = self._row_bytes(n, buffer.element_size())
        slots = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=buffer.device)
        self.peers = Peers(
            group.rank,
            group.size,
            slots,
            slots + TURNS * (group.size - 1) * max_rows * row_bytes if group.size > 2 else None,
            turns=torch.zeros(max_rows, dtype=torch.int32, device=buffer.device),
            aborted=torch.zeros(1, dtype=torch.int32, device=buffer.device),
            row_bytes=row_bytes,
        )
        buffer.view(torch.int16).fill_(EMPTY)

    @staticmethod
    def _row_bytes(n: int, itemsize: int) -> int:
        return -(-n * itemsize // 16) * 16

    @staticmethod
    def numel(max_rows: int, n: int, size: int, itemsize: int) -> int:
        """How many elements of `itemsize` bytes a buffer must have, those of copied rows apart."""
        rooms = size - 1 + (size > 2)  # two ranks never need two shots
        return TURNS * rooms * max_rows * PeerMemory._row_bytes(n, itemsize) // itemsize

    @classmethod
    def make(
        cls,
        group: TPGroup,
        rendezvous: Rendezvous,
        max_rows: int,
        n: int,
        dtype: torch.dtype,
        device: Device,
        copied_rows: int = 0,
    ) -> PeerMemory | None:
        """Allocate and exchange the buffers: None on all ranks if any cannot."""
        made = None
        try:
            # torch keeps the name and the store for the life of the process, so the name must be new, and
            # the store not the one that holds the port open. Some versions look the name up elsewhere too.
            if group.rank == 0:
                rendezvous.store.set("peer memory", f"nanovllm-{uuid4().hex}")
            name: Any = rendezvous.store.get("peer memory").decode()
            store = _FreshStore(Rendezvous(rendezvous.port).store)
            named_group = dist.ProcessGroup(store, group.rank, group.size)
            named_group._set_group_name(name)
            _register_process_group(name, named_group)
            _SymmetricMemory.set_group_info(name, group.rank, group.size, store)
            numel = cls.numel(max_rows, n, group.size, dtype.itemsize)
            if copied_rows:
                numel += PeerCopies.numel(copied_rows, n, group.size, dtype.itemsize)
            buffer = _SymmetricMemory.empty_strided_p2p((numel,), (1,), dtype, device.torch, name)
            handle = _SymmetricMemory.rendezvous(buffer, name)
            made = cls(group, device, buffer, handle, max_rows, n)
            if copied_rows:
                made.copies = PeerCopies(
                    group.rank, device, buffer, handle, made.peers.aborted, copied_rows, n
                )
            made.group_name = name
            made._store = store
        except RuntimeError as error:
            made = None
            logger.info("GPUs cannot read each other's memory (%s); all-reduce goes through NCCL", error)
        # All ranks' rooms are empty before anyone can fill one, for this too waits for all ranks.
        everywhere = group.all_reduce(torch.tensor([float(made is not None)], device=device.torch))
        return made if int(everywhere.item()) == group.size else None

    def fits(self, rows: int, n: int, dtype: torch.dtype) -> bool:
        """Whether there is room for rows [rows, n], of the size that was planned for or shorter ones."""
        return rows <= len(self.peers.turns) and n * dtype.itemsize <= self.peers.row_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` [T, n] over the ranks, new."""
        return all_reduce_triton(self.peers, x, self._two_shot(x))

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `add_rms_norm` gives for the sum of `x` [T, n] over the ranks, both new."""
        return all_reduce_add_rms_norm_triton(self.peers, x, residual, weight, eps, self._two_shot(x))

    def release_waiters(self) -> None:
        """Let kernels that wait for dead ranks go on.

        By a copy, not by a kernel: loading one for the first time can wait for the kernels that wait.
        """
        self._device.run_beside(self._beside, lambda: self.peers.aborted.copy_(self._one, non_blocking=True))

    def _two_shot(self, x: torch.Tensor) -> bool:
        """With two ranks one shot moves no more; few rows, or short ones, save less than the second wait."""
        long = x.shape[1] * x.element_size() > self.peers.row_bytes // 2
        return long and self.peers.size > 2 and x.shape[0] >= TWO_SHOT_ROWS


class _FreshStore(Store):
    """A store in which the exchanges of a group are numbered from 0.

    torch numbers a process's exchanges through symmetric memory one after the other, over all groups, and
    puts the number into the keys. Rank 0 may have had groups before, of which a new worker knows nothing.
    """

    def __init__(self, store: TCPStore) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _renumbered(self, key: str) -> str:
        exchange, _, rank = key.rpartition("/")
        return f"{self._numbers.setdefault(exchange, len(self._numbers))}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._renumbered(key))

    def wait(self, keys: list[str], timeout: timedelta = CONNECT_TIMEOUT) -> None:
        self._store.wait([self._renumbered(key) for key in keys], CONNECT_TIMEOUT)


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


def _nccl(store: Store, rank: int, size: int) -> Backend:
    # Else NCCL serves its state at a fixed port, 28028, and at one more, until the process ends.
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")
    return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


def _gloo(store: Store, rank: int, size: int) -> Backend:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST)]
    options._timeout = CONNECT_TIMEOUT
    group = gloo(store, rank, size, options)
    group._set_default_timeout(timedelta(days=1))  # a rank that dies is noticed otherwise, and at once
    return group


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
