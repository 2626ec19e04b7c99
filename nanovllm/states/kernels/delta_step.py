"""The gated delta rule for one token of each sequence, in place in a pool of states. Owns no memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.batch import PADDING
from nanovllm.kernels.compat import await_inputs, by_device, jit, next_power_of_2, pdl_options, tl
from nanovllm.states.kernels.delta_heads import (
    L2_EPS,
    DeltaHeads,
    Gates,
    check_delta,
    decay_and_beta,
    gates_reference,
    heads_reference,
)


class TokenTile(NamedTuple):
    """The launch of a step. On an H200 128 rows take 138 us with (64, 4), 147 with (32, 4); 16 rows 21 with
    either, and with a pool of bfloat16 92 for 128 with (32, 2), 101 with (32, 4)."""

    columns: int  # of a head's state in a program, whose rows it has all
    warps: int


STEP_TILE, WIDE_TILE = TokenTile(32, 2), TokenTile(64, 4)
_MANY_ROWS = 64  # from which the wide tile is taken, for a pool of float32


def choose_tile(rows: int, pool_dtype: torch.dtype, invariant: bool = False) -> TokenTile:
    """The tile for so many sequences; invariant: the same for any number, and so the bits."""
    is_wide = (invariant or rows >= _MANY_ROWS) and pool_dtype == torch.float32
    return WIDE_TILE if is_wide else STEP_TILE


@jit("rows_ptr")
def _delta_step_kernel(
    qkv_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    qkv_stride: int,
    a_stride: int,
    b_stride: int,
    pool_stride: int,
    scale: float,
    eps: float,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST_BETA: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program for COLUMNS columns of a head's state of a sequence."""
    parts: tl.constexpr = (DV + COLUMNS - 1) // COLUMNS
    head = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    i = tl.arange(0, DK_PADDED)
    j = part * COLUMNS + tl.arange(0, COLUMNS)
    in_k = i < DK
    in_v = j < DV
    a_log = tl.load(a_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    await_inputs(USE_PDL)
    out_ptrs = out_ptr + index * (V_HEADS * DV) + head * DV + j
    if row >= 0:
        cells = pool_ptr + row * pool_stride + head * (DK * DV) + i[:, None] * DV + j[None, :]
        mask = in_k[:, None] & in_v[None, :]
        state = tl.load(cells, mask=mask, other=0.0).to(tl.float32)
        q_ptrs = qkv_ptr + index * qkv_stride + (head // (V_HEADS // K_HEADS)) * DK + i
        q = tl.load(q_ptrs, mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(q_ptrs + K_HEADS * DK, mask=in_k, other=0.0).to(tl.float32)
        v_ptrs = qkv_ptr + index * qkv_stride + 2 * K_HEADS * DK + head * DV + j
        v = tl.load(v_ptrs, mask=in_v, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + index * a_stride + head)
        b = tl.load(b_ptr + index * b_stride + head)
        g, beta = decay_and_beta(a, b, a_log, dt_bias, MOST_BETA)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + eps)
        state *= tl.exp(g)
        new = beta * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * new[None, :]
        out = tl.sum(state * q[:, None], axis=0)
        tl.store(cells, state.to(pool_ptr.dtype.element_ty), mask=mask)
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_v)
    else:
        nothing = tl.zeros((COLUMNS,), dtype=out_ptr.dtype.element_ty)
        tl.store(out_ptrs, nothing, mask=in_v)


def delta_step_triton(
    qkv: torch.Tensor,
    gates: Gates,
    heads: DeltaHeads,
    pool: torch.Tensor,
    rows: torch.Tensor,
    invariant: bool = False,
    tile: TokenTile | None = None,
) -> torch.Tensor:
    """Return o [S, v_heads, dv] in qkv's dtype, after one token of each of S sequences has changed its state.
    invariant: with bits that do not depend on S.

    qkv: [S, channels], all q, all k, all v, as the convolution returns them: q and k are normed here, and q
    is scaled by dk ** -0.5. pool: [rows, v_heads, dk, dv] float32 or bfloat16, each row contiguous; all is
    computed in float32. rows: [S] int32 or int64, each row of the pool at most once; PADDING changes nothing,
    and its result is 0. `rows` must be an input of the step, not the result of a kernel. ValueError for sizes
    that do not fit.
    """
    check_delta(qkv, gates, heads, pool)
    out = qkv.new_empty(len(qkv), heads.v_heads, heads.v_dim)
    if len(qkv):
        tile = tile or choose_tile(len(qkv), pool.dtype, invariant)
        columns = min(tile.columns, next_power_of_2(heads.v_dim))
        _delta_step_kernel[(heads.v_heads * -(-heads.v_dim // columns), len(qkv))](
            qkv,
            gates.a,
            gates.b,
            gates.a_log,
            gates.dt_bias,
            out,
            pool,
            rows,
            qkv.stride(0),
            gates.a.stride(0),
            gates.b.stride(0),
            pool.stride(0),
            heads.k_dim**-0.5,
            L2_EPS,
            K_HEADS=heads.k_heads,
            V_HEADS=heads.v_heads,
            DK=heads.k_dim,
            DV=heads.v_dim,
            DK_PADDED=next_power_of_2(heads.k_dim),
            COLUMNS=columns,
            MOST_BETA=heads.most_beta,
            num_warps=tile.warps,
            **pdl_options(qkv),
        )
    return out


def delta_step_reference(
    qkv: torch.Tensor,
    gates: Gates,
    heads: DeltaHeads,
    pool: torch.Tensor,
    rows: torch.Tensor,
    invariant: bool = False,
) -> torch.Tensor:
    """`delta_step` in plain torch; float64 stays float64."""
    check_delta(qkv, gates, heads, pool)
    out = qkv.new_zeros(len(qkv), heads.v_heads, heads.v_dim)
    live = (rows != PADDING).nonzero()[:, 0]
    mine = rows[live].long()
    q, k, v = (each.transpose(0, 1)[live] for each in heads_reference(qkv, heads))
    g, beta = (each[live] for each in gates_reference(gates, heads.most_beta))
    state = pool[mine].to(q.dtype) * g.exp()[:, :, None, None]
    new = beta[:, :, None] * (v - torch.einsum("shkv,shk->shv", state, k))
    state += k[:, :, :, None] * new[:, :, None]
    out[live] = torch.einsum("shkv,shk->shv", state, q).to(out.dtype)
    pool[mine] = state.to(pool.dtype)
    return out


delta_step = by_device(delta_step_triton, delta_step_reference, "delta_rule.delta_step")
