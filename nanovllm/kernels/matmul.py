"""x @ weight^T with the same bits for a row whatever the other rows, and about as fast as cuBLAS.

Owns no weight. K is never split: every tile sums front to back, 16 values of K at a time, which is what a
tensor core adds at once. So the tile may follow from the number of rows; tests/gpu compare them bit by bit.
Tiles of x and weight are read through tensor descriptors: by the tensor memory accelerator (TMA) where there
is one, from compute capability 9.0 on, and else as by pointers.
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
    early,
    in_graph,
    jit,
    multiprocessors,
    shared_memory,
    tl,
    triton,
    use_triton,
)
from nanovllm.kernels.paged import dot


class Tile(NamedTuple):
    """What a program computes at a time, `rows` x `columns` of the product, and how it is compiled."""

    rows: int
    columns: int
    k: int  # of each step of the sum
    stages: int  # steps whose operands are in shared memory
    cost: float  # what it takes beside others, with a multiprocessor to itself; or `fit` of them together
    fit: int = 1
    warps: int = 4
    swap: bool = False  # the columns are the rows of the tensor core's product: those are at least 64
    persistent: bool = False  # one program a multiprocessor does tile after tile, the next one's loads early


# By these costs an H200 takes the fastest tile, or one as fast within 5 %, for most products of the shapes of
# Qwen3-0.6B, 8B and 32B. Larger tiles cost less for their size: fewer bytes pass through the L2.
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
_PLAIN = Tile(32, 64, 32, 2, cost=1)  # the one tile where there are no tensor cores: for float32, interpreted
_BAND = 8  # tiles of rows that are computed together, so that a tile of the weight is read once for all
_ALIGNMENT = 16  # bytes, of rows that a tensor descriptor takes
# The work up to which more than 32 rows are faster by these tiles than by cuBLAS, in multiplications:
_WIDE = 2**29
_NARROW = 3 * 2**28  # where there are no more outputs than inputs
_SMALL = 2**22  # numbers in a weight: larger ones want tiles of 64 rows that are nearly full


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
    EARLY: tl.constexpr,
    BAND: tl.constexpr = _BAND,
) -> None:
    """Tiles of the product in turn; those of a band of rows come first by rows, then by columns.

    x and weight are tensor descriptors, which read 0 past the end.
    """
    await_inputs(EARLY)
    column_tiles = tl.cdiv(N, COLUMNS)
    tiles = tl.cdiv(num_rows, ROWS) * column_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=PERSISTENT):
        band = tile // (BAND * column_tiles) * BAND
        height = tl.minimum(tl.cdiv(num_rows, ROWS) - band, BAND)
        within = tile % (BAND * column_tiles)
        first_row = (band + within % height) * ROWS
        row = tl.maximum(tl.minimum(first_row, num_rows - ROWS), 0)  # TMA takes longer where a tile ends
        column = within // height * COLUMNS
        if SWAP:
            total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
            for k in range(0, K, BLOCK_K):
                total = dot(weight.load([column, k]), x.load([row, k]).T, total)
            total = total.T
        else:
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for k in range(0, K, BLOCK_K):
                total = dot(x.load([row, k]), weight.load([column, k]).T, total)
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        cells = rows.to(tl.int64)[:, None] * N + columns[None, :]
        live = ((rows >= first_row) & (rows < num_rows))[:, None] & (columns < N)[None, :]
        if residual_ptr is not None:
            total += tl.load(residual_ptr + cells, mask=live, other=0.0).to(tl.float32)
        tl.store(out_ptr + cells, total.to(out_ptr.dtype.element_ty), mask=live)


@lru_cache(maxsize=4096)
def choose_tile(num_rows: int, n: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile, not half empty, by which a product should take least time; as deep as the device allows."""
    if INTERPRET or dtype == torch.float32:
        return _PLAIN

    def time(tile: Tile) -> float:
        tiles = -(-num_rows // tile.rows) * -(-n // tile.columns)
        return tile.cost * -(-tiles // (tile.fit * multiprocessors(device)))

    tiles = [_fitted(tile, device) for tile in _TILES if tile.rows < 2 * max(num_rows, 16)]
    return min((tile for tile in tiles if tile.stages > 2 or not tile.persistent), key=time)


def _fitted(tile: Tile, device: torch.device) -> Tile:
    """The tile with as many of its stages as the device has shared memory for."""
    stage = 2 * (tile.rows + tile.columns) * tile.k
    rest = shared_memory(device) - 2048 - (tile.rows * tile.columns if tile.persistent else 0)
    return tile._replace(stages=max(1, min(tile.stages, rest // stage)))


def is_aligned(x: torch.Tensor) -> bool:
    """Whether a tensor descriptor can describe rows x [T, K]: each starts at a multiple of 16 bytes."""
    starts = x.data_ptr() % _ALIGNMENT == _row_stride(x) * x.element_size() % _ALIGNMENT == 0
    return starts and x.stride(1) == 1


def _row_stride(x: torch.Tensor) -> int:
    return x.stride(0) if len(x) > 1 else x.shape[1]  # a single row's may be anything


def _descriptor(x: torch.Tensor, block: list[int]) -> Any:
    return TensorDescriptor(x, list(x.shape), [_row_stride(x), 1], block)


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
    assert weight.shape[1] == k and x.dtype == weight.dtype
    assert residual is None or (residual.is_contiguous() and residual.shape == (num_rows, n))
    out = x.new_empty(num_rows, n) if residual is None else residual
    if num_rows == 0:
        return out
    tile = tile or choose_tile(num_rows, n, x.dtype, x.device)
    programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.columns)
    _linear_kernel[(min(programs, multiprocessors(x.device)) if tile.persistent else programs,)](
        _descriptor(x, [tile.rows, tile.k]),
        _descriptor(weight, [tile.columns, tile.k]),
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
        **early(x),
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
    and residual alone, bit by bit, and x and weight must be `is_aligned`.
    """
    return (linear_triton if use_triton(x) or INTERPRET else linear_reference)(x, weight, bias, residual)


def use_linear(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` is faster than cuBLAS for rows x [T, K], with how the kernels around it start.

    In CUDA graphs only, since starting it costs the host 60 us more. Measured on an H200, so only for GPUs of
    its generation.
    """
    if not (in_graph.get() and use_triton(x) and capability(x.device)[0] == 9 and x.element_size() == 2):
        return False
    rows, (n, k) = len(x), weight.shape
    little = rows * n * k <= (_NARROW if n <= k else _WIDE) and (n * k <= _SMALL or -rows % 64 <= 8)
    return (rows <= 32 or little) and is_aligned(x) and is_aligned(weight)
