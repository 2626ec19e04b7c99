"""SiLU and multiply, the activation of the MLP. Owns no weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import await_inputs, by_device, jit, next_power_of_2, pdl_options, tl
from nanovllm.kernels.rms_norm import inverse_rms, inverse_rms_reference

# Launch choices, measured on an H200 (docs/log/2026-11-22-techniques.md).
_BLOCK = 1024
_MANY_ROWS = 2048


def _block(rows: int, size: int) -> int:
    """Columns of a program: more if the norm reads many elements (`size`) or if there are many rows."""
    return 4 * _BLOCK if size > 2 * _BLOCK or (size > 1 and rows > _MANY_ROWS) else _BLOCK


@jit()
def gated(gate: tl.tensor, up: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """silu(gate) * up of float32 values; both steps are rounded to `dtype`."""
    return ((gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)


@jit()
def _silu_and_mul_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rms_of_ptr: tl.tensor,
    x_stride: int,
    eps: float,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    await_inputs(USE_PDL)
    x_ptrs = x_ptr + row * x_stride + columns
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + N, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if rms_of_ptr is not None:
        scale = inverse_rms(rms_of_ptr, row, eps, SIZE, SIZE_PADDED)
        gate = (gate * scale).to(dtype).to(tl.float32)
        up = (up * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * N + columns, gated(gate, up, dtype), mask=mask)


def silu_and_mul_triton(
    x: torch.Tensor, rms_of: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """Return silu(x[:, :N]) * x[:, N:], [T, N], for x [T, 2N]; silu is rounded to x's dtype first.

    With `rms_of` [T, M], contiguous, each row of x is first divided by the root mean square of the same row
    of `rms_of`, and rounded.
    """
    rows, n = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    assert x.stride(1) == 1
    size = 1 if rms_of is None else rms_of.shape[1]
    assert rms_of is None or rms_of.is_contiguous()
    block = _block(rows, size)
    _silu_and_mul_kernel[(rows, -(-n // block))](
        x,
        out,
        rms_of,
        x.stride(0),
        eps,
        N=n,
        BLOCK=block,
        SIZE=size,
        SIZE_PADDED=next_power_of_2(size),
        num_warps=4,
        **pdl_options(x),
    )
    return out


def silu_and_mul_reference(
    x: torch.Tensor, rms_of: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """`silu_and_mul` in plain torch."""
    if rms_of is not None:
        x = (x * inverse_rms_reference(rms_of, eps)).to(x.dtype)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


silu_and_mul = by_device(silu_and_mul_triton, silu_and_mul_reference)
