"""Rotary position embedding of queries and keys, after an optional RMSNorm per head (Qwen3). Owns no
table."""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import jit, tl, triton, use_triton
from nanovllm.kernels.rms_norm import rms_norm_reference


@jit()
def _round(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The float32 value that `x` keeps when it is stored as `dtype`."""
    return x.to(dtype).to(tl.float32)


@jit()
def _rotate_heads(
    x_ptr: tl.tensor,
    stride_h: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """Normalise and rotate all heads of one token; each half of the heads is one tile."""
    HALF: tl.constexpr = HEAD_DIM // 2
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, HALF_PADDED)[None, :]
    mask = (heads < HEADS) & (dims < HALF)
    x_ptrs = x_ptr + heads * stride_h + dims
    first = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:  # rounded after each of the two factors, as RMSNorm on its own is
        variance = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM
        scale = tl.rsqrt(variance + eps)[:, None]
        weight_first = tl.load(weight_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        weight_second = tl.load(weight_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        first = _round(
            _round(first * scale, out_ptr.dtype.element_ty) * weight_first, out_ptr.dtype.element_ty
        )
        second = _round(
            _round(second * scale, out_ptr.dtype.element_ty) * weight_second, out_ptr.dtype.element_ty
        )
    out_ptrs = out_ptr + heads * HEAD_DIM + dims
    tl.store(out_ptrs, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


@jit("positions_ptr")
def _qk_norm_rope_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    q_stride_t: int,
    q_stride_h: int,
    k_stride_t: int,
    k_stride_h: int,
    eps: float,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_HEADS_PADDED: tl.constexpr,
    K_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
) -> None:
    """One program per token: a row's bits never depend on its neighbours."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    dims = tl.arange(0, HALF_PADDED)[None, :]
    half = HEAD_DIM // 2
    row = cos_sin_ptr + position * HEAD_DIM + dims
    cos = tl.load(row, mask=dims < half, other=0.0)
    sin = tl.load(row + half, mask=dims < half, other=0.0)
    _rotate_heads(
        q_ptr + token * q_stride_t,
        q_stride_h,
        q_weight_ptr,
        q_out_ptr + token * (Q_HEADS * HEAD_DIM),
        cos,
        sin,
        eps,
        Q_HEADS,
        Q_HEADS_PADDED,
        HEAD_DIM,
        HALF_PADDED,
        Q_NORM,
    )
    _rotate_heads(
        k_ptr + token * k_stride_t,
        k_stride_h,
        k_weight_ptr,
        k_out_ptr + token * (K_HEADS * HEAD_DIM),
        cos,
        sin,
        eps,
        K_HEADS,
        K_HEADS_PADDED,
        HEAD_DIM,
        HALF_PADDED,
        K_NORM,
    )


def qk_norm_rope_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`qk_norm_rope` by Triton, queries and keys in one launch."""
    tokens, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    if tokens == 0:
        return q_out, k_out
    assert q.stride(2) == 1 and k.stride(2) == 1
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32 and cos_sin.shape[1] == head_dim
    half_padded = triton.next_power_of_2(head_dim // 2)
    q_heads_padded = triton.next_power_of_2(q_heads)
    _qk_norm_rope_kernel[(tokens,)](
        q,
        k,
        positions,
        cos_sin,
        cos_sin if q_weight is None else q_weight,  # an unused pointer must still be one
        cos_sin if k_weight is None else k_weight,
        q_out,
        k_out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        eps,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        Q_HEADS_PADDED=q_heads_padded,
        K_HEADS_PADDED=triton.next_power_of_2(k_heads),
        HEAD_DIM=head_dim,
        HALF_PADDED=half_padded,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        num_warps=max(1, min(8, q_heads_padded * half_padded // 256)),
    )
    return q_out, k_out


def _rotate_reference(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def qk_norm_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`qk_norm_rope` in plain torch."""
    if q_weight is not None:
        q = rms_norm_reference(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm_reference(k, k_weight, eps)
    rows = cos_sin[positions]
    return _rotate_reference(q, rows), _rotate_reference(k, rows)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each head by its token's position, after RMSNorm over the head where a weight is given.

    q: [T, q_heads, head_dim], k: [T, kv_heads, head_dim], any strides but a contiguous last dimension.
    positions: [T] int32 or int64. cos_sin: [max_positions, head_dim] float32, cosines in the first half and
    sines in the second. q_weight, k_weight: [head_dim] of q's dtype. Returns new contiguous q and k. The
    two halves of a head are the pairs that rotate (the "neox" layout of RoFormer's rotary embedding).
    """
    run = qk_norm_rope_triton if use_triton(q) else qk_norm_rope_reference
    return run(q, k, positions, cos_sin, q_weight, k_weight, eps)
