"""TPGroup: the ranks that share one model, and their collectives.

It starts no process and does not use the default process group: every engine has its own group.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from nanovllm.attention.base import AttentionColumns
from nanovllm.batch import Batch
from nanovllm.device import Device
from nanovllm.kernels.compat import HAS_TRITON
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.layers.stream import AnyStream, Group, Step
from nanovllm.parallel.halves import Half, begin, halves, most_whole, overlaps
from nanovllm.parallel.peer_memory import ExchangedRows, PeerMemory, PeerMemorySizes, PendingSum
from nanovllm.parallel.rendezvous import Backend, Rendezvous, gloo, nccl, nccl_settings
from nanovllm.quantization.base import Normed


class TPGroup(Group):
    """Rank `rank` of `size` tensor-parallel ranks. With one rank every collective is the identity.

    Without a `process_group`, a group of several ranks only defines which shard a layer owns. Collectives
    then raise RuntimeError.
    """

    def __init__(self, rank: int = 0, size: int = 1, process_group: Backend | None = None) -> None:
        super().__init__(rank, size)
        self._process_group = process_group
        self._sums: dict[object, dist.Work] = {}  # those of `start_sum` in progress; see `_wait`
        self._peer_memory: PeerMemory | None = None
        self._rendezvous: Rendezvous | None = None

    @classmethod
    def connect(cls, rank: int, size: int, device: Device, rendezvous: Rendezvous) -> TPGroup:
        """Connect to the other ranks at `rendezvous` and return the group, with NCCL on GPUs, gloo on a CPU.

        Blocks until all ranks are connected.
        """
        device.make_current()
        group = cls(rank, size)
        group._rendezvous = rendezvous
        if device.is_cuda:
            with nccl_settings():
                group._process_group = nccl(rendezvous.plain_store(), rank, size)
                group.all_reduce(torch.zeros(1, device=device.torch))  # NCCL connects at the first call
                device.synchronize()
        else:
            group._process_group = gloo(rendezvous.store, rank, size)
            try:
                group.all_reduce(torch.zeros(1))  # all ranks are here
            except BaseException:
                group.abort()
                raise
            rendezvous.close()
        return group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        peer_memory = self.peer_memory_for(x)
        if peer_memory is not None:
            return peer_memory.all_reduce(x)
        options = dist.AllreduceOptions()
        options.asyncOp = False  # on the current stream, which CUDA graphs capture best
        _wait(self._group().allreduce([x], options))
        return x

    def normed(
        self, term: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> Normed:
        peer_memory = None if residual is None else self.peer_memory_for(term)
        if residual is None or peer_memory is None:
            return super().normed(term, residual, weight, eps)
        return Normed.computed(*peer_memory.all_reduce_add_rms_norm(term, residual, weight, eps))

    def split(self, batch: Batch, columns: AttentionColumns[np.ndarray]) -> tuple[Half, Half] | None:
        return halves(batch, columns) if overlaps(batch, self.size) else None

    def most_whole(self, max_tokens: int) -> int:
        return most_whole(max_tokens, self.size)

    def begin(self, embedded: torch.Tensor, step: Step) -> AnyStream:
        return begin(embedded, step, self.start_sum)

    def start_sum(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, whole: bool
    ) -> PendingSum:
        """Start `add_rms_norm` of the sum of `x` [T, n] over the ranks; `x` must not be used afterwards.

        Without `whole`, the second result may have only some of its rows, and can only be the residual of
        another `start_sum`. At most two sums may be in progress, and all ranks must start, advance and finish
        them in the same order. Queue all uses of both results before you start the second sum after this one.
        """
        copies = None if self._peer_memory is None else self._peer_memory.copies
        if copies is not None and copies.fits(x):
            return copies.start(x, residual, weight, eps, whole)
        options = dist.AllreduceOptions()
        options.asyncOp = True
        key = object()
        self._sums[key] = self._group().allreduce([x], options)

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            _wait(self._sums.pop(key, None))
            return add_rms_norm(x, residual, weight, eps)

        return PendingSum(finish)

    def whole_rows(self, x: torch.Tensor, width: int) -> tuple[slice, torch.Tensor]:
        """As in `Group`. With peer memory each rank gets a share of the rows, valid until `join_rows`; else
        rank 0 gets all rows."""
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
        if self.size == 1:
            return ids
        if (exchanged := self._exchanged(len(logits), logits.dtype)) is not None:
            return exchanged.join(ids, mine, len(logits))
        if self.rank:
            ids = ids.new_empty(len(logits))
        _wait(self._group().broadcast(ids, 0))
        return ids

    def join_columns(self, x: torch.Tensor, mine: slice, logits: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or not self.exchanges_rows(len(logits), logits.dtype):
            return x
        whole = x.new_zeros(len(logits), x.shape[1])
        whole[mine] = x
        return self.all_reduce(whole)

    def exchanges_rows(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether `whole_rows` of `rows` rows needs neither NCCL nor gloo, so a CUDA graph may capture it."""
        return self.size == 1 or self._exchanged(rows, dtype) is not None

    def _exchanged(self, rows: int, dtype: torch.dtype) -> ExchangedRows | None:
        exchanged = None if self._peer_memory is None else self._peer_memory.logits
        return exchanged if exchanged is not None and exchanged.fits(rows, dtype) else None

    def make_peer_memory(self, sizes: PeerMemorySizes, device: Device) -> None:
        """Use peer memory for everything that `sizes` allows: memory that all GPUs of the group share.

        It also serves sums of shorter rows, of any float dtype of 16 or 32 bits. A collective call. If the
        GPUs cannot share memory, and on a CPU, everything uses the process group.
        """
        power_of_2 = self.size & (self.size - 1) == 0
        if self._rendezvous is not None and device.is_cuda and power_of_2 and HAS_TRITON:
            made = PeerMemory.make(self.rank, self.size, self._rendezvous, sizes, device)
            # This waits for all ranks, so every rank's buffers are empty before any rank writes to them.
            everywhere = self.all_reduce(torch.tensor([float(made is not None)], device=device.torch))
            self._peer_memory = made if int(everywhere.item()) == self.size else None

    def peer_memory_for(self, x: torch.Tensor) -> PeerMemory | None:
        """The peer memory if it can sum `x` over the ranks, else None."""
        if self._peer_memory is None or x.dim() != 2 or not x.is_contiguous():
            return None
        return self._peer_memory if self._peer_memory.fits(len(x), x.shape[1], x.dtype) else None

    def abort(self) -> None:
        """Disconnect from the other ranks, alive or dead; waiting operations end, with invalid results.

        Any thread may call this, even while another thread waits in a collective. A second call does nothing.
        """
        if self._peer_memory is not None:
            self._peer_memory.release_waiters()  # first: NCCL's abort waits for the whole device
        process_group, self._process_group = self._process_group, None
        self._sums.clear()
        if process_group is not None:
            process_group.abort()

    def close(self) -> None:
        """As in `Group`; the rendezvous closes too."""
        self._peer_memory = None
        self.abort()
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.close()

    def _group(self) -> Backend:
        if self._process_group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group to communicate through")
        return self._process_group


def _wait(work: dist.Work | None) -> None:
    """Wait for an operation. An error's traceback refers to this frame, and gloo's port is open as long as
    anything refers to an operation: so nothing but the group does.
    """
    try:
        if work is not None:
            work.wait()
    finally:
        del work
