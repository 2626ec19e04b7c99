"""TPGroup: the ranks that share one model, and the collectives that they need.

It starts no process, and touches no default process group: every engine has a group of its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from nanovllm.device import Device
from nanovllm.distributed.copied_rows import PendingSum
from nanovllm.distributed.exchanged_rows import ExchangedRows
from nanovllm.distributed.peer_memory import PeerMemory, PeerRooms
from nanovllm.distributed.rendezvous import Backend, Rendezvous, gloo, nccl
from nanovllm.kernels.compat import HAS_TRITON
from nanovllm.kernels.rms_norm import add_rms_norm


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
        connect, store = (nccl, rendezvous.store) if device.is_cuda else (gloo, rendezvous.leavable_store)
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

    def whole_rows(self, x: torch.Tensor, width: int) -> tuple[slice, torch.Tensor]:
        """Which rows of logits this rank draws from, and these, [so many, width].

        Rank r brings columns r * n on of all rows, x [S, n]; columns past `width` are padding. Through peer
        memory each rank gets a share of the rows, which hold until `join_rows`; else rank 0 gets all.
        """
        if self.size == 1:
            return slice(0, len(x)), x[:, :width]
        if (exchanged := self._exchanged(len(x), x.dtype)) is not None:
            return exchanged.whole_rows(x)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        _wait(self._group().gather(parts, x, 0))
        if not parts:
            return slice(0, 0), x.new_empty(0, width)
        return slice(0, len(x)), torch.cat(parts, dim=-1)[:, :width]

    def join_rows(self, ids: torch.Tensor, mine: slice, logits: torch.Tensor) -> torch.Tensor:
        """The ids [S] int64 of all rows, on every rank, after `whole_rows` made `mine` of `logits`."""
        if self.size == 1:
            return ids
        if (exchanged := self._exchanged(len(logits), logits.dtype)) is not None:
            return exchanged.join(ids, mine, len(logits))
        if self.rank:
            ids = ids.new_empty(len(logits))
        _wait(self._group().broadcast(ids, 0))
        return ids

    def join_columns(self, x: torch.Tensor, mine: slice, logits: torch.Tensor) -> torch.Tensor:
        """As `join_rows`, for columns [S, C] float32, which rank 0 needs. Integers to 2**24 are exact."""
        if self.size == 1 or not self.exchanges_rows(len(logits), logits.dtype):
            return x
        whole = x.new_zeros(len(logits), x.shape[1])
        whole[mine] = x
        return self.all_reduce(whole)

    def exchanges_rows(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether `whole_rows` of so many rows needs neither NCCL nor gloo, and so may be in a CUDA graph."""
        return self.size == 1 or self._exchanged(rows, dtype) is not None

    def _exchanged(self, rows: int, dtype: torch.dtype) -> ExchangedRows | None:
        exchanged = None if self._peer_memory is None else self._peer_memory.logits
        return exchanged if exchanged is not None and exchanged.fits(rows, dtype) else None

    def make_peer_memory(self, rooms: PeerRooms, device: Device) -> None:
        """Let what there are `rooms` for go through memory that all GPUs of the group can read.

        Sums of shorter rows do too, of any float dtype of 16 or 32 bits. A collective call. Where they
        cannot, and on a CPU, all goes through the process group.
        """
        power_of_2 = self.size & (self.size - 1) == 0
        if self._rendezvous is not None and device.is_cuda and power_of_2 and HAS_TRITON:
            made = PeerMemory.make(self.rank, self.size, self._rendezvous, rooms, device)
            # All ranks' rooms are empty before anyone can fill one, for this waits for all ranks.
            everywhere = self.all_reduce(torch.tensor([float(made is not None)], device=device.torch))
            self._peer_memory = made if int(everywhere.item()) == self.size else None

    def peer_memory_for(self, x: torch.Tensor) -> PeerMemory | None:
        """The memory through which `x` can be summed over the ranks, if it is of such a kind."""
        if self._peer_memory is None or x.dim() != 2 or not x.is_contiguous():
            return None
        return self._peer_memory if self._peer_memory.fits(len(x), x.shape[1], x.dtype) else None

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


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
