"""Sum of rows over GPUs that write into each other's memory, alone or fused with residual add and RMSNorm.

In one shot or in two. Owns no memory, exchanges no address; `Peers` says where all is.
"""

# A program sums one row. In one shot it puts its rank's row into a slot at every rank, raises a flag at each,
# waits until all have raised theirs here, and adds up in rank order, so that all ranks get the same bits. In
# two, the ranks put the row into slots of its owner alone (row modulo ranks). That one adds up, puts the sum
# where each rank finds it, and raises a flag there: with more than two ranks less moves, for one more wait.
#
# Flags hold the number of the call, which only grows; nothing is reset. Nobody waits at the end: calls take
# turns with two sets of slots, and who sees a flag of the next call knows that its rank is done here. A sum
# is put down only when its reader has sent its row for this call, so it has read the last one.

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels.compat import await_inputs, jit, launch_early, tl, triton
from nanovllm.kernels.rms_norm import add_rms_norm_reference, normalised


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """Where rank `rank` finds what the `size` ranks share; `size` is a power of 2."""

    rank: int
    size: int
    slots: torch.Tensor  # [size] int64: addresses of each rank's room for [size - 1, max_rows, N] elements
    sums: torch.Tensor  # [size] int64: addresses of each rank's room for [max_rows, N]; for two shots only
    flags: torch.Tensor  # [size] int64: addresses of each rank's [max_rows, size] int32, 0 at first
    calls: torch.Tensor  # [max_rows] int32, this rank's own: how often each row has been summed
    aborted: torch.Tensor  # [1] int32, this rank's own: not 0 lets all waiting programs go on, with garbage


@jit()
def _room(addresses_ptr: tl.tensor, rank: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """A pointer to what `rank` has at `addresses_ptr`."""
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(dtype)), 16)


@jit()
def _slot(sender: tl.tensor, receiver: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Which of a receiver's slots is the sender's: it has none of its own."""
    return (sender - receiver - 1 + SIZE) % SIZE


@jit()
def _wait(flags: tl.tensor, awaited: tl.tensor, call: tl.tensor, aborted_ptr: tl.tensor) -> None:
    """Wait until all `awaited` flags have come to `call`: what was written before is then seen."""
    seen = tl.atomic_add(flags, 0, sem="acquire", scope="sys")
    missing = tl.sum((awaited & (seen < call)).to(tl.int32), axis=0)
    while (missing > 0) & (tl.load(aborted_ptr, volatile=True) == 0):
        seen = tl.atomic_add(flags, 0, sem="acquire", scope="sys")
        missing = tl.sum((awaited & (seen < call)).to(tl.int32), axis=0)
    tl.debug_barrier()


@jit()
def sum_of_parts(
    x: tl.tensor,
    slots: tl.tensor,
    slot_size: tl.tensor,
    mask: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """This rank's x and what the others put into its `slots`, added in rank order in float32."""
    total = tl.zeros(x.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            part = slots + _slot(rank, RANK, SIZE) * slot_size
            total += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@jit("slots_ptr", "sums_ptr", "flags_ptr", "max_rows")
def _all_reduce_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    flags_ptr: tl.tensor,
    calls_ptr: tl.tensor,
    aborted_ptr: tl.tensor,
    max_rows: tl.tensor,
    eps: float,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per row."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    ranks = tl.arange(0, SIZE)
    peer_flags = tl.load(flags_ptr + ranks).to(tl.pointer_type(tl.int32)) + row * SIZE + RANK
    own_flags = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + row * SIZE + ranks
    cells = row * N + columns
    own_slots = _room(slots_ptr, RANK, dtype) + cells
    slot_size = max_rows.to(tl.int64) * N
    await_inputs(EARLY)
    x = tl.load(x_ptr + cells, mask=mask, other=0.0)
    call = tl.load(calls_ptr + row) + 1
    total = tl.zeros((N_PADDED,), tl.float32)
    if TWO_SHOT:
        owner = (row % SIZE).to(tl.int32)
        if owner == RANK:
            _wait(own_flags, ranks != RANK, call, aborted_ptr)
            total = sum_of_parts(x, own_slots, slot_size, mask, RANK, SIZE)
            for rank in tl.static_range(SIZE):
                if rank != RANK:
                    tl.store(_room(sums_ptr, rank, dtype) + cells, total.to(dtype), mask=mask)
            tl.debug_barrier()  # all of the sum is stored before any flag is raised
            tl.atomic_xchg(peer_flags, call, mask=ranks != RANK, sem="release", scope="sys")
        else:
            slot = _room(slots_ptr, owner, dtype) + _slot(RANK, owner, SIZE) * slot_size
            tl.store(slot + cells, x, mask=mask)
            tl.debug_barrier()
            tl.atomic_xchg(peer_flags, call, mask=ranks == owner, sem="release", scope="sys")
            _wait(own_flags, ranks == owner, call, aborted_ptr)
            summed = _room(sums_ptr, RANK, dtype) + cells
            total += tl.load(summed, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    else:
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                slot = _room(slots_ptr, rank, dtype) + _slot(RANK, rank, SIZE) * slot_size
                tl.store(slot + cells, x, mask=mask)
        tl.debug_barrier()  # all of the row is stored before any flag is raised
        tl.atomic_xchg(peer_flags, call, mask=ranks != RANK, sem="release", scope="sys")
        _wait(own_flags, ranks != RANK, call, aborted_ptr)
        total = sum_of_parts(x, own_slots, slot_size, mask, RANK, SIZE)
    tl.store(calls_ptr + row, call)
    out = total.to(dtype)
    if NORM:  # rounded after each step, as on one rank
        residual = tl.load(residual_ptr + cells, mask=mask, other=0.0).to(tl.float32)
        rounded = (out.to(tl.float32) + residual).to(dtype)
        tl.store(sum_ptr + cells, rounded, mask=mask)
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        out = normalised(rounded.to(tl.float32), weight, eps, N, dtype)
    tl.store(out_ptr + cells, out, mask=mask)


def _launch(
    peers: Peers,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor,
    two_shot: bool,
    norm: bool,
) -> torch.Tensor:
    rows, n = x.shape
    out = torch.empty_like(x)
    if rows == 0:
        return out
    assert x.is_contiguous() and residual.is_contiguous() and rows <= len(peers.calls)
    padded = triton.next_power_of_2(n)
    early = launch_early(x)
    _all_reduce_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        peers.slots,
        peers.sums,
        peers.flags,
        peers.calls,
        peers.aborted,
        len(peers.calls),
        eps,
        RANK=peers.rank,
        SIZE=peers.size,
        N=n,
        N_PADDED=padded,
        TWO_SHOT=two_shot,
        NORM=norm,
        EARLY=early,
        launch_pdl=early,
        num_warps=max(1, min(16, padded // 512)),
    )
    return out


def all_reduce_triton(peers: Peers, x: torch.Tensor, two_shot: bool = False) -> torch.Tensor:
    """Return the sum of `x` [T, N] over the ranks, rounded once, in a new tensor; every rank calls this.

    x is contiguous and T at most `max_rows`, the same on all ranks. Consecutive calls must alternate between
    two sets of `slots`. One-shot and two-shot all-reduce as in TensorRT-LLM and vLLM's custom_all_reduce.
    """
    return _launch(peers, x, x, x, 0.0, x, two_shot, norm=False)


def all_reduce_add_rms_norm_triton(
    peers: Peers,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    two_shot: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `all_reduce_triton`, then `add_rms_norm` with the sum as x: both results are new.

    residual: [T, N] contiguous, the same on all ranks; weight: [N]; all of one dtype.
    """
    total = torch.empty_like(x)
    return _launch(peers, x, residual, weight, eps, total, two_shot, norm=True), total


def all_reduce_reference(xs: list[torch.Tensor]) -> torch.Tensor:
    """What `all_reduce_triton` gives when rank r brings xs[r], in plain torch."""
    total = torch.zeros_like(xs[0], dtype=torch.float32)
    for x in xs:
        total += x.float()
    return total.to(xs[0].dtype)


def all_reduce_add_rms_norm_reference(
    xs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `all_reduce_add_rms_norm_triton` gives when rank r brings xs[r], in plain torch."""
    return add_rms_norm_reference(all_reduce_reference(xs), residual, weight, eps)
