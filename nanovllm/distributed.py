"""TPGroup: the ranks that share one model, and the collectives that they need.

The only module that speaks to torch.distributed. It starts no process, reads no environment variable, and
touches no default process group: every engine has a group of its own.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore, _SymmetricMemory

from nanovllm.device import Device

logger = logging.getLogger("nanovllm")

Backend = Any  # ProcessGroupNCCL or ProcessGroupGloo: torch's stubs do not know their collectives

CONNECT_TIMEOUT = timedelta(seconds=60)  # for ranks that have all said that they are ready
HOST = "127.0.0.1"
RELEASE_SECONDS = 5.0  # how long to help kernels that wait for dead ranks; each needs some microseconds


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
        self._symmetric: SymmetricBuffer | None = None
        self._rendezvous: Rendezvous | None = None

    @classmethod
    def connect(cls, rank: int, size: int, device: Device, rendezvous: Rendezvous) -> TPGroup:
        """Meet the other ranks at `rendezvous` and return the group, over NCCL on GPUs and gloo on a CPU.

        Blocks until all ranks are here, a minute at most.
        """
        device.make_current()
        group = cls(rank, size, (_nccl if device.is_cuda else _gloo)(rendezvous.store, rank, size))
        group._rendezvous = rendezvous
        group.all_reduce(torch.zeros(1, device=device.torch))  # NCCL connects at the first call
        device.synchronize()
        return group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over the ranks, on each of them; `x` may be overwritten."""
        if self.size == 1:
            return x
        if self._symmetric is not None and self._symmetric.takes(x):
            return self._symmetric.all_reduce(x)
        options = dist.AllreduceOptions()
        options.asyncOp = False  # on the current stream, which is what a CUDA graph captures best
        _wait(self._group().allreduce([x], options))
        return x

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

    def make_symmetric_buffer(self, numel: int, dtype: torch.dtype, device: Device) -> None:
        """Let messages of up to `numel` elements go through memory that all GPUs of the group can read.

        A collective call. Where the GPUs cannot read each other's memory all messages go through NCCL.
        """
        if self._process_group is None or not device.is_cuda:
            return
        assert self._rendezvous is not None
        self._symmetric = SymmetricBuffer.make(self, self._rendezvous, numel, dtype, device)

    def abort(self) -> None:
        """Let go of the other ranks, whether they live or not; whatever waits for them ends, with garbage.

        Any thread may call this, also while another one waits in a collective; a second call does nothing.
        """
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            process_group.abort()
        if self._symmetric is not None:
            self._symmetric.release_waiters()

    def close(self) -> None:
        """Leave the group, on which nothing may be waiting any more, and free its memory and its port."""
        self._symmetric = None
        self.abort()
        self._rendezvous = None

    def _group(self) -> Backend:
        if self._process_group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group to communicate through")
        return self._process_group


class SymmetricBuffer:
    """Memory that every GPU of the group can read: small messages are summed in one kernel, one shot.

    Each rank copies its message into its own buffer, waits until all have, and adds up all buffers in rank
    order, so that all ranks get the same bits. The kernel is torch's, from its symmetric memory.
    """

    def __init__(
        self, buffer: torch.Tensor, handle: Any, device: Device, rank: int, size: int, group_name: str
    ) -> None:
        self._buffer = buffer
        self._handle = handle
        self._device = device
        self._rank = rank
        self._size = size
        self._group_name = group_name

    @classmethod
    def make(
        cls, group: TPGroup, rendezvous: Rendezvous, numel: int, dtype: torch.dtype, device: Device
    ) -> SymmetricBuffer | None:
        """Allocate and exchange the buffers: None on all ranks if any cannot."""
        made = None
        try:
            # torch keeps the name and the store for the life of the process, so the name must be new, and
            # the store not the one that holds the port open.
            if group.rank == 0:
                rendezvous.store.set("symmetric", f"nanovllm-{uuid4().hex}")
            name = rendezvous.store.get("symmetric").decode()
            _SymmetricMemory.set_group_info(name, group.rank, group.size, Rendezvous(rendezvous.port).store)
            buffer = _SymmetricMemory.empty_strided_p2p((numel,), (1,), dtype, device.torch, name)
            handle = _SymmetricMemory.rendezvous(buffer, name)
            made = cls(buffer, handle, device, group.rank, group.size, name)
            made.all_reduce(torch.zeros(64, dtype=dtype, device=device.torch))
            device.synchronize()
        except RuntimeError as error:
            logger.info("symmetric memory is not available (%s); all-reduce goes through NCCL", error)
        everywhere = group.all_reduce(torch.tensor([float(made is not None)], device=device.torch))
        return made if int(everywhere.item()) == group.size else None

    def takes(self, x: torch.Tensor) -> bool:
        """Whether a message fits the buffer and the kernel, which moves 16 bytes at a time."""
        fits = x.numel() <= self._buffer.numel() and x.dtype == self._buffer.dtype
        return fits and x.is_contiguous() and x.nbytes % 16 == 0 and x.data_ptr() % 16 == 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over the ranks in a new tensor."""
        buffer = self._buffer[: x.numel()].view_as(x)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", self._group_name)

    def release_waiters(self) -> None:
        """Let kernels that wait for dead ranks go on: give every signal that they could wait for.

        The kernel takes signals (1 to 0) from its own pad, and puts them (0 to 1) into those of the others.
        """
        pads = [self._handle.get_signal_pad(rank) for rank in range(self._size)]

        def give_signals() -> None:
            for rank, pad in enumerate(pads):
                pad.fill_(1 if rank == self._rank else 0)

        self._device.repeat_while_busy(give_signals, RELEASE_SECONDS)


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


def _nccl(store: Store, rank: int, size: int) -> Backend:
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
