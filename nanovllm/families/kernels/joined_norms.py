"""Norms of Gemma 4 that read or make the same row, in one kernel each. Owns no weight.

The bits are those of the norms and sums one by one: each result is rounded to the dtype of the rows.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import (
    await_inputs,
    by_device,
    jit,
    next_power_of_2,
    pdl_options,
    row_warps,
    tl,
)
from nanovllm.kernels.rms_norm import normalised, rms_norm


@jit()
def _row(ptr: tl.tensor, stride: int, columns: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """This program's row, in float32."""
    return tl.load(ptr + tl.program_id(0).to(tl.int64) * stride + columns, mask=mask, other=0.0).to(
        tl.float32
    )


@jit()
def _weight(ptr: tl.tensor, columns: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(ptr + columns, mask=mask, other=0.0).to(tl.float32)


@jit()
def _two_norms_kernel(
    x_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    out_ptr: tl.tensor,
    other_ptr: tl.tensor,
    x_stride: int,
    eps: float,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row: its norm with each of two weights, to `out_ptr` and `other_ptr`."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    first, second = _weight(first_ptr, columns, mask), _weight(second_ptr, columns, mask)
    await_inputs(USE_PDL)
    x = _row(x_ptr, x_stride, columns, mask)
    cells = tl.program_id(0).to(tl.int64) * N + columns
    tl.store(out_ptr + cells, normalised(x, first, eps, N, dtype), mask=mask)
    tl.store(other_ptr + cells, normalised(x, second, eps, N, dtype), mask=mask)


@jit()
def _sum_of_norms_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_weight_ptr: tl.tensor,
    y_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: int,
    y_stride: int,
    eps: float,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row: norm(x) + norm(y)."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    x_weight, y_weight = _weight(x_weight_ptr, columns, mask), _weight(y_weight_ptr, columns, mask)
    await_inputs(USE_PDL)
    x = normalised(_row(x_ptr, x_stride, columns, mask), x_weight, eps, N, dtype)
    y = normalised(_row(y_ptr, y_stride, columns, mask), y_weight, eps, N, dtype)
    total = (x.to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * N + columns, total, mask=mask)


@jit()
def _added_norm_kernel(
    x_ptr: tl.tensor,
    total_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scalar_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: int,
    total_stride: int,
    eps: float,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row: (total + norm(x)) * scalar."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    weight, scalar = _weight(weight_ptr, columns, mask), tl.load(scalar_ptr).to(tl.float32)
    await_inputs(USE_PDL)
    normed = normalised(_row(x_ptr, x_stride, columns, mask), weight, eps, N, dtype)
    total = (_row(total_ptr, total_stride, columns, mask) + normed.to(tl.float32)).to(dtype)
    result = (total.to(tl.float32) * scalar).to(dtype)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * N + columns, result, mask=mask)


def _options(x: torch.Tensor) -> dict[str, int | bool]:
    """Launch options and constants for rows x [T, N]."""
    assert x.stride(1) == 1
    padded = next_power_of_2(x.shape[1])
    return {"N": x.shape[1], "N_PADDED": padded, "num_warps": row_warps(padded), **pdl_options(x)}


def two_norms_triton(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rms_norm(x, first, eps) and rms_norm(x, second, eps). x: [T, N], weights: [N], of any dtype."""
    out, other = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    if len(x):
        _two_norms_kernel[(len(x),)](x, first, second, out, other, x.stride(0), eps, **_options(x))
    return out, other


def sum_of_norms_triton(
    x: torch.Tensor, y: torch.Tensor, x_weight: torch.Tensor, y_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return rms_norm(x, x_weight, eps) + rms_norm(y, y_weight, eps). x, y: [T, N] of one dtype."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if len(x):
        assert y.stride(1) == 1 and y.dtype == x.dtype
        _sum_of_norms_kernel[(len(x),)](
            x, y, x_weight, y_weight, out, x.stride(0), y.stride(0), eps, **_options(x)
        )
    return out


def added_norm_triton(
    x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, scalar: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return (total + rms_norm(x, weight, eps)) * scalar. x, total: [T, N] of one dtype, scalar: one element
    of that dtype."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if len(x):
        assert total.stride(1) == 1 and total.dtype == x.dtype == scalar.dtype
        _added_norm_kernel[(len(x),)](
            x, total, weight, scalar, out, x.stride(0), total.stride(0), eps, **_options(x)
        )
    return out


def two_norms_reference(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`two_norms`, one by one."""
    return rms_norm(x, first, eps), rms_norm(x, second, eps)


def sum_of_norms_reference(
    x: torch.Tensor, y: torch.Tensor, x_weight: torch.Tensor, y_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`sum_of_norms`, one by one."""
    return rms_norm(x, x_weight, eps) + rms_norm(y, y_weight, eps)


def added_norm_reference(
    x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, scalar: torch.Tensor, eps: float
) -> torch.Tensor:
    """`added_norm`, one by one."""
    return (total + rms_norm(x, weight, eps)) * scalar


two_norms = by_device(two_norms_triton, two_norms_reference)
sum_of_norms = by_device(sum_of_norms_triton, sum_of_norms_reference)
added_norm = by_device(added_norm_triton, added_norm_reference)
