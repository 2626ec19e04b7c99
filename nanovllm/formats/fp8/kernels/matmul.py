"""x @ weight^T of FP8 (E4M3) values, with a float32 scale for each row of x and of the weight, or for blocks.

As in `kernels/matmul.py` no tile splits K, so the bits of a row do not depend on other rows, and the tile can
depend on their number. With one scale for each row the tensor cores sum all of K, and the scales are applied
at the end; their sums keep about 14 bits of mantissa. With scales of blocks each 128 values of K are summed
apart, then scaled and added in float32. Owns no weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from nanovllm.formats.fp8.kernels.values import GROUP, Fp8Rows, expanded, group_of, rows_of_scale
from nanovllm.kernels.compat import (
    INTERPRET,
    INTERPRETED,
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
from nanovllm.kernels.matmul import Tile, descriptor, in_bands, store_tile

# Costs as in `kernels/matmul.py`, fitted to an H200 and the four products of a layer of Qwen3-8B, with 4 to
# 512 rows (`tools/bench_fp8.py`): together they take 3 % longer than with the best of 23 tiles for each.
TILES = (
    Tile(128, 256, 128, 4, cost=1.6, warps=8, persistent=True),
    Tile(128, 128, 128, 6, cost=1.12),
    Tile(128, 64, 128, 8, cost=0.68, swap=True),
    Tile(64, 64, 256, 6, cost=0.63),
    Tile(64, 64, 128, 4, cost=1.8, fit=3),
    Tile(32, 64, 512, 4, cost=0.64, swap=True),
    Tile(64, 64, 256, 5, cost=0.63, swap=True, more=32),
    Tile(128, 64, 128, 7, cost=1.05, swap=True, more=32),
    Tile(128, 256, 128, 4, cost=2.24, warps=8, swap=True, more=32),
    Tile(128, 128, 128, 5, cost=1.21, swap=True, more=64),
)
# For scales of blocks: a step is one block, and two sums must fit into the registers.
BLOCK_TILES = (
    Tile(128, 128, GROUP, 6, cost=1.12, warps=8),
    Tile(64, 128, GROUP, 8, cost=0.8),
    Tile(32, 64, GROUP, 14, cost=0.48, swap=True),
)
_PLAIN = Tile(32, 64, 32, 2, cost=1)  # in the interpreter


class Fp8Weight(NamedTuple):
    """A weight [N, K]: codes * scales."""

    codes: torch.Tensor  # [N, K] float8_e4m3fn
    scales: torch.Tensor  # float32: [N], or of blocks [ceil(N / rows), ceil(K / GROUP)], rows 1 or GROUP

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None: all."""
        return group_of(self.scales, 1)

    @property
    def group_rows(self) -> int:
        """Rows that share a scale."""
        return rows_of_scale(len(self.codes), len(self.scales))

    def float(self) -> torch.Tensor:
        """The weight in float32."""
        scales = self.scales.repeat_interleave(self.group_rows, 0)[: len(self.codes)]
        return self.codes.float() * expanded(scales, self.codes.shape[1])


@jit()
def fp8_dot(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a @ b of FP8 values."""
    if INTERPRETED:  # the interpreter would multiply the integers that hold their bits
        a = a.to(tl.float32)
        b = b.to(tl.float32)
        return tl.dot(a, b, total, input_precision="ieee")
    return tl.dot(a, b, total)


@jit()
def _scaled(
    total: tl.tensor,
    x_scales_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    column: tl.tensor,
    N: tl.tensor,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """total [rows, columns] times the scales of its rows and columns; with GROUP it has them already."""
    if GROUP is None:
        rows = row + tl.arange(0, total.shape[0])
        columns = column + tl.arange(0, total.shape[1])
        row_scales = tl.load(x_scales_ptr + rows, mask=rows < num_rows, other=0.0)
        column_scales = tl.load(scales_ptr + columns, mask=columns < N, other=0.0)
        total = total * row_scales[:, None] * column_scales[None, :]
    return total


@jit("num_rows")
def _fp8_linear_kernel(
    x: tl.tensor,
    more_x: tl.tensor,
    x_scales_ptr: tl.tensor,
    weight: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    N: int,
    K: int,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Computes tiles of the product in turn, in the order of `in_bands`.

    x, more_x and weight are tensor descriptors, which read 0 past the end; more_x is of the same rows, with
    blocks of MORE. With GROUP, scales are of groups of so many columns, and a step is one group.
    """
    await_inputs(USE_PDL)
    HEIGHT: tl.constexpr = ROWS + MORE
    column_tiles = tl.cdiv(N, COLUMNS)
    tiles = tl.cdiv(num_rows, HEIGHT) * column_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=PERSISTENT):
        row_tile, column_tile = in_bands(tile, tl.cdiv(num_rows, HEIGHT), column_tiles)
        first_row = row_tile * HEIGHT
        row = tl.maximum(tl.minimum(first_row, num_rows - HEIGHT), 0)  # TMA is slower past the last row
        column = column_tile * COLUMNS
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        if SWAP:
            total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        else:
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        if MORE:
            more_total = tl.zeros((COLUMNS, MORE), dtype=tl.float32)
        groups = tl.cdiv(K, BLOCK_K)
        if GROUP is not None:  # scales are loaded one step ahead, so that no step waits for them
            left_ptrs = x_scales_ptr + rows
            right_ptrs = scales_ptr + columns // GROUP_ROWS * groups
            left = tl.load(left_ptrs, mask=rows < num_rows, other=0.0)
            if GROUP_ROWS % COLUMNS == 0:  # one scale for all columns
                right_ptrs = scales_ptr + column // GROUP_ROWS * groups
                right = tl.load(right_ptrs)
            else:
                right = tl.load(right_ptrs, mask=columns < N, other=0.0)
        for k in range(0, K, BLOCK_K):
            a = x.load([row, k])
            b = weight.load([column, k])
            if GROUP is None:
                total = fp8_dot(b, a.T, total) if SWAP else fp8_dot(a, b.T, total)
                if MORE:
                    more_total = fp8_dot(b, more_x.load([row + ROWS, k]).T, more_total)
            else:
                group = tl.minimum(k // BLOCK_K + 1, groups - 1)
                next_ptrs = left_ptrs + group.to(tl.int64) * num_rows
                next_left = tl.load(next_ptrs, mask=rows < num_rows, other=0.0)
                if GROUP_ROWS % COLUMNS == 0:
                    next_right = tl.load(right_ptrs + group)
                    scales = left * right
                    if SWAP:
                        part = fp8_dot(b, a.T, tl.zeros((COLUMNS, ROWS), dtype=tl.float32))
                        total += part * scales[None, :]
                    else:
                        part = fp8_dot(a, b.T, tl.zeros((ROWS, COLUMNS), dtype=tl.float32))
                        total += part * scales[:, None]
                else:
                    next_right = tl.load(right_ptrs + group, mask=columns < N, other=0.0)
                    if SWAP:
                        part = fp8_dot(b, a.T, tl.zeros((COLUMNS, ROWS), dtype=tl.float32))
                        total += part * left[None, :] * right[:, None]
                    else:
                        part = fp8_dot(a, b.T, tl.zeros((ROWS, COLUMNS), dtype=tl.float32))
                        total += part * left[:, None] * right[None, :]
                left = next_left
                right = next_right
        if SWAP:
            total = total.T
        total = _scaled(total, x_scales_ptr, scales_ptr, row, num_rows, column, N, GROUP)
        store_tile(total, bias_ptr, residual_ptr, out_ptr, row, first_row, num_rows, column, N)
        if MORE:
            total = _scaled(more_total.T, x_scales_ptr, scales_ptr, row + ROWS, num_rows, column, N, GROUP)
            store_tile(total, bias_ptr, residual_ptr, out_ptr, row + ROWS, first_row, num_rows, column, N)


@lru_cache(maxsize=4096)
def choose_fp8_tile(num_rows: int, n: int, device: torch.device, group: int | None = None) -> Tile:
    """The tile with the least estimated time that is not half empty, with its stages fitted to the device."""
    if INTERPRET:
        return _PLAIN if group is None else _PLAIN._replace(k=group)

    def time(tile: Tile) -> float:
        tiles = -(-num_rows // tile.height) * -(-n // tile.columns)
        return tile.cost * -(-tiles // (tile.fit * multiprocessors(device)))

    known = TILES if group is None else BLOCK_TILES
    tiles = [fitted_fp8(tile, device) for tile in known if tile.height < 2 * max(num_rows, 32)]
    return min((tile for tile in tiles if tile.stages > 2 or not tile.persistent), key=time)


def fitted_fp8(tile: Tile, device: torch.device) -> Tile:
    """The tile with as many stages as fit into the device's shared memory."""
    stage = (tile.height + tile.columns) * tile.k
    rest = shared_memory(device) - 2048 - (tile.rows * tile.columns if tile.persistent else 0)
    return tile._replace(stages=max(1, min(tile.stages, rest // stage)))


def fp8_linear_triton(
    x: Fp8Rows,
    weight: Fp8Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`fp8_linear` with Triton; `tile` is for tests and measurements, which compare all tiles."""
    rows, scales = x
    num_rows, k = rows.shape
    n, group = len(weight.codes), weight.group
    assert weight.codes.shape[1] == k and weight.scales.is_contiguous() and x.group == group
    assert residual is None or (residual.is_contiguous() and residual.shape == (num_rows, n))
    out = rows.new_empty(num_rows, n, dtype=dtype) if residual is None else residual
    if num_rows == 0:
        return out
    tile = tile or choose_fp8_tile(num_rows, n, rows.device, group)
    programs = -(-num_rows // tile.height) * -(-n // tile.columns)
    _fp8_linear_kernel[(min(programs, multiprocessors(rows.device)) if tile.persistent else programs,)](
        descriptor(rows, [tile.rows, tile.k]),
        descriptor(rows, [tile.more, tile.k]) if tile.more else None,
        scales,
        descriptor(weight.codes, [tile.columns, tile.k]),
        weight.scales,
        bias,
        residual,
        out,
        num_rows,
        n,
        k,
        ROWS=tile.rows,
        MORE=tile.more,
        COLUMNS=tile.columns,
        BLOCK_K=tile.k,
        SWAP=tile.swap,
        PERSISTENT=tile.persistent,
        GROUP=group,
        GROUP_ROWS=weight.group_rows,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(rows),
    )
    return out


def fp8_linear_reference(
    x: Fp8Rows,
    weight: Fp8Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`fp8_linear` in plain torch."""
    if weight.group is None:
        out = x.codes.float() @ weight.codes.float().T * x.scales[:, None] * weight.scales
    else:
        out = x.float() @ weight.float().T
    for part in (bias, residual):
        out = out if part is None else out + part.float()
    return out.to(dtype) if residual is None else residual.copy_(out)


def _scaled_mm(x: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """`fp8_linear` to bfloat16 with the CUTLASS kernel in torch."""
    out: torch.Tensor = torch._scaled_mm(
        x.codes,
        weight.codes.T,
        x.scales[:, None],
        weight.scales[None, :],
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out


def use_scaled_mm(x: Fp8Rows, weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """Whether torch's product is faster than ours: outside a graph, because a launch of ours costs the host
    60 us more."""
    if weight.group is not None or dtype != torch.bfloat16:
        return False
    if in_graph.get() or not use_triton(x.codes) or capability(x.codes.device)[0] != 9:
        return False
    n, k = weight.codes.shape
    return n % 16 == k % 16 == 0 and hasattr(torch, "_scaled_mm")


def fp8_linear(
    x: Fp8Rows,
    weight: Fp8Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
) -> torch.Tensor:
    """x @ weight^T + bias + residual, [T, N] of `dtype`.

    x: [T, K], weight: [N, K], with scales for rows or for groups, both the same. K is a multiple of 16. bias:
    [N]. residual: [T, N] contiguous, of `dtype`; the result overwrites it. With `deterministic` the bits of a
    row depend only on its rows of x and residual.
    """
    if not use_triton(weight.codes):
        return fp8_linear_reference(x, weight, bias, residual, dtype)
    if residual is None and not deterministic and use_scaled_mm(x, weight, dtype):
        return _scaled_mm(x, weight, bias)
    return fp8_linear_triton(x, weight, bias, residual, dtype)
