"""Rows in FP8 (E4M3) with float32 scales: the format of activations in FP8 products. Owns no weight.

A row has one scale, or one for each 128 columns; it depends on this row alone. The kernels that write
activations quantise them too, with `store_fp8` (`fused.py`); `quantise_rows` is for those that have other
writers.
"""

from __future__ import annotations

from typing import NamedTuple

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
)
from nanovllm.kernels.fp8 import FP8_MAX, LEAST, store_fp8

FP8 = torch.float8_e4m3fn
GROUP = 128  # columns that share a scale, and rows of a weight, in checkpoints quantised in blocks


def group_of(scales: torch.Tensor, rows: int) -> int | None:
    """Columns that share a scale, where scales have so many dimensions of rows, and perhaps one of groups;
    None: all. ValueError for another number of dimensions."""
    if scales.dim() not in (rows, rows + 1):
        raise ValueError(f"scales of FP8 have {rows} or {rows + 1} dimensions here, not {scales.dim()}")
    return None if scales.dim() == rows else GROUP


def rows_of_scale(codes: int, scales: int) -> int:
    """Rows that share a scale, of so many rows of codes and of scales. ValueError for neither 1 nor GROUP."""
    if scales not in (codes, -(-codes // GROUP)):
        raise ValueError(f"{codes} rows of FP8 have as many scales, or one for {GROUP}, not {scales}")
    return 1 if scales == codes else GROUP


class Fp8Rows(NamedTuple):
    """Rows [T, K]: codes * scales."""

    codes: torch.Tensor  # [T, K] float8_e4m3fn
    scales: torch.Tensor  # float32: [T], or [T, ceil(K / GROUP)] with neighbouring rows side by side

    @classmethod
    def empty(cls, x: torch.Tensor, columns: int, group: int | None) -> Fp8Rows:
        """Memory for as many rows as x has."""
        codes = torch.empty(len(x), columns, dtype=FP8, device=x.device)
        shape = (len(x),) if group is None else (-(-columns // group), len(x))
        return cls(codes, torch.empty(shape, dtype=torch.float32, device=x.device).t())

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None: all."""
        return group_of(self.scales, 1)

    def float(self) -> torch.Tensor:
        """The rows in float32."""
        return self.codes.float() * expanded(self.scales, self.codes.shape[1])


def expanded(scales: torch.Tensor, columns: int) -> torch.Tensor:
    """Scales [R] or [R, ceil(columns / GROUP)] as a factor of [R, columns]."""
    if group_of(scales, 1) is None:
        return scales[:, None]
    return scales.repeat_interleave(GROUP, 1)[:, :columns]


def padded_row(n: int, group: int | None) -> int:
    """The elements of a program for a row of `n`."""
    return max(next_power_of_2(n), group or 1)


@jit("num_rows")
def _quantise_kernel(
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
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N_PADDED)
    await_inputs(USE_PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < N, other=0.0).to(tl.float32)
    store_fp8(x, codes_ptr, scales_ptr, row, num_rows, N, GROUP)


def quantise_rows_triton(x: torch.Tensor, group: int | None = None) -> Fp8Rows:
    """x [T, K] in FP8, with one scale for each row, or for each `group` columns of it.

    A scale is the largest absolute value / 448, codes are value / scale, rounded to the nearest, ties to
    even. K up to 65,536; the last dimension of x is contiguous.
    """
    rows, n = x.shape
    out = Fp8Rows.empty(x, n, group)
    if rows:
        assert x.stride(1) == 1
        padded = padded_row(n, group)
        _quantise_kernel[(rows,)](
            x,
            out.codes,
            out.scales,
            rows,
            x.stride(0),
            N=n,
            N_PADDED=padded,
            GROUP=group,
            num_warps=row_warps(padded),
            **pdl_options(x),
        )
    return out


def quantise_rows_reference(x: torch.Tensor, group: int | None = None) -> Fp8Rows:
    """`quantise_rows` in plain torch."""
    wide, n = x.float(), x.shape[1]
    tiles = wide[:, None] if group is None else F.pad(wide, (0, -n % group)).unflatten(1, (-1, group))
    top = tiles.abs().amax(2).clamp(min=LEAST) if n else wide.new_full((len(x), 1), LEAST)
    most = torch.full_like(top, FP8_MAX)  # divided by a number, torch rounds twice
    codes = (tiles * (most / top)[:, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    scales = top / most
    scales = scales[:, 0] if group is None else scales.t().contiguous().t()
    return Fp8Rows(codes.flatten(1)[:, :n].contiguous(), scales)


quantise_rows = by_device(quantise_rows_triton, quantise_rows_reference)
