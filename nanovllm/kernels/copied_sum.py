"""Sums over GPUs of many rows, with residual add and RMSNorm, brought by copy engines while kernels compute.

Each rank sums, adds and normalises a part of the rows, and sends it to all. Owns the rooms for that, at the
end of a buffer that others allocate and exchange, and the kernel that adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanovllm.device import Device
from nanovllm.kernels.all_reduce import all_reduce_add_rms_norm_reference
from nanovllm.kernels.compat import await_inputs, jit, launch_early, tl, triton
from nanovllm.kernels.rms_norm import normalised, rms_norm

CALLS = 4096  # numbers of calls, which then begin anew
_FLAGS = (2, 8)  # int32 at the very end of the buffer: of each rank, of 8 at most; for parts, and for results


class Arrival(NamedTuple):
    """How rank `rank` sees that all copies of a call have come."""

    rank: int
    flags: torch.Tensor  # [size] int32: where each rank puts the call's number when all it sends is here
    aborted: torch.Tensor  # as in `Peers`
    call: int  # the call's number, modulo CALLS


@jit("flags_ptr", "call")
def _await(
    flags_ptr: tl.tensor,
    aborted_ptr: tl.tensor,
    call: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CALLS: tl.constexpr,
) -> None:
    """Wait for the others' flags, which only grow, modulo CALLS, and are a few calls ahead or behind."""
    ranks = tl.arange(0, SIZE)
    late = (tl.load(flags_ptr + ranks, volatile=True) - call + CALLS) % CALLS >= CALLS // 2
    while (tl.sum((late & (ranks != RANK)).to(tl.int32)) > 0) & (tl.load(aborted_ptr, volatile=True) == 0):
        late = (tl.load(flags_ptr + ranks, volatile=True) - call + CALLS) % CALLS >= CALLS // 2
    tl.debug_barrier()  # nothing of the rows is read before


def await_copies_triton(arrival: Arrival) -> None:
    """Let whatever is queued from now on begin when the copies of `arrival` have come."""
    rank, flags, aborted, call = arrival
    _await[(1,)](flags, aborted, call, RANK=rank, SIZE=len(flags), CALLS=CALLS, num_warps=1)


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
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    x = tl.load(x_ptr + cells, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    _await(flags_ptr, aborted_ptr, call, RANK, SIZE, CALLS)
    total = tl.zeros((N_PADDED,), tl.float32)
    for rank in tl.static_range(SIZE):  # in this order, whoever sums
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
    arrival: Arrival,
    out: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """Write `add_rms_norm` of the sum over the ranks of `x` [T, N] to `out` and `total`, [T, N] each.

    slots: [size - 1, at least T, N], into which the others' rows come, of the ranks after this one in order.
    """
    (rows, n), (rank, flags, aborted, call) = x.shape, arrival
    if rows == 0:
        return
    assert all(tensor.is_contiguous() for tensor in (x, residual, slots, out, total))
    assert x.shape == residual.shape == out.shape == total.shape and rows <= slots.shape[1]
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


def copied_sum_add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    slots: torch.Tensor,
    arrival: Arrival,
    out: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """What `copied_sum_add_rms_norm_triton` writes when all copies have come, in plain torch."""
    assert x.shape == residual.shape == out.shape == total.shape
    size, rank = len(arrival.flags), arrival.rank
    parts = [x if other == rank else slots[(other - rank - 1) % size, : len(x)] for other in range(size)]
    normed, summed = all_reduce_add_rms_norm_reference(parts, residual, weight, eps)
    out.copy_(normed)
    total.copy_(summed)


@dataclass(frozen=True, slots=True, eq=False)
class PendingSum:
    """`add_rms_norm` of a sum over the ranks, under way beside whatever is computed next."""

    finish: Callable[[], tuple[torch.Tensor, torch.Tensor]]  # waits for it
    advance: Callable[[], None] = lambda: None  # half way there: sums what came and sends it on, if need be


class PeerCopies:
    """Rooms that calls take in turn, and flags, at the end of a buffer that every rank can write to.

    Reduce-scatter and all-gather with the norm between, as in Megatron-LM's sequence parallelism (Korthikanti
    et al., 2022): a part of the rows goes to each rank, which keeps their sums, and what it makes of them to
    all. From the first sum to one that is wanted whole, no rank has all of the residual stream.

    Two sums are under way at most, and each has its rooms. A rank sends parts of the second next sum when it
    has this one's results, for which the others had read their parts; and results of the second next when it
    has the others' parts of it, which they sent after using this one's results.
    """

    SETS = 2

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

        parts, results = self._shapes(max_rows, n, size)
        self._parts = of_all(parts, buffer.dtype, start)
        self._results = of_all(results, buffer.dtype, start + math.prod(parts))
        self._flags = of_all(_FLAGS, torch.int32, buffer.numel() * itemsize // 4 - math.prod(_FLAGS))
        self._flags[rank].fill_(CALLS - 1)

    @classmethod
    def _shapes(cls, max_rows: int, n: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (cls.SETS, size - 1, -(-max_rows // size), n), (cls.SETS, max_rows, n)

    @classmethod
    def numel(cls, max_rows: int, n: int, size: int, itemsize: int) -> int:
        """How many elements of `itemsize` bytes this takes of the buffer."""
        rooms = sum(math.prod(shape) for shape in cls._shapes(max_rows, n, size))
        return rooms + math.prod(_FLAGS) * 4 // itemsize

    def fits(self, x: torch.Tensor) -> bool:
        """Whether there is room for rows `x` [T, n]."""
        return x.shape[0] <= self._max_rows and x.shape[1] == self._n and x.dtype == self._parts[0].dtype

    def start(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, whole: bool
    ) -> PendingSum:
        """As `TPGroup.start_sum`."""
        rank, size, rows = self._rank, len(self._parts), len(x)
        turn, call = self._call % self.SETS, self._call % CALLS
        self._call += 1

        def part(peer: int) -> slice:
            """The rows that `peer` sums."""
            return slice(rows * peer // size, rows * (peer + 1) // size)

        flags = self._flags[rank][:, :size]
        arrivals = [Arrival(rank, flags[shot], self._aborted, call) for shot in range(2)]
        results = self._results[rank][turn, :rows]
        own = results[part(rank)]
        mine = residual if len(residual) < rows else residual[part(rank)]
        other = torch.empty_like(own)
        normed, total = (other, own) if whole else (own, other)
        self._send(0, call, lambda peer: (self._parts[peer][turn, (rank - peer - 1) % size], x[part(peer)]))
        advanced = False

        def advance() -> None:
            nonlocal advanced
            if not advanced:
                slots = self._parts[rank][turn]
                inputs = (x[part(rank)], mine, weight, eps, slots, arrivals[0])
                copied_sum_add_rms_norm_triton(*inputs, normed, total)
                self._send(1, call, lambda peer: (self._results[peer][turn, part(rank)], own))
            advanced = True

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            advance()
            # Who sent results had got its part of x: when all have come, the memory of x may be another's.
            await_copies_triton(arrivals[1])
            return (rms_norm(results, weight, eps), results) if whole else (results, total)

        return PendingSum(finish, advance)

    def _send(self, shot: int, call: int, route: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin to copy to each peer, to the place that `route` names, the rows it names; then the flag."""
        rank, size = self._rank, len(self._parts)

        def copy() -> None:
            for step in range(1, size):
                peer = (rank + step) % size
                place, rows = route(peer)
                place[: len(rows)].copy_(rows, non_blocking=True)
                flag = self._flags[peer][shot, rank : rank + 1]
                flag.copy_(self._numbers[call : call + 1], non_blocking=True)

        self._device.start_beside(self._stream, copy)
