"""The sum over ranks of rows that copy engines deliver, with residual add and RMSNorm, and the wait for them.

Owns no memory: `parallel/peer_memory.py` sends the rows and the flags.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.compat import await_inputs, jit, next_power_of_2, pdl_options, row_warps, tl
from nanovllm.kernels.rms_norm import normalised

CALLS = 4096  # call numbers wrap around at this value


class Arrival(NamedTuple):
    """The flags that tell rank `rank` that all copies of a call have arrived."""

    rank: int
    flags: torch.Tensor  # [size] int32: each rank writes the call's number after its copies
    aborted: torch.Tensor  # as in `Peers`
    call: int  # the call's number, modulo CALLS


@jit("flags_ptr", "call")
def _await(
    flags_ptr: tl.tensor,
    aborted_ptr: tl.tensor,
    call: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CALLS: tl.constexpr = CALLS,
) -> None:
    """Wait for the flags of the other ranks. Flags only grow (modulo CALLS) and differ by a few calls."""
    ranks = tl.arange(0, SIZE)
    late = (tl.load(flags_ptr + ranks, volatile=True) - call + CALLS) % CALLS >= CALLS // 2
    while (tl.sum((late & (ranks != RANK)).to(tl.int32)) > 0) & (tl.load(aborted_ptr, volatile=True) == 0):
        late = (tl.load(flags_ptr + ranks, volatile=True) - call + CALLS) % CALLS >= CALLS // 2
    tl.debug_barrier()  # no thread reads the rows before this


def await_copies_triton(arrival: Arrival) -> None:
    """Make kernels queued after this wait until the copies of `arrival` have arrived."""
    rank, flags, aborted, call = arrival
    _await[(1,)](flags, aborted, call, RANK=rank, SIZE=len(flags), num_warps=1)


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
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row: waits for the copies of all other ranks, then adds and normalises."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    cells = row * N + columns
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    await_inputs(USE_PDL)
    x = tl.load(x_ptr + cells, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    _await(flags_ptr, aborted_ptr, call, RANK, SIZE)
    total = tl.zeros((N_PADDED,), tl.float32)
    for rank in tl.static_range(SIZE):  # in rank order on every rank
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

    slots: [size - 1, at least T, N], the received rows of the ranks after this one, in cyclic order.
    """
    (rows, n), (rank, flags, aborted, call) = x.shape, arrival
    if rows == 0:
        return
    assert all(tensor.is_contiguous() for tensor in (x, residual, slots, out, total))
    assert x.shape == residual.shape == out.shape == total.shape and rows <= slots.shape[1]
    padded = next_power_of_2(n)
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
        N=n,
        N_PADDED=padded,
        num_warps=row_warps(padded),
        **pdl_options(x),
    )
