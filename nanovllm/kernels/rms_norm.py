"""Root-mean-square normalisation of rows, alone or fused with the residual add before it. Owns no weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import (
    await_inputs,
    by_device,
    jit,
    next_power_of_2,
    pdl_options,
    row_warps,
    tl,
    wide,
)
from nanovllm.kernels.fp8 import store_fp8


@jit()
def normalised(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, N: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """A row x [padded N] float32, 0 past N, divided by its root mean square, times weight [padded N] float32,
    rounded once to `dtype`."""
    variance = tl.sum(x * x, axis=0) / N
    return (x * tl.rsqrt(variance + eps) * weight).to(dtype)


@jit("num_rows")
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_rows: int,
    x_stride: int,
    residual_stride: int,
    eps: float,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row, so that a row's bits never depend on its neighbours. With `scales_ptr` the result
    is in FP8."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    await_inputs(USE_PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * N + columns, total, mask=mask)
        x = total.to(tl.float32)
    normed = normalised(x, weight, eps, N, x_ptr.dtype.element_ty)
    if scales_ptr is not None:
        store_fp8(normed.to(tl.float32), out_ptr, scales_ptr, row, num_rows, N, GROUP)
    else:
        tl.store(out_ptr + row * N + columns, normed, mask=mask)


def launch_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
    group: int | None = None,
) -> torch.Tensor:
    """Write the norm to `out`; return x + residual. With scales, the norm in x's dtype becomes FP8, with a
    scale for each row, or for each `group` columns of it."""
    (rows, n), summed = x.shape, x if residual is None else residual
    total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows:
        assert x.stride(1) == 1 and summed.stride(1) == 1 and weight.is_contiguous()
        padded = max(next_power_of_2(n), group or 1)
        _rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            scales,
            total,
            rows,
            x.stride(0),
            summed.stride(0),
            eps,
            N=n,
            N_PADDED=padded,
            GROUP=group,
            num_warps=row_warps(padded),
            **pdl_options(x),
        )
    return total


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual) as new tensors; without a residual, (rms_norm(x), x).

    x, residual: [T, N] of one dtype. The sum is rounded to that dtype before the norm.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, launch_add_rms_norm(x, residual, weight, eps, out)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension.

    x: [..., N] with a contiguous last dimension, N up to 16,384. weight: [N], any float dtype. All is in
    float32, and the result is rounded once to x's dtype. transformers rounds before the weight too in some
    families, such as Llama, and in others, such as OLMo 2 and Gemma, does not.
    """
    return add_rms_norm_triton(x.reshape(-1, x.shape[-1]), None, weight, eps)[0].view(x.shape)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in plain torch; float64 stays float64."""
    x_wide = wide(x)
    return F.rms_norm(x_wide, x.shape[-1:], weight.to(x_wide.dtype), eps).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in plain torch."""
    total = x if residual is None else x + residual
    return rms_norm_reference(total, weight, eps), total


rms_norm = by_device(rms_norm_triton, rms_norm_reference, "rms_norm.rms_norm")
add_rms_norm = by_device(add_rms_norm_triton, add_rms_norm_reference, "rms_norm.add_rms_norm")
