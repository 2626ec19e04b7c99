"""The gated activation of the feed-forward block. Owns no weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import await_inputs, jit, launch_early, tl, triton, use_triton

_BLOCK = 1024


@jit()
def gated(gate: tl.tensor, up: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """silu(gate) * up of float32 values, each of the two steps rounded."""
    return ((gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)


@jit()
def _silu_and_mul_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: int,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    await_inputs(EARLY)
    x_ptrs = x_ptr + row * x_stride + columns
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + N, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, gated(gate, up, out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul_triton(x: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` by Triton."""
    rows, n = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    assert x.stride(1) == 1
    grid = (rows, triton.cdiv(n, _BLOCK))
    early = launch_early(x)
    _silu_and_mul_kernel[grid](
        x, out, x.stride(0), N=n, BLOCK=_BLOCK, EARLY=early, launch_pdl=early, num_warps=4
    )
    return out


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` in plain torch."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(x[:, :N]) * x[:, N:], [T, N], for x [T, 2N]; silu is rounded to x's dtype first."""
    return (silu_and_mul_triton if use_triton(x) else silu_and_mul_reference)(x)
