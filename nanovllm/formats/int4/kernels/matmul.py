"""x @ weight^T of a weight with 4 bits for each value, which are unpacked in registers.

The layout of `Int4Weight` is chosen for tensor cores. A product is computed transposed, so that the weight is
the operand that comes from registers. Owns no weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.formats.int4.kernels.layout import BLOCK, SUB, Int4Weight, dequantise_reference
from nanovllm.formats.int4.kernels.values import first_scale, tile_values, triton_dtype, waited
from nanovllm.kernels.activation import gated, silu_and_mul
from nanovllm.kernels.compat import (
    INTERPRET,
    await_inputs,
    jit,
    multiprocessors,
    next_power_of_2,
    pdl_options,
    shared_memory,
    tl,
)
from nanovllm.kernels.matmul import descriptor, is_aligned, store_tile
from nanovllm.kernels.paged import dot


class Int4Tile(NamedTuple):
    """The part of the product that a program computes, and compile options."""

    rows: int  # of x: 16, 32, ... 256
    columns: int  # outputs: 64 for every four warps, or a multiple
    more: int = 0  # further rows of x, multiplied with the same unpacked values; fewer than `rows`
    warps: int = 4
    stages: int = 4  # blocks of K whose operands are in shared memory
    split: int = 1  # programs that share the sum over K
    tma: bool = True  # read the weight through a tensor descriptor

    @property
    def height(self) -> int:
        return self.rows + self.more


@jit("num_rows", "blocks")
def _int4_kernel(
    x: tl.tensor,
    more_x: tl.tensor,
    words: tl.tensor,
    scales_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    N: int,
    blocks: int,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
    SUB: tl.constexpr = SUB,
) -> None:
    """One program per tile and part of K; tiles of the same columns are neighbours. With several parts, `out`
    is [parts, num_rows, N] in float32.

    x and more_x are descriptors of the same rows, with blocks of ROWS and of MORE rows. factors_ptr: None, or
    those of NVFP4.
    """
    await_inputs(USE_PDL)
    row_tiles = tl.cdiv(num_rows, ROWS + MORE)
    first_row = tl.program_id(0) % row_tiles * (ROWS + MORE)
    row = tl.maximum(tl.minimum(first_row, num_rows - ROWS - MORE), 0)  # TMA is slower past the last row
    column = tl.program_id(0) // row_tiles * COLUMNS
    columns = column + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    if MORE:
        more_total = tl.zeros((COLUMNS, MORE), dtype=tl.float32)
    share = tl.cdiv(blocks, tl.num_programs(1))
    first = tl.program_id(1) * share
    for block in range(first, tl.minimum(first + share, blocks)):
        if TMA:
            word = words.load([block * N + column, 0])  # past N: other rows, whose results are not stored
        else:
            word_ptrs = words + (block * N + columns).to(tl.int64)[:, None] * SUB
            word = tl.load(word_ptrs + tl.arange(0, SUB)[None, :], mask=(columns < N)[:, None], other=0)
        pairs = scales_ptr + columns
        pair = tl.load(pairs + first_scale(block, GROUP, BLOCK) * N, mask=columns < N, other=0)
        values = tile_values(word, pair, pairs, block, N, GROUP, DTYPE, BLOCK, columns < N)
        x_tile = x.load([row, block * BLOCK]).T
        if MORE:
            more_x_tile = more_x.load([row + ROWS, block * BLOCK]).T
        total = waited(dot(values, x_tile, total))
        if MORE:
            more_total = waited(dot(values, more_x_tile, more_total))
    if factors_ptr is not None:
        factors = tl.load(factors_ptr + columns, mask=columns < N, other=0.0)[:, None]
        total *= factors
        if MORE:
            more_total *= factors
    out_ptr += tl.program_id(1).to(tl.int64) * num_rows * N
    store_tile(total.T, bias_ptr, residual_ptr, out_ptr, row, first_row, num_rows, column, N)
    if MORE:
        total = more_total.T
        store_tile(total, bias_ptr, residual_ptr, out_ptr, row + ROWS, first_row, num_rows, column, N)


_FINISH = 1024  # columns of a program


@jit("num_rows")
def _finish_kernel(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    N: int,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Sum parts [SPLIT, num_rows, N], or twice as many columns with GATED. A program per row and BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    width = 2 * N if GATED else N
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    await_inputs(USE_PDL)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    up = total
    for part in tl.static_range(SPLIT):
        ptrs = parts_ptr + (part * num_rows + row) * width + columns
        total += tl.load(ptrs, mask=mask, other=0.0)
        if GATED:
            up += tl.load(ptrs + N, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + N + columns, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        total = gated(total.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * N + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, total.to(dtype), mask=mask)


def int4_linear_triton(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    silu: bool = False,
    tile: Int4Tile | None = None,
) -> torch.Tensor:
    """`int4_linear` with Triton."""
    rows, n = len(x), weight.n
    assert x.shape[1] == weight.k and (residual is None or residual.is_contiguous())
    out = x.new_empty(rows, n // 2 if silu else n) if residual is None else residual
    if rows == 0:
        return out
    tile = tile or choose_int4_tile(rows, weight, multiprocessors(x.device)) or _LARGEST
    parts = x.new_empty((tile.split, rows, n), dtype=torch.float32) if tile.split > 1 else None
    product = parts if parts is not None else x.new_empty(rows, n) if silu else out
    x = x if is_aligned(x) else x.contiguous()
    words = weight.words.flatten(0, 1)
    last = parts is None  # this kernel makes the result
    _int4_kernel[(-(-rows // tile.height) * -(-n // tile.columns), tile.split)](
        descriptor(x, [tile.rows, BLOCK]),
        descriptor(x, [tile.more, BLOCK]) if tile.more else None,
        descriptor(words, [tile.columns, SUB]) if tile.tma else words,
        weight.scales,
        weight.factors,
        bias if last else None,
        residual if last else None,
        product,
        rows,
        n,
        len(weight.words),
        GROUP=weight.group,
        ROWS=tile.rows,
        MORE=tile.more,
        COLUMNS=tile.columns,
        TMA=tile.tma,
        DTYPE=triton_dtype(x.dtype),
        num_warps=tile.warps,
        num_stages=_stages(tile, x.device),
        **pdl_options(x),
    )
    if parts is None:
        return silu_and_mul(product) if silu else product
    n = out.shape[1]
    block = min(_FINISH, next_power_of_2(n))
    _finish_kernel[(rows, -(-n // block))](
        parts,
        bias,
        residual,
        out,
        rows,
        n,
        SPLIT=tile.split,
        GATED=silu,
        BLOCK=block,
        num_warps=4,
        **pdl_options(x),
    )
    return out


def _stages(tile: Int4Tile, device: torch.device) -> int:
    """As many of the tile's stages as fit into the device's shared memory."""
    stage = 2 * tile.height * BLOCK + (2 * SUB + 4) * tile.columns
    return max(1, min(tile.stages, (shared_memory(device) - 2048) // stage))


def int4_linear_reference(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """`int4_linear` in plain torch."""
    out = x.float() @ dequantise_reference(weight.words, weight, x.dtype).float().T
    out = out if bias is None else out + bias.float()
    out = silu_and_mul(out.to(x.dtype)).float() if silu else out
    return out.to(x.dtype) if residual is None else residual.copy_(out + residual.float())


def int4_linear(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    silu: bool = False,
    tile: Int4Tile | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias + residual, [T, N], or with `silu` `silu_and_mul` of the product, [T, N / 2].

    x: [T, K] of the dtype of the weight's scales, float16 or bfloat16. bias: [N]. residual: [T, N]
    contiguous; the result overwrites it. tile: by default that of `choose_int4_tile`. With a tile that does
    not split the sum, a row's bits are those of `linear` with the dequantised weight, in any batch; with
    NVFP4 the same for all such tiles.
    """
    if x.is_cuda or INTERPRET:
        return int4_linear_triton(x, weight, bias, residual, silu=silu, tile=tile)
    return int4_linear_reference(x, weight, bias, residual, silu=silu)


# Up to these rows: the tile, and the programs for each multiprocessor up to which the sum over K is split, at
# most into so many parts. Fitted to an H200 and the four products of a layer of Qwen3-8B with groups of 128
# (`tools/bench_int4.py`); these take, together, in us:
#   rows      2     4     8    16    32    64    80    96   112   131   160   192   256
#   bf16    135   111   109   110   113   122   121   128   128   130   141   154   160
#   here     58    55    59    59    64    77    89   119   115   141   145   177   180
# The best tile of each product would take up to 6 % less. Small tiles win, because three programs on a
# multiprocessor unpack and multiply at the same time. Dequantised first, the four take 140 us more than in
# bf16, for any number of rows.
_TILES = (
    (2, Int4Tile(16, 128, warps=8, tma=False), 3, 4),
    (4, Int4Tile(16, 64, tma=False), 3, 4),
    (16, Int4Tile(16, 64, stages=8), 3, 6),
    (32, Int4Tile(32, 64, stages=6), 3, 6),
    (64, Int4Tile(64, 64, stages=3, tma=False), 3, 6),
    (80, Int4Tile(64, 64, more=16, stages=3), 3, 6),
    (96, Int4Tile(64, 128, more=32, warps=8, stages=3), 2, 4),
    (128, Int4Tile(128, 64, stages=3), 2, 4),
    (160, Int4Tile(64, 64, more=16, stages=3), 3, 6),
    (512, Int4Tile(128, 64, stages=3), 2, 4),
)
_LARGEST = _TILES[-1][1]
_LEAST_BLOCKS = 4  # of K for each program


def choose_int4_tile(
    rows: int, weight: Int4Weight, processors: int, deterministic: bool = False
) -> Int4Tile | None:
    """The fastest tile for x [rows, K] and a weight; None: dequantise it, then multiply. `deterministic`:
    only tiles with the bits of `linear`, which share no sum; with NVFP4, whose dequantised weight gives other
    bits, always a tile."""
    for most, tile, programs, parts in _TILES:
        if rows <= most:
            tiles = -(-rows // tile.height) * -(-weight.n // tile.columns)
            split = min(programs * processors // tiles, len(weight.words) // _LEAST_BLOCKS, parts)
            return tile if deterministic else tile._replace(split=max(1, split))
    return _LARGEST if deterministic and weight.factors is not None else None
