"""x @ weight^T with the same bits for a row whatever the other rows: the products of a deterministic engine.

Owns no weight. K is never split: every tile sums front to back, 16 values of K at a time, which is what a
tensor core adds at once. So the tile may follow from the number of rows; tests/gpu compare them bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.compat import INTERPRET, await_inputs, jit, launch_early, tl, triton, use_triton
from nanovllm.kernels.paged import dot


class Tile(NamedTuple):
    """What one program computes, `rows` x `columns` of the product, and how it is compiled."""

    rows: int
    columns: int
    k: int  # of each step of the sum
    warps: int
    stages: int


# Largest first: fewer bytes pass through the L2. Taken is the first of which a product has _PROGRAMS.
_TILES = (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 6), Tile(64, 32, 256, 4, 3), Tile(64, 16, 256, 4, 4))
_SMALL_TILES = (Tile(16, 64, 128, 4, 6), Tile(16, 32, 128, 4, 6), Tile(16, 16, 512, 4, 3))  # up to 16
_PLAIN = Tile(32, 64, 32, 4, 2)  # the one tile where there are no tensor cores: for float32, interpreted
_PROGRAMS = 96  # fill a GPU of 132 multiprocessors well enough
_BAND = 8  # tiles of rows that are computed together, so that a tile of the weight is read once for all


@jit("num_rows")
def _linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    N: int,
    K: int,
    x_stride: int,
    weight_stride: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    WHOLE_K: tl.constexpr,
    EARLY: tl.constexpr,
    INTERPRET: tl.constexpr,
) -> None:
    """One program per tile of the product; tiles of a band of rows come first by rows, then by columns."""
    program = tl.program_id(0)
    column_tiles = tl.cdiv(N, COLUMNS)
    band = program // (BAND * column_tiles) * BAND
    height = tl.minimum(tl.cdiv(num_rows, ROWS) - band, BAND)
    within = program % (BAND * column_tiles)
    rows = (band + within % height) * ROWS + tl.arange(0, ROWS)
    columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
    live_rows = (rows < num_rows)[:, None]
    live_columns = (columns < N)[None, :]
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight = weight_ptr + columns.to(tl.int64)[None, :] * weight_stride + k[:, None]
    await_inputs(EARLY)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if WHOLE_K:
            a = tl.load(x, mask=live_rows, other=0.0)
            b = tl.load(weight, mask=live_columns, other=0.0)
        else:
            left = K - start
            a = tl.load(x, mask=live_rows & (k < left)[None, :], other=0.0)
            b = tl.load(weight, mask=live_columns & (k < left)[:, None], other=0.0)
        total = dot(a, b, total, INTERPRET)
        x += BLOCK_K
        weight += BLOCK_K
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    cells = rows.to(tl.int64)[:, None] * N + columns[None, :]
    live = live_rows & live_columns
    if residual_ptr is not None:
        total += tl.load(residual_ptr + cells, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + cells, total.to(out_ptr.dtype.element_ty), mask=live)


def choose_tile(num_rows: int, n: int, dtype: torch.dtype) -> Tile:
    """The largest tile, not half empty, of which there are enough to fill the device."""
    if INTERPRET or dtype == torch.float32:
        return _PLAIN
    tiles = _SMALL_TILES if num_rows <= 16 else _TILES
    for tile in tiles:
        programs = -(-num_rows // tile.rows) * -(-n // tile.columns)
        if programs >= _PROGRAMS and tile.rows < 2 * max(num_rows, 64):
            return tile
    return tiles[-1]


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`linear` by Triton; `tile` is for tests, which hold all of them against each other."""
    num_rows, k = x.shape
    n = weight.shape[0]
    assert weight.shape[1] == k and x.stride(1) == weight.stride(1) == 1 and x.dtype == weight.dtype
    assert residual is None or (residual.is_contiguous() and residual.shape == (num_rows, n))
    out = x.new_empty(num_rows, n) if residual is None else residual
    if num_rows == 0:
        return out
    tile = tile or choose_tile(num_rows, n, x.dtype)
    early = launch_early(x)
    _linear_kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.columns),)](
        x,
        weight,
        bias,
        residual,
        out,
        num_rows,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK_K=tile.k,
        BAND=_BAND,
        WHOLE_K=k % tile.k == 0,
        EARLY=early,
        launch_pdl=early,
        INTERPRET=INTERPRET,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` in plain torch; its bits are whatever torch makes of the shape."""
    out = x.float() @ weight.float().T
    for part in (bias, residual):
        out = out if part is None else out + part.float()
    return out.to(x.dtype) if residual is None else residual.copy_(out)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias + residual, [T, N] of x's dtype, summed in float32 and rounded once.

    x: [T, K], weight: [N, K], bias: [N], all of one dtype; the last dimensions contiguous. residual: [T, N]
    contiguous; the result takes its place. As a kernel, a row of the result is a function of its rows of x
    and residual alone, bit by bit.
    """
    return (linear_triton if use_triton(x) or INTERPRET else linear_reference)(x, weight, bias, residual)
