"""Kernels that write activations in FP8: the norm of rows, and SiLU of the halves of rows. Owns no weight."""

from __future__ import annotations

import torch

from nanovllm.formats.fp8.kernels.values import Fp8Rows, padded_row, quantise_rows_reference
from nanovllm.kernels.activation import gated, silu_and_mul_reference
from nanovllm.kernels.compat import await_inputs, by_device, jit, pdl_options, tl
from nanovllm.kernels.fp8 import store_fp8
from nanovllm.kernels.rms_norm import add_rms_norm_reference, launch_add_rms_norm

_ROW_WARPS = 16  # at most, of a program for a whole row


@jit("num_rows")
def _silu_and_mul_fp8_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_rows: int,
    x_stride: int,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row, whose scale needs all of it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    await_inputs(USE_PDL)
    x_ptrs = x_ptr + row * x_stride + columns
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + N, mask=mask, other=0.0).to(tl.float32)
    out = gated(gate, up, x_ptr.dtype.element_ty).to(tl.float32)
    store_fp8(out, codes_ptr, scales_ptr, row, num_rows, N, GROUP)


def silu_and_mul_fp8_triton(x: torch.Tensor, group: int | None = None) -> Fp8Rows:
    """`silu_and_mul`, as `quantise_rows` makes it from the result in x's dtype."""
    rows, n = x.shape[0], x.shape[1] // 2
    out = Fp8Rows.empty(x, n, group)
    if rows:
        assert x.stride(1) == 1
        padded = padded_row(n, group)
        _silu_and_mul_fp8_kernel[(rows,)](
            x,
            out.codes,
            out.scales,
            rows,
            x.stride(0),
            N=n,
            N_PADDED=padded,
            GROUP=group,
            num_warps=max(1, min(_ROW_WARPS, padded // 256)),
            **pdl_options(x),
        )
    return out


def silu_and_mul_fp8_reference(x: torch.Tensor, group: int | None = None) -> Fp8Rows:
    """`silu_and_mul_fp8` in plain torch."""
    return quantise_rows_reference(silu_and_mul_reference(x), group)


def add_rms_norm_fp8_triton(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: int | None = None,
) -> tuple[Fp8Rows, torch.Tensor]:
    """`add_rms_norm`, the norm as `quantise_rows` makes it from the norm in x's dtype."""
    out = Fp8Rows.empty(x, x.shape[1], group)
    return out, launch_add_rms_norm(x, residual, weight, eps, out.codes, out.scales, group)


def add_rms_norm_fp8_reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: int | None = None,
) -> tuple[Fp8Rows, torch.Tensor]:
    """`add_rms_norm_fp8` in plain torch."""
    normed, total = add_rms_norm_reference(x, residual, weight, eps)
    return quantise_rows_reference(normed, group), total


silu_and_mul_fp8 = by_device(silu_and_mul_fp8_triton, silu_and_mul_fp8_reference)
add_rms_norm_fp8 = by_device(add_rms_norm_fp8_triton, add_rms_norm_fp8_reference)
