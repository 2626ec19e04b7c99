"""Sum of rows over GPUs that read each other's memory, alone or fused with residual add and RMSNorm.

One shot: every rank reads all ranks' rows. Owns no memory, exchanges no address; `Peers` says where all is.
"""

# A program sums one row. It puts its rank's row where the others can read it, raises a flag at each of them,
# waits until all have raised theirs here, and adds up in rank order, so that all ranks get the same bits.
# Flags hold the number of the call, which only grows; nothing is reset. Nobody waits at the end: calls take
# turns with two places for the rows, and who sees a flag of the next call knows that its rank is done here.

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels.compat import jit, tl, triton
from nanovllm.kernels.rms_norm import add_rms_norm_reference, normalised


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """Where rank `rank` finds what the `size` ranks share; `size` is a power of 2."""

    rank: int
    size: int
    rows: torch.Tensor  # [size] int64: addresses of each rank's room for [max_rows, N] elements
    flags: torch.Tensor  # [size] int64: addresses of each rank's [max_rows, size] int32, 0 at first
    calls: torch.Tensor  # [max_rows] int32, this rank's own: how often each row has been summed
    aborted: torch.Tensor  # [1] int32, this rank's own: not 0 lets all waiting programs go on, with garbage


@jit("peer_rows_ptr", "peer_flags_ptr")
def _all_reduce_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    peer_rows_ptr: tl.tensor,
    peer_flags_ptr: tl.tensor,
    calls_ptr: tl.tensor,
    aborted_ptr: tl.tensor,
    eps: float,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """One program per row."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    own = tl.load(peer_rows_ptr + RANK).to(tl.pointer_type(dtype))
    x = tl.load(x_ptr + row * N + columns, mask=mask, other=0.0)
    tl.store(tl.multiple_of(own, 16) + row * N + columns, x, mask=mask)
    call = tl.load(calls_ptr + row) + 1
    tl.debug_barrier()  # all of the row is stored before any flag is raised
    tl.store(calls_ptr + row, call)
    ranks = tl.arange(0, SIZE)
    peer_flags = tl.load(peer_flags_ptr + ranks).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(peer_flags + row * SIZE + RANK, call, sem="release", scope="sys")
    own_flags = tl.load(peer_flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + row * SIZE + ranks
    seen = tl.min(tl.atomic_add(own_flags, 0, sem="acquire", scope="sys"), axis=0)
    while (seen < call) & (tl.load(aborted_ptr, volatile=True) == 0):
        seen = tl.min(tl.atomic_add(own_flags, 0, sem="acquire", scope="sys"), axis=0)
    tl.debug_barrier()  # no row is read before all flags are seen
    total = tl.zeros((N_PADDED,), tl.float32)
    for rank in tl.static_range(SIZE):
        peer = tl.multiple_of(tl.load(peer_rows_ptr + rank).to(tl.pointer_type(dtype)), 16)
        total += tl.load(peer + row * N + columns, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    out = total.to(dtype)
    if NORM:  # rounded after each step, as on one rank
        residual = tl.load(residual_ptr + row * N + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = (out.to(tl.float32) + residual).to(dtype)
        tl.store(sum_ptr + row * N + columns, rounded, mask=mask)
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        out = normalised(rounded.to(tl.float32), weight, eps, N, dtype)
    tl.store(out_ptr + row * N + columns, out, mask=mask)


def _launch(
    peers: Peers,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor,
    norm: bool,
) -> torch.Tensor:
    rows, n = x.shape
    out = torch.empty_like(x)
    if rows == 0:
        return out
    assert x.is_contiguous() and residual.is_contiguous() and rows <= len(peers.calls)
    padded = triton.next_power_of_2(n)
    _all_reduce_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        peers.rows,
        peers.flags,
        peers.calls,
        peers.aborted,
        eps,
        RANK=peers.rank,
        SIZE=peers.size,
        N=n,
        N_PADDED=padded,
        NORM=norm,
        num_warps=max(1, min(16, padded // 512)),
    )
    return out


def all_reduce_triton(peers: Peers, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of `x` [T, N] over the ranks, rounded once, in a new tensor; every rank calls this.

    x is contiguous and T at most `max_rows`, the same on all ranks. Consecutive calls must alternate between
    two sets of `rows`. One-shot all-reduce as in TensorRT-LLM and vLLM's custom_all_reduce.
    """
    return _launch(peers, x, x, x, 0.0, x, norm=False)


def all_reduce_add_rms_norm_triton(
    peers: Peers, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `all_reduce_triton`, then `add_rms_norm` with the sum as x: both results are new.

    residual: [T, N] contiguous, the same on all ranks; weight: [N]; all of one dtype.
    """
    total = torch.empty_like(x)
    return _launch(peers, x, residual, weight, eps, total, norm=True), total


def all_reduce_reference(xs: list[torch.Tensor]) -> torch.Tensor:
    """What `all_reduce_triton` gives when rank r brings xs[r], in plain torch."""
    return torch.stack([x.float() for x in xs]).sum(0).to(xs[0].dtype)


def all_reduce_add_rms_norm_reference(
    xs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `all_reduce_add_rms_norm_triton` gives when rank r brings xs[r], in plain torch."""
    return add_rms_norm_reference(all_reduce_reference(xs), residual, weight, eps)
