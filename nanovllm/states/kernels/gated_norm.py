"""The norm of a head's output, and after it the gate silu(z) (Gated DeltaNet's; Mamba-2 gates first)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import await_inputs, by_device, jit, next_power_of_2, pdl_options, tl, wide

_TILE = 2048  # elements of a program; not measured


@jit("num_rows")
def _gated_norm_kernel(
    x_ptr: tl.tensor,
    z_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    x_stride: int,
    z_stride: int,
    eps: float,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program for ROWS heads of tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, N_PADDED)
    mask = (row < num_rows)[:, None] & (columns < N)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    await_inputs(USE_PDL)
    token = (row // HEADS).to(tl.int64)
    inner = (row % HEADS)[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + token[:, None] * x_stride + inner, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token[:, None] * z_stride + inner, mask=mask, other=0.0).to(tl.float32)
    variance = tl.sum(x * x, axis=1) / N
    normed = (x * tl.rsqrt(variance + eps)[:, None]).to(dtype).to(tl.float32)
    weighted = (normed * weight[None, :]).to(dtype).to(tl.float32)
    gate = z / (1.0 + tl.exp(-z))
    tl.store(out_ptr + token[:, None] * (HEADS * N) + inner, (weighted * gate).to(dtype), mask=mask)


def check_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> None:
    """ValueError for shapes or dtypes that do not fit each other."""
    if x.ndim != 3 or x.shape != z.shape or weight.shape != x.shape[2:]:
        raise ValueError(
            f"x and z are [T, heads, N] and weight [N], but they have {[*x.shape]}, {[*z.shape]} and "
            f"{[*weight.shape]}"
        )
    if x.dtype != z.dtype or x.dtype != weight.dtype:
        raise ValueError(f"x, z and weight have the dtypes {x.dtype}, {z.dtype}, {weight.dtype}; use one")


def gated_norm_triton(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x) * weight * silu(z) over the last dimension: a new contiguous tensor like x.

    x, z: [T, heads, N], of one dtype, each token's heads contiguous. weight: [N], of this dtype, the same for
    all heads. The norm is in float32, rounded to the dtype, times weight, rounded, times silu(z) in float32,
    rounded. ValueError for other shapes or dtypes.
    """
    check_norm(x, z, weight)
    tokens, heads, n = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        assert all(each.stride(2) == 1 and (heads == 1 or each.stride(1) == n) for each in (x, z))
        assert weight.is_contiguous()
        padded = next_power_of_2(n)
        rows = max(1, min(_TILE // padded, next_power_of_2(heads)))
        _gated_norm_kernel[(-(-tokens * heads // rows),)](
            x,
            z,
            weight,
            out,
            tokens * heads,
            x.stride(0),
            z.stride(0),
            eps,
            HEADS=heads,
            N=n,
            N_PADDED=padded,
            ROWS=rows,
            num_warps=4,
            **pdl_options(x),
        )
    return out


def gated_norm_reference(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`gated_norm` in plain torch; float64 stays float64."""
    check_norm(x, z, weight)
    x_wide = wide(x)
    normed = (x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (wide(normed * weight) * F.silu(wide(z))).to(x.dtype)


gated_norm = by_device(gated_norm_triton, gated_norm_reference, "gated_norm.gated_norm")
