"""Sum of many rows over GPUs, which their copy engines bring to each other while kernels compute.

Owns the slots for them, at the end of a buffer that others allocate and exchange, and the kernel that adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.device import Device
from nanovllm.kernels.compat import await_inputs, jit, launch_early, tl, triton
from nanovllm.kernels.rms_norm import normalised

CALLS = 4096  # numbers of calls, which then begin anew
_FLAGS = 16  # int32 at the very end of the buffer, of which each rank has one


@jit("flags_ptr", "call")
def _copied_sum_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    flags_ptr: tl.tensor,
    aborted_ptr: tl.tensor,
    call: tl.tensor,
    slot_size: tl.tensor,
    eps: float,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CALLS: tl.constexpr,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per row: waits until all others' copies of it have come, then adds, and normalises."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    cells = row * N + columns
    ranks = tl.arange(0, SIZE)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    x = tl.load(x_ptr + cells, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    # A flag only grows, modulo CALLS, and is never more than a few calls ahead or behind.
    late = (tl.load(flags_ptr + ranks, volatile=True) - call + CALLS) % CALLS >= CALLS // 2
    while (tl.sum((late & (ranks != RANK)).to(tl.int32)) > 0) & (tl.load(aborted_ptr, volatile=True) == 0):
        late = (tl.load(flags_ptr + ranks, volatile=True) - call + CALLS) % CALLS >= CALLS // 2
    tl.debug_barrier()  # nothing of the rows is read before
    total = tl.zeros((N_PADDED,), tl.float32)
    for rank in tl.static_range(SIZE):  # in this order, so that all ranks get the same bits
        if rank == RANK:
            total += x.to(tl.float32)
        else:  # a receiver has no slot of its own
            slot = slots_ptr + (rank - RANK - 1 + SIZE) % SIZE * slot_size.to(tl.int64)
            total += tl.load(slot + cells, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    rounded = (total.to(dtype).to(tl.float32) + residual).to(dtype)
    tl.store(sum_ptr + cells, rounded, mask=mask)
    tl.store(out_ptr + cells, normalised(rounded.to(tl.float32), weight, eps, N, dtype), mask=mask)


def copied_sum_add_rms_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    slots: torch.Tensor,
    flags: torch.Tensor,
    aborted: torch.Tensor,
    rank: int,
    call: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of the sum over the ranks of `x` [T, N], which the others copy into `slots` meanwhile.

    slots: [size - 1, at least T, N], of the ranks after this one in order. flags: [size] int32, where rank r
    puts the call's number modulo CALLS when all its rows are here; `call` is that number. All else as in
    `Peers`.
    """
    rows, n = x.shape
    out, total = torch.empty_like(x), torch.empty_like(x)
    assert x.is_contiguous() and residual.is_contiguous() and slots.is_contiguous() and rows <= slots.shape[1]
    padded = triton.next_power_of_2(n)
    early = launch_early(x)
    _copied_sum_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        slots,
        flags,
        aborted,
        call,
        slots.shape[1] * n,
        eps,
        RANK=rank,
        SIZE=len(flags),
        CALLS=CALLS,
        N=n,
        N_PADDED=padded,
        EARLY=early,
        launch_pdl=early,
        num_warps=max(1, min(16, padded // 512)),
    )
    return out, total


AddRMSNorm = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class PendingSum:
    """A sum over the ranks that is under way beside whatever is computed next."""

    add_rms_norm: AddRMSNorm  # of (residual, weight, eps): waits, then does `add_rms_norm` of the sum


class PeerCopies:
    """Slots that calls take in turn, and flags, at the end of a buffer that every rank can write to.

    Two sums are under way at most, so what comes into a set was begun after its last rows had been used
    everywhere: a rank begins a sum only when it has used the second last one, whose rows the others had sent
    after using the fourth last.
    """

    SETS = 4

    def __init__(
        self,
        rank: int,
        device: Device,
        buffer: torch.Tensor,
        handle: Any,
        aborted: torch.Tensor,
        max_rows: int,
        n: int,
    ) -> None:
        """buffer: this rank's; handle: torch's, of all; aborted: as in `Peers`. Rows are [max_rows, n].

        No rank may begin a sum before all have come here.
        """
        self._rank = rank
        self._max_rows = max_rows
        self._n = n
        self._aborted = aborted
        self._device = device
        self._stream = device.side_stream()
        self._numbers = torch.arange(CALLS, dtype=torch.int32, device=device.torch)
        self._call = 0
        size, itemsize = len(handle.buffer_ptrs), buffer.element_size()
        start = buffer.numel() - self.numel(max_rows, n, size, itemsize)
        shape = (self.SETS, size - 1, max_rows, n)
        flags_start = buffer.numel() * itemsize // 4 - _FLAGS
        self._slots = [handle.get_buffer(peer, shape, buffer.dtype, start) for peer in range(size)]
        self._flags = [handle.get_buffer(peer, (size,), torch.int32, flags_start) for peer in range(size)]
        self._flags[rank].fill_(CALLS - 1)

    @staticmethod
    def numel(max_rows: int, n: int, size: int, itemsize: int) -> int:
        """How many elements of `itemsize` bytes this takes of the buffer."""
        return PeerCopies.SETS * (size - 1) * max_rows * n + _FLAGS * 4 // itemsize

    def fits(self, x: torch.Tensor) -> bool:
        """Whether there is room for rows `x` [T, n]."""
        return x.shape[0] <= self._max_rows and x.shape[1] == self._n and x.dtype == self._slots[0].dtype

    def start(self, x: torch.Tensor) -> PendingSum:
        """Begin to sum `x` [T, n], contiguous."""
        rank, size, rows = self._rank, len(self._slots), len(x)
        turn, call = self._call % self.SETS, self._call % CALLS
        self._call += 1

        def copy() -> None:
            for step in range(1, size):
                peer = (rank + step) % size
                self._slots[peer][turn, (rank - peer - 1) % size, :rows].copy_(x, non_blocking=True)
                self._flags[peer][rank : rank + 1].copy_(self._numbers[call : call + 1], non_blocking=True)

        copied = self._device.start_beside(self._stream, copy)

        def finish(
            residual: torch.Tensor, weight: torch.Tensor, eps: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            slots, flags = self._slots[rank][turn], self._flags[rank]
            results = copied_sum_add_rms_norm_triton(
                x, residual, weight, eps, slots, flags, self._aborted, rank, call
            )
            self._device.queue_after(copied)  # x is held until here: then its memory may be another's
            return results

        return PendingSum(finish)
