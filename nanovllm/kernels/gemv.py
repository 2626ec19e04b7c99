"""Matrix-vector products of a few rows with a weight, fused with residual, norm and activation.

Such a product is limited by reading its weight, if there are no separate kernels for the norm and the
activation, and enough reads are in flight. Owns no weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.activation import gated, silu_and_mul_reference
from nanovllm.kernels.compat import (
    FEW_ROWS,
    await_inputs,
    by_device,
    jit,
    next_power_of_2,
    pdl_options,
    tl,
    use_triton,
)
from nanovllm.kernels.rms_norm import normalised, rms_norm_reference

# Launch choices, measured on an H200 with one and two rows (docs/log/2026-11-22-techniques.md).
_BLOCK_K = 4096  # most products then load all their weights at once
_TILE = 4096  # elements of the weight that a program loads at once, for each row
_WARPS = 4


def _blocks(rows: int, k: int, norm: bool, silu: bool) -> tuple[int, int]:
    """Outputs of a program, and inputs that it reads at once: all of them with a norm."""
    block_k = next_power_of_2(k) if norm else min(_BLOCK_K, next_power_of_2(k))
    tile = _TILE * next_power_of_2(rows)
    return max(1, tile // (2 * block_k if silu else block_k)), block_k


@jit()
def _gemv_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_stride: int,
    eps: float,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row and BLOCK_N outputs. With a norm, BLOCK_K covers K."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = (tl.program_id(0) % ROWS).to(tl.int64)  # neighbouring programs read the same weights
    block = tl.program_id(0) // ROWS
    outputs = block * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    mask = columns < K
    exists = (outputs < N)[:, None]
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * K + columns[None, :]
    weight = tl.load(weight_ptrs, mask=exists & mask[None, :], other=0.0)
    up_weight = weight
    if GATED:
        up_weight = tl.load(weight_ptrs + N * K, mask=exists & mask[None, :], other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    await_inputs(USE_PDL)  # while the weights are loading
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * K + columns, mask=mask, other=0.0).to(tl.float32)
        total = x.to(dtype)
        if block == 0:
            tl.store(sum_ptr + row * K + columns, total, mask=mask)
        x = total.to(tl.float32)
    if norm_ptr is not None:
        x = normalised(x, norm, eps, K, dtype).to(tl.float32)
    acc = weight.to(tl.float32) * x[None, :]
    up_acc = acc
    if GATED:
        up_acc = up_weight.to(tl.float32) * x[None, :]
    for start in tl.static_range(BLOCK_K, K, BLOCK_K):
        mask = start + columns < K
        x = tl.load(x_ptr + row * x_stride + start + columns, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptrs + start, mask=exists & mask[None, :], other=0.0)
        acc += weight.to(tl.float32) * x[None, :]
        if GATED:
            up_weight = tl.load(weight_ptrs + N * K + start, mask=exists & mask[None, :], other=0.0)
            up_acc += up_weight.to(tl.float32) * x[None, :]
    out = tl.sum(acc, axis=1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_acc, axis=1)
        if bias_ptr is not None:
            up += tl.load(bias_ptr + N + outputs, mask=outputs < N, other=0.0).to(tl.float32)
        out = gated(out.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
    tl.store(out_ptr + row * N + outputs, out.to(dtype), mask=outputs < N)


def gemv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    silu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x' @ weight^T + bias, total) for few rows x [T, K], in x's dtype.

    total: x itself, or with `residual` [T, K] their sum as a new tensor. x': total, or with `norm_weight` [K]
    its `rms_norm`, for K up to 16,384. weight: [N, K] contiguous. bias: [N]. With
    `silu`, `silu_and_mul` is applied to the product. A row's bits do not depend on other rows.
    """
    rows, k = x.shape
    n = len(weight) // 2 if silu else len(weight)
    out = x.new_empty(rows, n)
    total = x if residual is None else torch.empty_like(residual)
    if rows == 0:
        return out, total
    assert x.stride(1) == 1 and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    block_n, block_k = _blocks(rows, k, norm_weight is not None, silu)
    _gemv_kernel[(rows * -(-n // block_n),)](
        x,
        residual,
        norm_weight,
        weight,
        bias,
        out,
        total,
        x.stride(0),
        eps,
        ROWS=rows,
        N=n,
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GATED=silu,
        num_warps=_WARPS,
        **pdl_options(x),
    )
    return out, total


def gemv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    silu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gemv` in plain torch."""
    x = total = x if residual is None else x + residual
    if norm_weight is not None:
        x = rms_norm_reference(total, norm_weight, eps)
    out = F.linear(x, weight, bias)
    return silu_and_mul_reference(out) if silu else out, total


gemv = by_device(gemv_triton, gemv_reference)


def use_gemv(x: torch.Tensor) -> bool:
    """Whether `gemv` is the fastest kernel for these rows."""
    return use_triton(x) and x.dim() == 2 and 0 < x.shape[0] <= FEW_ROWS
