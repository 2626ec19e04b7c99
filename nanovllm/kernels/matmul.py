"""x @ weight^T, about as fast as cuBLAS, where the bits of a row do not depend on other rows.

K is never split: every tile sums from first to last, 16 values of K at a time, which is what a tensor core
adds at once. So the tile can depend on the number of rows; tests/gpu compare the bits of all tiles. Tiles of
x and weight are read through tensor descriptors, which use the tensor memory accelerator (TMA) from compute
capability 9.0 on, else plain loads. Owns no weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from nanovllm.kernels.compat import (
    INTERPRET,
    TensorDescriptor,
    await_inputs,
    capability,
    in_graph,
    jit,
    multiprocessors,
    pdl_options,
    shared_memory,
    tl,
    use_triton,
)
from nanovllm.kernels.paged import dot


class Tile(NamedTuple):
    """The part of the product that a program computes at once, `rows` x `columns`, and compile options."""

    rows: int
    columns: int
    k: int  # values of K in each step of the sum
    stages: int  # steps whose operands are in shared memory
    cost: float  # relative time of `fit` tiles that share a multiprocessor
    fit: int = 1
    warps: int = 4
    swap: bool = False  # compute the transposed product: the tensor core's rows must be at least 64
    persistent: bool = False  # one program per multiprocessor computes many tiles and loads ahead
    more: int = 0  # further rows, for which the weight is not read again; of FP8 products that swap

    @property
    def height(self) -> int:
        return self.rows + self.more


# With these costs `choose_tile` picks the fastest tile on an H200, or one within 5 %, for most products of
# Qwen3-0.6B, 8B and 32B. Larger tiles cost less for their size, because fewer bytes pass through the L2
# cache.
_TILES = (
    Tile(128, 256, 64, 4, cost=2.0, warps=8, persistent=True),
    Tile(128, 128, 64, 6, cost=1.12),
    Tile(128, 64, 128, 4, cost=0.72),
    Tile(64, 64, 64, 4, cost=1.4, fit=3),
    Tile(64, 64, 128, 4, cost=0.5, swap=True),
    Tile(64, 32, 256, 4, cost=0.36),
    Tile(64, 16, 256, 4, cost=0.33),
    Tile(32, 64, 256, 4, cost=0.5, swap=True),
    Tile(16, 64, 256, 4, cost=0.5, swap=True),
)
_PLAIN = Tile(32, 64, 32, 2, cost=1)  # without tensor cores: for float32 and in the interpreter
_BAND = 8  # tiles of rows that are computed together, so that a tile of the weight is read once for all
_ALIGNMENT = 16  # bytes, required by tensor descriptors
# The number of multiplications up to which these tiles beat cuBLAS for more than 32 rows:
_WIDE = 2**29
_NARROW = 3 * 2**28  # if there are at most as many outputs as inputs
_SMALL = 2**22  # elements of a weight: larger weights need tiles of 64 rows that are nearly full


@jit()
def in_bands(
    tile: tl.tensor, row_tiles: tl.tensor, column_tiles: tl.tensor, BAND: tl.constexpr = _BAND
) -> tuple[tl.tensor, tl.tensor]:
    """Which tile of rows and of columns `tile` is: bands of rows; within a band rows first, then columns."""
    band = tile // (BAND * column_tiles) * BAND
    height = tl.minimum(row_tiles - band, BAND)
    within = tile % (BAND * column_tiles)
    return band + within % height, within // height


@jit()
def store_tile(
    total: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    column: tl.tensor,
    N: tl.tensor,
) -> None:
    """Write total [rows, columns] + bias + residual to the output from `row` on: rows from `first_row` on."""
    rows = row + tl.arange(0, total.shape[0])
    columns = column + tl.arange(0, total.shape[1])
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    cells = rows.to(tl.int64)[:, None] * N + columns[None, :]
    live = ((rows >= first_row) & (rows < num_rows))[:, None] & (columns < N)[None, :]
    if residual_ptr is not None:
        total += tl.load(residual_ptr + cells, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + cells, total.to(out_ptr.dtype.element_ty), mask=live)


@jit("num_rows")
def _linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    N: int,
    K: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Computes tiles of the product in turn, in the order of `in_bands`.

    x and weight are tensor descriptors, which read 0 past the end.
    """
    await_inputs(USE_PDL)
    column_tiles = tl.cdiv(N, COLUMNS)
    tiles = tl.cdiv(num_rows, ROWS) * column_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=PERSISTENT):
        row_tile, column_tile = in_bands(tile, tl.cdiv(num_rows, ROWS), column_tiles)
        first_row = row_tile * ROWS
        row = tl.maximum(tl.minimum(first_row, num_rows - ROWS), 0)  # TMA is slower past the last row
        column = column_tile * COLUMNS
        if SWAP:
            total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
            for k in range(0, K, BLOCK_K):
                total = dot(weight.load([column, k]), x.load([row, k]).T, total)
            total = total.T
        else:
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for k in range(0, K, BLOCK_K):
                total = dot(x.load([row, k]), weight.load([column, k]).T, total)
        store_tile(total, bias_ptr, residual_ptr, out_ptr, row, first_row, num_rows, column, N)


@lru_cache(maxsize=4096)
def choose_tile(num_rows: int, n: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile with the least estimated time that is not half empty, with its stages fitted to the device."""
    if INTERPRET or dtype == torch.float32:
        return _PLAIN

    def time(tile: Tile) -> float:
        tiles = -(-num_rows // tile.rows) * -(-n // tile.columns)
        return tile.cost * -(-tiles // (tile.fit * multiprocessors(device)))

    tiles = [_fitted(tile, device) for tile in _TILES if tile.rows < 2 * max(num_rows, 16)]
    return min((tile for tile in tiles if tile.stages > 2 or not tile.persistent), key=time)


def _fitted(tile: Tile, device: torch.device) -> Tile:
    """The tile with as many stages as fit into the device's shared memory."""
    stage = 2 * (tile.rows + tile.columns) * tile.k
    rest = shared_memory(device) - 2048 - (tile.rows * tile.columns if tile.persistent else 0)
    return tile._replace(stages=max(1, min(tile.stages, rest // stage)))


def is_aligned(x: torch.Tensor) -> bool:
    """Whether a tensor descriptor can describe rows x [T, K]: each starts at a multiple of 16 bytes."""
    starts = x.data_ptr() % _ALIGNMENT == _row_stride(x) * x.element_size() % _ALIGNMENT == 0
    return starts and x.stride(1) == 1


def _row_stride(x: torch.Tensor) -> int:
    return x.stride(0) if len(x) > 1 else x.shape[1]  # the stride of a single row may be anything


def descriptor(x: torch.Tensor, block: list[int]) -> Any:
    """A tensor descriptor of rows x [T, K], which must be `is_aligned`, in tiles of `block`."""
    return TensorDescriptor(x, list(x.shape), [_row_stride(x), 1], block)


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`linear` with Triton; `tile` is for tests, which compare all tiles."""
    num_rows, k = x.shape
    n = weight.shape[0]
    assert weight.shape[1] == k and x.dtype == weight.dtype
    assert residual is None or (residual.is_contiguous() and residual.shape == (num_rows, n))
    out = x.new_empty(num_rows, n) if residual is None else residual
    if num_rows == 0:
        return out
    tile = tile or choose_tile(num_rows, n, x.dtype, x.device)
    programs = -(-num_rows // tile.rows) * -(-n // tile.columns)
    _linear_kernel[(min(programs, multiprocessors(x.device)) if tile.persistent else programs,)](
        descriptor(x, [tile.rows, tile.k]),
        descriptor(weight, [tile.columns, tile.k]),
        bias,
        residual,
        out,
        num_rows,
        n,
        k,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK_K=tile.k,
        SWAP=tile.swap,
        PERSISTENT=tile.persistent,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(x),
    )
    return out


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` in plain torch; its bits may depend on the shape."""
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
    contiguous; the result overwrites it. With the kernel, the bits of a row depend only on its rows of x and
    residual, and x and weight must be `is_aligned`.
    """
    return (linear_triton if use_triton(x) or INTERPRET else linear_reference)(x, weight, bias, residual)


def use_linear(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` is faster than cuBLAS for rows x [T, K], including early launch of its neighbours.

    Only in CUDA graphs, because its launch costs the host 60 us more. Measured on an H200, so only for GPUs
    of that generation.
    """
    if not (in_graph.get() and use_triton(x) and capability(x.device)[0] == 9 and x.element_size() == 2):
        return False
    rows, (n, k) = len(x), weight.shape
    little = rows * n * k <= (_NARROW if n <= k else _WIDE) and (n * k <= _SMALL or -rows % 64 <= 8)
    return (rows <= 32 or little) and is_aligned(x) and is_aligned(weight)
