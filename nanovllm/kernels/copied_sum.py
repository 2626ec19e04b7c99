"""Sum of many rows over GPUs, which their copy engines bring to each other while kernels compute.

Owns the slots for them, at the end of a buffer that others allocate and exchange, and the kernel that adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.device import Device
from nanovllm.kernels.compat import await_inputs, jit, launch_early, tl, triton
from nanovllm.kernels.rms_norm import normalised

CALLS = 4096  # numbers of calls, which then begin anew
_FLAGS = (2, 8)  # int32 at the very end of the buffer: for each shot one of each rank, of 8 at most


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
    """One program per row: waits until all others' copies have come, then adds, and normalises.

    Without slots x itself is what has come. Without a residual the sum over the ranks is all.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    cells = row * N + columns
    ranks = tl.arange(0, SIZE)
    if residual_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    if slots_ptr is not None:
        x = tl.load(x_ptr + cells, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    # A flag only grows, modulo CALLS, and is never more than a few calls ahead or behind.
    late = (tl.load(flags_ptr + ranks, volatile=True) - call + CALLS) % CALLS >= CALLS // 2
    while (tl.sum((late & (ranks != RANK)).to(tl.int32)) > 0) & (tl.load(aborted_ptr, volatile=True) == 0):
        late = (tl.load(flags_ptr + ranks, volatile=True) - call + CALLS) % CALLS >= CALLS // 2
    tl.debug_barrier()  # nothing of the rows is read before
    if slots_ptr is None:
        rounded = tl.load(x_ptr + cells, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        total = tl.zeros((N_PADDED,), tl.float32)
        for rank in tl.static_range(SIZE):  # in this order, so that all ranks get the same bits
            if rank == RANK:
                total += x.to(tl.float32)
            else:  # a receiver has no slot of its own
                slot = slots_ptr + (rank - RANK - 1 + SIZE) % SIZE * slot_size.to(tl.int64)
                total += tl.load(slot + cells, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        rounded = total.to(dtype)
    if residual_ptr is not None:
        rounded = (rounded.to(tl.float32) + residual).to(dtype)
        tl.store(out_ptr + cells, normalised(rounded.to(tl.float32), weight, eps, N, dtype), mask=mask)
    tl.store(sum_ptr + cells, rounded, mask=mask)


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """What copies bring to rank `rank`, and how it sees that all have come."""

    rank: int
    slots: torch.Tensor | None  # [size - 1, at least T, N], of the ranks after this one; None: x is brought
    flags: torch.Tensor  # [size] int32: where each rank puts the call's number when all it sends is here
    aborted: torch.Tensor  # as in `Peers`
    call: int  # the call's number, modulo CALLS


def _launch(
    x: torch.Tensor,
    arrival: Arrival,
    total: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
) -> None:
    (rows, n), slots = x.shape, arrival.slots
    if rows == 0:
        return
    assert x.is_contiguous() and total.is_contiguous() and (residual is None or residual.is_contiguous())
    assert slots is None or (slots.is_contiguous() and rows <= slots.shape[1])
    padded = triton.next_power_of_2(n)
    early = launch_early(x)
    _copied_sum_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        slots,
        arrival.flags,
        arrival.aborted,
        arrival.call,
        0 if slots is None else slots.shape[1] * n,
        eps,
        RANK=arrival.rank,
        SIZE=len(arrival.flags),
        CALLS=CALLS,
        N=n,
        N_PADDED=padded,
        EARLY=early,
        launch_pdl=early,
        num_warps=max(1, min(16, padded // 512)),
    )


def copied_sum_triton(x: torch.Tensor, arrival: Arrival, total: torch.Tensor) -> None:
    """Write the sum over the ranks of `x` [T, N], whose others come into slots, to `total` [T, N]."""
    assert arrival.slots is not None
    _launch(x, arrival, total)


def copied_sum_add_rms_norm_triton(
    x: torch.Tensor, arrival: Arrival, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of the sum over the ranks of `x` [T, N]; without slots x is that sum, being brought."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, arrival, total, residual, weight, eps, out)
    return out, total


AddRMSNorm = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class PendingSum:
    """A sum over the ranks that is under way beside whatever is computed next."""

    add_rms_norm: AddRMSNorm  # of (residual, weight, eps): waits, then does `add_rms_norm` of the sum
    advance: Callable[[], None] = lambda: None  # half way there: sums what came and sends it on, if need be


class PeerCopies:
    """Slots that calls take in turn, and flags, at the end of a buffer that every rank can write to.

    Two ranks send each other all rows. More take two shots, which move less: a part of the rows goes to each
    rank, and the sum of that part from there to all (reduce-scatter and all-gather).

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

        def of_all(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> list[torch.Tensor]:
            return [handle.get_buffer(peer, shape, dtype, start) for peer in range(size)]

        slots, sums = self._shapes(max_rows, n, size)
        self._slots = of_all(slots, buffer.dtype, start)
        self._sums = of_all(sums, buffer.dtype, start + math.prod(slots)) if sums[0] else []
        self._flags = of_all(_FLAGS, torch.int32, buffer.numel() * itemsize // 4 - math.prod(_FLAGS))
        self._flags[rank].fill_(CALLS - 1)

    @classmethod
    def _shapes(cls, max_rows: int, n: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of what is sent to be summed, and of the sums that are sent."""
        if size == 2:
            return (cls.SETS, 1, max_rows, n), (0, max_rows, n)
        return (cls.SETS, size - 1, -(-max_rows // size), n), (cls.SETS, max_rows, n)

    @classmethod
    def numel(cls, max_rows: int, n: int, size: int, itemsize: int) -> int:
        """How many elements of `itemsize` bytes this takes of the buffer."""
        rooms = sum(math.prod(shape) for shape in cls._shapes(max_rows, n, size))
        return rooms + math.prod(_FLAGS) * 4 // itemsize

    def fits(self, x: torch.Tensor) -> bool:
        """Whether there is room for rows `x` [T, n]."""
        return x.shape[0] <= self._max_rows and x.shape[1] == self._n and x.dtype == self._slots[0].dtype

    def start(self, x: torch.Tensor) -> PendingSum:
        """Begin to sum `x` [T, n], contiguous."""
        rank, size, rows = self._rank, len(self._slots), len(x)
        turn, call = self._call % self.SETS, self._call % CALLS
        self._call += 1
        flags = self._flags[rank][:, :size]
        two_shots = size > 2
        advanced = False

        def part(peer: int) -> slice:
            """The rows that `peer` sums."""
            return slice(rows * peer // size, rows * (peer + 1) // size) if two_shots else slice(rows)

        first = Arrival(rank, self._slots[rank][turn], flags[0], self._aborted, call)
        copied = self._send(
            0, call, lambda peer: (self._slots[peer][turn, (rank - peer - 1) % size], x[part(peer)])
        )

        def advance() -> None:
            nonlocal advanced
            if advanced or not two_shots:
                return
            own = self._sums[rank][turn, part(rank)]
            copied_sum_triton(x[part(rank)], first, own)
            self._send(1, call, lambda peer: (self._sums[peer][turn, part(rank)], own))
            advanced = True

        def finish(
            residual: torch.Tensor, weight: torch.Tensor, eps: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            advance()
            brought, arrival = x, first
            if two_shots:
                brought = self._sums[rank][turn, :rows]
                arrival = Arrival(rank, None, flags[1], self._aborted, call)
            results = copied_sum_add_rms_norm_triton(brought, arrival, residual, weight, eps)
            self._device.queue_after(copied)  # x is held until here: then its memory may be another's
            return results

        return PendingSum(finish, advance)

    def _send(
        self, shot: int, call: int, route: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.cuda.Event:
        """Begin to copy to each peer, to the place that `route` names, the rows it names; then the flag."""
        rank, size = self._rank, len(self._slots)

        def copy() -> None:
            for step in range(1, size):
                peer = (rank + step) % size
                place, rows = route(peer)
                place[: len(rows)].copy_(rows, non_blocking=True)
                flag = self._flags[peer][shot, rank : rank + 1]
                flag.copy_(self._numbers[call : call + 1], non_blocking=True)

        return self._device.start_beside(self._stream, copy)
