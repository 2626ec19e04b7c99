"""Root-mean-square normalisation of rows, alone or fused with the residual add before it. Owns no weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import await_inputs, by_device, jit, next_power_of_2, pdl_options, tl


@jit()
def normalised(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, N: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """A row x [padded N] float32, 0 past N, divided by its root mean square, times weight. Both steps are
    rounded to `dtype`."""
    variance = tl.sum(x * x, axis=0) / N
    return ((x * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32) * weight).to(dtype)


def row_warps(padded: int) -> int:
    """Warps of a program for a whole row of `padded` elements: one for every 512, at most 16."""
    return max(1, min(16, padded // 512))


@jit()
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_stride: int,
    residual_stride: int,
    eps: float,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row, so that a row's bits never depend on its neighbours."""
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
    normed = normalised(x, weight, eps, N, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * N + columns, normed, mask=mask)


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual) as new tensors; without a residual, (rms_norm(x), x).

    x, residual: [T, N] of one dtype. The sum is rounded to that dtype before the norm.
    """
    (rows, n), summed = x.shape, x if residual is None else residual
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(out)
    if rows:
        assert x.stride(1) == 1 and summed.stride(1) == 1 and weight.is_contiguous()
        padded = next_power_of_2(n)
        _rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            total,
            x.stride(0),
            summed.stride(0),
            eps,
            N=n,
            N_PADDED=padded,
            num_warps=row_warps(padded),
            **pdl_options(x),
        )
    return out, total


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension.

    x: [..., N] with a contiguous last dimension, N up to 16,384. weight: [N], any float dtype. Statistics are
    in float32; the normalised value is rounded to x's dtype before the weight is applied, as transformers'
    LlamaRMSNorm does.
    """
    return add_rms_norm_triton(x.reshape(-1, x.shape[-1]), None, weight, eps)[0].view(x.shape)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in plain torch."""
    if x.dtype == torch.float32:  # no rounding between the two steps, so they may be one
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return (F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in plain torch."""
    total = x if residual is None else x + residual
    return rms_norm_reference(total, weight, eps), total


rms_norm = by_device(rms_norm_triton, rms_norm_reference)
add_rms_norm = by_device(add_rms_norm_triton, add_rms_norm_reference)
