"""The products of rows with the FP8 weights of their experts, as `moe/kernels/grouped_matmul.py` for floats.

Rows are quantised once before the first product, and the results between both once more. As in
`formats/fp8/kernels/matmul.py`, every tile sums K in the same order and multiplies by the scale of the row
first, so the bits of a row do not depend on other rows. Owns no weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.formats.fp8.kernels.matmul import Fp8Weight, fp8_dot, fp8_linear_reference
from nanovllm.formats.fp8.kernels.values import (
    Fp8Rows,
    group_of,
    quantise_rows_reference,
    quantise_rows_triton,
    rows_of_scale,
)
from nanovllm.kernels.activation import Activation, gated, silu_and_mul_reference
from nanovllm.kernels.compat import INTERPRETED, await_inputs, jit, pdl_options, tl
from nanovllm.kernels.matmul import descriptor, in_bands
from nanovllm.moe.kernels.grouped_matmul import ExpertChoice, ExpertTile, sum_experts_triton
from nanovllm.moe.kernels.tiles import Chosen, ExpertTiles


class Fp8Experts(NamedTuple):
    """A weight of E experts [E, N, K]: codes * scales."""

    codes: torch.Tensor  # [E, N, K] float8_e4m3fn
    scales: (
        torch.Tensor
    )  # float32: [E, N], or of blocks [E, ceil(N / rows), ceil(K / GROUP)], rows 1 or GROUP

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None: all."""
        return group_of(self.scales, 2)

    def expert(self, index: int) -> Fp8Weight:
        """The weight of one expert, in the same memory."""
        return Fp8Weight(self.codes[index], self.scales[index])


@jit("num_rows", "num_pairs", "most_tiles")
def _fp8_experts_kernel(
    x: tl.tensor,
    x_stride: int,
    x_scales_ptr: tl.tensor,
    weight: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    count_ptr: tl.tensor,
    num_rows: int,
    num_pairs: int,
    most_tiles: int,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    USE_PDL: tl.constexpr,
    KIND: tl.constexpr = 0,
) -> None:
    """As `moe/kernels/grouped_matmul.py`; with GROUP, which is BLOCK_K, scales are of groups."""
    await_inputs(USE_PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    height_of_weight: tl.constexpr = 2 * N if GATED else N
    groups: tl.constexpr = 1 if GROUP is None else (K + GROUP - 1) // GROUP
    height_of_scales: tl.constexpr = (height_of_weight + GROUP_ROWS - 1) // GROUP_ROWS
    pair_tiles = most_tiles if INTERPRETED else tl.load(count_ptr)
    total_tiles = pair_tiles * column_tiles
    for tile in tl.range(tl.program_id(0), total_tiles, tl.num_programs(0)):
        pair_tile, column_tile = in_bands(tile, pair_tiles, column_tiles)
        column = column_tile * COLUMNS
        start = tl.load(starts_ptr + pair_tile)
        end = tl.load(ends_ptr + pair_tile)
        expert = tl.load(experts_ptr + pair_tile)
        first = expert * height_of_weight + column
        places = start + tl.arange(0, ROWS)
        live = places < end
        columns = column + tl.arange(0, COLUMNS)
        inside = columns < N
        pairs = places
        if GATHER or SCATTER:
            pairs = tl.load(order_ptr + places, mask=live, other=0)
        sources = places
        if GATHER:
            sources = pairs // TOP_K
            x_ptrs = x + sources.to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
        expert_ptr = scales_ptr + expert.to(tl.int64) * height_of_scales * groups
        column_ptrs = expert_ptr + columns // GROUP_ROWS * groups
        up_ptrs = expert_ptr + (columns + N) // GROUP_ROWS * groups
        if SWAP:
            total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        else:
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        up = total
        if GROUP is not None:  # scales are loaded one step ahead, so that no step waits for them
            left = tl.load(x_scales_ptr + sources, mask=live, other=0.0)
            right = tl.load(column_ptrs, mask=inside, other=0.0)
            up_right = right
            if GATED:
                up_right = tl.load(up_ptrs, mask=inside, other=0.0)
        for k in range(0, K, BLOCK_K):
            if GATHER:
                mask = live[:, None] & (k + tl.arange(0, BLOCK_K) < K)[None, :]
                rows = tl.load(x_ptrs + k, mask=mask, other=0.0)
            else:
                rows = x.load([start, k])
            if GROUP is None:
                if SWAP:
                    total = fp8_dot(weight.load([first, k]), rows.T, total)
                    if GATED:
                        up = fp8_dot(weight.load([first + N, k]), rows.T, up)
                else:
                    total = fp8_dot(rows, weight.load([first, k]).T, total)
                    if GATED:
                        up = fp8_dot(rows, weight.load([first + N, k]).T, up)
            else:
                group = tl.minimum(k // GROUP + 1, groups - 1)
                next_ptrs = x_scales_ptr + group.to(tl.int64) * num_rows + sources
                next_left = tl.load(next_ptrs, mask=live, other=0.0)
                next_right = tl.load(column_ptrs + group, mask=inside, other=0.0)
                if SWAP:
                    part = fp8_dot(weight.load([first, k]), rows.T, tl.zeros((COLUMNS, ROWS), tl.float32))
                    total += part * left[None, :] * right[:, None]
                else:
                    part = fp8_dot(rows, weight.load([first, k]).T, tl.zeros((ROWS, COLUMNS), tl.float32))
                    total += part * left[:, None] * right[None, :]
                if GATED:
                    next_up = tl.load(up_ptrs + group, mask=inside, other=0.0)
                    if SWAP:
                        part = fp8_dot(
                            weight.load([first + N, k]), rows.T, tl.zeros((COLUMNS, ROWS), tl.float32)
                        )
                        up += part * left[None, :] * up_right[:, None]
                    else:
                        part = fp8_dot(
                            rows, weight.load([first + N, k]).T, tl.zeros((ROWS, COLUMNS), tl.float32)
                        )
                        up += part * left[:, None] * up_right[None, :]
                    up_right = next_up
                left = next_left
                right = next_right
        if SWAP:
            total = total.T
            up = up.T
        if GROUP is None:
            left = tl.load(x_scales_ptr + sources, mask=live, other=0.0)[:, None]
            total = total * left * tl.load(column_ptrs, mask=inside, other=0.0)[None, :]
            if GATED:
                up = up * left * tl.load(up_ptrs, mask=inside, other=0.0)[None, :]
        result = total.to(dtype)
        if GATED:
            result = gated(result.to(tl.float32), up.to(dtype).to(tl.float32), dtype, KIND)
        targets = pairs if SCATTER else places
        cells = targets.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(out_ptr + cells, result, mask=live[:, None] & inside[None, :])


def fp8_tile(tile: ExpertTile, rows: int, group: int | None, is_gated: bool) -> ExpertTile:
    """A tile for 16 bits as one for FP8, with as many bytes in a step. With a group, that is the step, and
    all sums of a program must fit into the registers."""
    if group is None:
        return tile._replace(k=2 * tile.k)
    sums = 3 if is_gated else 2
    most = 4096 * tile.warps // (sums * rows)
    columns = min(tile.columns, 1 << most.bit_length() - 1)
    return tile._replace(k=group, columns=max(32, columns))


def fp8_grouped_triton(
    x: Fp8Rows,
    weight: Fp8Experts,
    tiles: ExpertTiles,
    tile: ExpertTile,
    dtype: torch.dtype,
    *,
    is_gated: bool,
    gather: bool,
    scatter: bool,
    activation: Activation = Activation.SILU,
) -> torch.Tensor:
    """`grouped_triton` of FP8 values; the result is of `dtype`."""
    codes, scales = weight
    n, k = codes.shape[1] // 2 if is_gated else codes.shape[1], codes.shape[2]
    pairs, top_k = len(tiles.order), tiles.chosen.ids.shape[1]
    assert codes.is_contiguous() and scales.is_contiguous() and x.group == weight.group
    out = x.codes.new_empty(pairs, n, dtype=dtype)
    most, tile = len(tiles.experts), fp8_tile(tile, tiles.rows, weight.group, is_gated)
    programs = most * -(-n // tile.columns)
    if programs == 0:
        return out
    _fp8_experts_kernel[(programs,)](
        x.codes if gather else descriptor(x.codes, [tiles.rows, tile.k]),
        x.codes.stride(0),
        x.scales,
        descriptor(codes.view(-1, k), [tile.columns, tile.k]),
        scales,
        out,
        *tiles[1:6],
        len(x.codes),
        pairs,
        most,
        N=n,
        K=k,
        TOP_K=top_k,
        GATED=is_gated,
        GATHER=gather,
        SCATTER=scatter,
        GROUP=weight.group,
        GROUP_ROWS=rows_of_scale(codes.shape[1], scales.shape[1]),
        ROWS=tiles.rows,
        COLUMNS=tile.columns,
        BLOCK_K=tile.k,
        SWAP=tile.swap,
        KIND=activation.number,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(out),
    )
    return out


def fp8_experts_triton(
    x: torch.Tensor,
    gate_up: Fp8Experts,
    down: Fp8Experts,
    tiles: ExpertTiles,
    choice: ExpertChoice,
    activation: Activation = Activation.SILU,
) -> torch.Tensor:
    """The sum over a row's experts of weight * down @ (act(gate @ x) * (up @ x)), [T, H] of x's dtype.

    x: [T, H], quantised here, and between the products, as `quantise_rows` does it. gate_up: [E, 2I, H],
    down: [E, H, I]; H and I are multiples of 16.
    """
    assert tiles.rows == choice.rows
    rows, dtype = quantise_rows_triton(x, gate_up.group), x.dtype
    inner = fp8_grouped_triton(
        rows,
        gate_up,
        tiles,
        choice.gate_up,
        dtype,
        is_gated=True,
        gather=True,
        scatter=False,
        activation=activation,
    )
    rows = quantise_rows_triton(inner, down.group)
    products = fp8_grouped_triton(
        rows, down, tiles, choice.down, dtype, is_gated=False, gather=False, scatter=True
    )
    return sum_experts_triton(products, tiles.chosen)


def fp8_experts_reference(
    x: torch.Tensor,
    gate_up: Fp8Experts,
    down: Fp8Experts,
    chosen: Chosen,
    activation: Activation = Activation.SILU,
) -> torch.Tensor:
    """`fp8_experts_triton` in plain torch, which needs no tiles. Computes only experts that have rows."""
    ids, weights = chosen
    products = x.new_zeros(ids.numel(), down.codes.shape[1])
    flat = ids.flatten()
    for index in flat.unique().tolist():
        if index >= 0:
            pairs = (flat == index).nonzero()[:, 0]
            rows = quantise_rows_reference(x[pairs // ids.shape[1]], gate_up.group)
            inner = fp8_linear_reference(rows, gate_up.expert(index), dtype=x.dtype)
            rows = quantise_rows_reference(silu_and_mul_reference(inner, activation.kind), down.group)
            products[pairs] = fp8_linear_reference(rows, down.expert(index), dtype=x.dtype)
    scaled = products.view(*ids.shape, -1).float() * weights[:, :, None]
    return torch.where(ids[:, :, None] >= 0, scaled, 0.0).sum(1).to(x.dtype)
