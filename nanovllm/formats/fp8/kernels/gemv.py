"""Matrix-vector products of a row with an FP8 weight, fused with residual, norm and activation.

As `kernels/gemv.py`: limited by reading the weight. A program quantises its row of x first, as the kernels
for more rows do, so a row's answer depends on its batch only by the order of sums. Owns no weight.
"""

from __future__ import annotations

import torch

from nanovllm.formats.fp8.kernels.matmul import Fp8Weight, fp8_linear_reference
from nanovllm.formats.fp8.kernels.values import quantise_rows_reference
from nanovllm.kernels.activation import gated, silu_and_mul_reference
from nanovllm.kernels.compat import await_inputs, by_device, jit, next_power_of_2, pdl_options, tl, use_triton
from nanovllm.kernels.fp8 import fp8_rounded, fp8_scale
from nanovllm.kernels.rms_norm import normalised, rms_norm_reference

_BLOCK_K = 4096  # as in `kernels/gemv.py`
_TILE = 16384  # bytes of the weight that a program loads at once, for each row
_WARPS = 4


def use_fp8_gemv(x: torch.Tensor) -> bool:
    """Whether `fp8_gemv` is the fastest kernel for these rows. From two rows on `fp8_linear` is."""
    return use_triton(x) and x.dim() == 2 and len(x) == 1


def _blocks(rows: int, k: int, norm: bool, silu: bool, group: int | None) -> tuple[int, int]:
    """Outputs of a program, and inputs that it reads at once: all of them with a norm."""
    block_k = next_power_of_2(k) if norm else min(_BLOCK_K, next_power_of_2(k))
    block_k = max(block_k, group or 1)
    tile = _TILE * next_power_of_2(rows)
    return max(1, tile // (2 * block_k if silu else block_k)), block_k


@jit()
def _weighted(
    acc: tl.tensor,
    scales_ptr: tl.tensor,
    outputs: tl.tensor,
    first: tl.tensor,
    x_scales: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
) -> tl.tensor:
    """Sums of products [outputs, BLOCK_K] from column `first` on, with the scales of their groups."""
    GROUPS: tl.constexpr = acc.shape[1] // GROUP
    TOTAL: tl.constexpr = (K + GROUP - 1) // GROUP
    groups = first // GROUP + tl.arange(0, GROUPS)
    sums = tl.sum(tl.reshape(acc, (acc.shape[0], GROUPS, GROUP)), axis=2)
    scale_ptrs = scales_ptr + (outputs // GROUP_ROWS * TOTAL)[:, None] + groups[None, :]
    mask = (outputs < N)[:, None] & (groups < TOTAL)[None, :]
    return tl.sum(sums * x_scales[None, :] * tl.load(scale_ptrs, mask=mask, other=0.0), axis=1)


@jit()
def _fp8_gemv_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
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
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
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
    x_ptrs = x_ptr + row * x_stride + columns
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * K + columns, mask=mask, other=0.0).to(tl.float32)
        total = x.to(dtype)
        if block == 0:
            tl.store(sum_ptr + row * K + columns, total, mask=mask)
        x = total.to(tl.float32)
    if norm_ptr is not None:
        x = normalised(x, norm, eps, K, dtype).to(tl.float32)
    out = tl.zeros((BLOCK_N,), tl.float32)
    up = out
    if GROUP is None:
        top = tl.max(tl.abs(x), axis=0)
        for start in tl.static_range(BLOCK_K, K, BLOCK_K):
            more = tl.load(x_ptrs + start, mask=start + columns < K, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.max(tl.abs(more), axis=0))
        x_scale, inverse = fp8_scale(top)
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        up_acc = acc
    for start in tl.static_range(0, K, BLOCK_K):
        if start > 0:
            mask = start + columns < K
            x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptrs + start, mask=exists & mask[None, :], other=0.0)
            if GATED:
                up_weight = tl.load(weight_ptrs + N * K + start, mask=exists & mask[None, :], other=0.0)
        if GROUP is None:
            codes = fp8_rounded(x * inverse).to(tl.float32)
            acc += weight.to(tl.float32) * codes[None, :]
            if GATED:
                up_acc += up_weight.to(tl.float32) * codes[None, :]
        else:
            tiles = tl.reshape(x, (BLOCK_K // GROUP, GROUP))
            x_scales, inverses = fp8_scale(tl.max(tl.abs(tiles), axis=1))
            codes = tl.reshape(fp8_rounded(tiles * inverses[:, None]).to(tl.float32), (BLOCK_K,))
            acc = weight.to(tl.float32) * codes[None, :]
            out += _weighted(acc, scales_ptr, outputs, start, x_scales, N, K, GROUP, GROUP_ROWS)
            if GATED:
                acc = up_weight.to(tl.float32) * codes[None, :]
                # The rows of `up` have blocks of their own, because N is a multiple of GROUP_ROWS.
                up_scales_ptr = scales_ptr + N // GROUP_ROWS * ((K + GROUP - 1) // GROUP)
                up += _weighted(acc, up_scales_ptr, outputs, start, x_scales, N, K, GROUP, GROUP_ROWS)
    if GROUP is None:
        out = tl.sum(acc, axis=1) * x_scale * tl.load(scales_ptr + outputs, mask=outputs < N, other=0.0)
        if GATED:
            up_scale = tl.load(scales_ptr + N + outputs, mask=outputs < N, other=0.0)
            up = tl.sum(up_acc, axis=1) * x_scale * up_scale
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + N + outputs, mask=outputs < N, other=0.0).to(tl.float32)
        out = gated(out.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
    tl.store(out_ptr + row * N + outputs, out.to(dtype), mask=outputs < N)


def fp8_gemv_triton(
    x: torch.Tensor,
    weight: Fp8Weight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    silu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x' @ weight^T + bias, total) for few rows x [T, K], in x's dtype.

    As `gemv`, with x' quantised as `quantise_rows` does it, with the weight's groups. With `silu` the two
    halves of a weight in blocks have whole blocks of rows.
    """
    rows, k = x.shape
    codes, scales = weight
    n = len(codes) // 2 if silu else len(codes)
    out = x.new_empty(rows, n)
    total = x if residual is None else torch.empty_like(residual)
    if rows == 0:
        return out, total
    assert x.stride(1) == 1 and codes.is_contiguous() and (residual is None or residual.is_contiguous())
    assert scales.is_contiguous() and not (silu and n % weight.group_rows)
    block_n, block_k = _blocks(rows, k, norm_weight is not None, silu, weight.group)
    _fp8_gemv_kernel[(rows * -(-n // block_n),)](
        x,
        residual,
        norm_weight,
        codes,
        scales,
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
        GROUP=weight.group,
        GROUP_ROWS=weight.group_rows,
        num_warps=_WARPS,
        **pdl_options(x),
    )
    return out, total


def fp8_gemv_reference(
    x: torch.Tensor,
    weight: Fp8Weight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    silu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8_gemv` in plain torch."""
    total = x if residual is None else x + residual
    normed = total if norm_weight is None else rms_norm_reference(total, norm_weight, eps)
    rows = quantise_rows_reference(normed, weight.group)
    out = fp8_linear_reference(rows, weight, bias, dtype=x.dtype)
    return silu_and_mul_reference(out) if silu else out, total


fp8_gemv = by_device(fp8_gemv_triton, fp8_gemv_reference)
