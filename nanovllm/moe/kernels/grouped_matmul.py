"""The products of rows with the weights of their experts: gated MLPs whose results a row sums by its weights.

Two products over tiles of pairs (`moe/kernels/routing.py`), and a sum over the experts of a row. Weights are
read through tensor descriptors; those of 4 bits are unpacked in registers, or before, for many rows. As in
`kernels/matmul.py`, every tile sums K in the same order, so the bits of a row do not depend on other rows.
Owns no weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from nanovllm.formats.int4.kernels.layout import BLOCK, SUB, Int4Experts
from nanovllm.formats.int4.kernels.values import dequantise_experts, first_scale, tile_values, waited
from nanovllm.kernels.activation import gated
from nanovllm.kernels.compat import (
    INTERPRET,
    INTERPRETED,
    TensorDescriptor,
    await_inputs,
    jit,
    next_power_of_2,
    pdl_options,
    shared_memory,
    tl,
)
from nanovllm.kernels.matmul import in_bands
from nanovllm.kernels.paged import dot
from nanovllm.moe.kernels.tiles import PLAIN_MLP, Chosen, ExpertMLP, ExpertTiles


class ExpertTile(NamedTuple):
    """The part of a product that a program computes at once, and compile options."""

    columns: int  # with a gate, of gate and of up each
    k: int  # values of K in each step of the sum
    stages: int  # steps whose operands are in shared memory
    warps: int = 4
    swap: bool = False  # compute the transposed product: the tensor core's rows must be at least 64
    registers: int | None = None  # of a thread at most, so that more programs fit on a multiprocessor


class ExpertChoice(NamedTuple):
    """How the experts' products are computed."""

    rows: int  # of a tile, in both products
    gate_up: ExpertTile
    down: ExpertTile


# By the pairs of an expert, if all have equally many: the first that is at least as large. Measured with
# three shapes on an H200 (tools/bench_experts.py): up to 24 pairs gate and up at 89 to 95 % of the bus, down
# at 84 to 91 %, within 2 % of the fastest of 25 tiles. On an H100 the last choice has 502 to 577 TFLOP/s for
# 512 and 1,024 pairs; persistent programs were slower, and a first copy of the rows in the order of experts
# takes as long as it saves.
_CHOICES: tuple[tuple[float, ExpertChoice], ...] = (
    (9, ExpertChoice(16, ExpertTile(64, 128, 4, swap=True), ExpertTile(64, 128, 2, swap=True))),
    (24, ExpertChoice(32, ExpertTile(64, 128, 4, swap=True), ExpertTile(64, 128, 3, swap=True))),
    (96, ExpertChoice(64, ExpertTile(128, 64, 4), ExpertTile(128, 64, 4))),
    (float("inf"), ExpertChoice(128, ExpertTile(128, 64, 4, warps=8), ExpertTile(256, 64, 4, warps=8))),
)
_PLAIN = ExpertChoice(16, ExpertTile(32, 32, 2), ExpertTile(32, 32, 2))  # without tensor cores
_COLUMNS = 1024  # of a program that sums


@jit()
def _int4_tile(
    words: tl.tensor,
    scales: tl.tensor,
    first: tl.tensor,
    k: tl.tensor,
    inside: tl.tensor,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
) -> tl.tensor:
    """The values [COLUMNS, BLOCK] of an expert's weight [HEIGHT, K] from column k on. words: a descriptor of
    all words, in which `first` is the first row of the expert's block 0; scales: pointers to its first ones.
    """
    block = k // BLOCK
    word = words.load([first + block * HEIGHT, 0])  # past N: other rows, whose results are not stored
    pair = tl.load(scales + first_scale(block, GROUP, BLOCK) * HEIGHT, mask=inside, other=0)
    return tile_values(word, pair, scales, block, HEIGHT, GROUP, DTYPE, BLOCK, inside)


@jit("num_pairs", "most_tiles")
def _experts_kernel(
    x: tl.tensor,
    x_stride: int,
    weight: tl.tensor,
    bias_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    count_ptr: tl.tensor,
    num_pairs: int,
    most_tiles: int,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BIASES: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Computes a tile of the product, in the order of `in_bands`.

    GATHER: x [T, K] is a pointer to rows, and each pair reads its row; else a descriptor of rows in the order
    of places, whose `x_stride` is not used. SCATTER: results go to rows of pairs, else of places. weight: a
    descriptor of the experts' [N, K], or [2N, K] if GATED, one after the other. bias_ptr: None, or biases
    [BIASES] of each expert, or [2 * BIASES] if GATED. KIND: of the activation. GROUP: None, or that of
    weights of 4 bits, for which the product is computed transposed; `weight` then describes their words.
    factors_ptr: None, or those of NVFP4, [N] or [2N] of each expert.
    """
    await_inputs(USE_PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    height_of_weight: tl.constexpr = 2 * N if GATED else N
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    step: tl.constexpr = GROUP if GROUP and GROUP != 16 else BLOCK_K  # columns that share a word of scales
    groups: tl.constexpr = (blocks * BLOCK_K + step - 1) // step
    pair_tiles = most_tiles if INTERPRETED else tl.load(count_ptr)
    total_tiles = pair_tiles * column_tiles
    for tile in tl.range(tl.program_id(0), total_tiles, tl.num_programs(0)):
        pair_tile, column_tile = in_bands(tile, pair_tiles, column_tiles)
        column = column_tile * COLUMNS
        start = tl.load(starts_ptr + pair_tile)
        end = tl.load(ends_ptr + pair_tile)
        if GROUP is None:
            first = tl.load(experts_ptr + pair_tile) * height_of_weight + column
        else:
            expert = tl.load(experts_ptr + pair_tile)
            first = expert * (blocks * height_of_weight) + column
            inside = column + tl.arange(0, COLUMNS) < N
            scales = scales_ptr + expert.to(tl.int64) * (groups * height_of_weight)
            scales += column + tl.arange(0, COLUMNS)
        places = start + tl.arange(0, ROWS)
        live = places < end
        pairs = places
        if GATHER or SCATTER:
            pairs = tl.load(order_ptr + places, mask=live, other=0)
        if GATHER:  # places that are not live read row 0, which costs less than a mask
            x_ptrs = x + (pairs // TOP_K).to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
        if SWAP:
            total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        else:
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        up = total
        for k in range(0, K, BLOCK_K):
            if GATHER:
                if K % BLOCK_K == 0:
                    rows = tl.load(x_ptrs + k)
                else:
                    rows = tl.load(x_ptrs + k, mask=(k + tl.arange(0, BLOCK_K) < K)[None, :], other=0.0)
            else:
                rows = x.load([start, k])
            if GROUP is not None:
                values = _int4_tile(weight, scales, first, k, inside, height_of_weight, GROUP, dtype)
                total = waited(dot(values, rows.T, total))
                if GATED:
                    values = _int4_tile(
                        weight, scales + N, first + N, k, inside, height_of_weight, GROUP, dtype
                    )
                    up = waited(dot(values, rows.T, up))
            elif SWAP:
                total = dot(weight.load([first, k]), rows.T, total)
                if GATED:
                    up = dot(weight.load([first + N, k]), rows.T, up)
            else:
                total = dot(rows, weight.load([first, k]).T, total)
                if GATED:
                    up = dot(rows, weight.load([first + N, k]).T, up)
        if factors_ptr is not None:
            factors = factors_ptr + expert.to(tl.int64) * height_of_weight + column + tl.arange(0, COLUMNS)
            total *= tl.load(factors, mask=inside, other=0.0)[:, None]
            if GATED:
                up *= tl.load(factors + N, mask=inside, other=0.0)[:, None]
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + tl.load(experts_ptr + pair_tile) * (BIASES * (2 if GATED else 1))
            bias_ptrs += column + tl.arange(0, COLUMNS)
            has_bias = column + tl.arange(0, COLUMNS) < BIASES
            bias = tl.load(bias_ptrs, mask=has_bias, other=0.0).to(tl.float32)
            total += bias[:, None] if SWAP else bias[None, :]
            if GATED:
                bias = tl.load(bias_ptrs + BIASES, mask=has_bias, other=0.0).to(tl.float32)
                up += bias[:, None] if SWAP else bias[None, :]
        result = total.to(dtype)
        if GATED:
            result = gated(result.to(tl.float32), up.to(dtype).to(tl.float32), dtype, KIND)
        if SWAP:
            result = result.T
        columns = column + tl.arange(0, COLUMNS)
        targets = pairs if SCATTER else places
        cells = targets.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(out_ptr + cells, result, mask=live[:, None] & (columns < N)[None, :])


@jit()
def _sum_kernel(
    products_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per row and COLUMNS columns: the weighted sum of the row's products, in float32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    await_inputs(USE_PDL)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        end = tl.where(tl.load(ids_ptr + pair) >= 0, N, 0)
        product = tl.load(products_ptr + pair * N + columns, mask=columns < end, other=0.0)
        total += tl.load(weights_ptr + pair) * product.to(tl.float32)
    tl.store(out_ptr + row * N + columns, total.to(out_ptr.dtype.element_ty), mask=columns < N)


@lru_cache(maxsize=4096)
def choose_experts(
    num_pairs: int, num_experts: int, dtype: torch.dtype, device: torch.device
) -> ExpertChoice:
    """The tiles for `num_pairs` pairs, with their stages fitted to the device."""
    if INTERPRET or dtype == torch.float32:
        return _PLAIN
    rows, *tiles = next(choice for most, choice in _CHOICES if num_pairs <= most * num_experts)
    gate_up, down = (
        fitted(tile, rows, gated, device) for tile, gated in zip(tiles, (True, False), strict=True)
    )
    return ExpertChoice(rows, gate_up, down)


def fitted(tile: ExpertTile, rows: int, is_gated: bool, device: torch.device) -> ExpertTile:
    """The tile with as many stages as fit into the device's shared memory."""
    stage = 2 * (rows + tile.columns * (2 if is_gated else 1)) * tile.k
    return tile._replace(stages=max(1, min(tile.stages, (shared_memory(device) - 2048) // stage)))


def _descriptor(x: torch.Tensor, block: list[int]) -> Any:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], block)


def _weight_descriptor(weight: torch.Tensor | Int4Experts, tile: ExpertTile) -> Any:
    if isinstance(weight, Int4Experts):
        assert tile.k == BLOCK
        return _descriptor(weight.words.view(-1, SUB), [tile.columns, SUB])
    return _descriptor(weight.view(-1, weight.shape[2]), [tile.columns, tile.k])


def grouped_triton(
    x: torch.Tensor,
    weight: torch.Tensor | Int4Experts,
    tiles: ExpertTiles,
    tile: ExpertTile,
    *,
    is_gated: bool,
    gather: bool,
    scatter: bool,
    mlp: ExpertMLP = PLAIN_MLP,
) -> torch.Tensor:
    """Each pair's product of its row with its expert's weight, [T * top_k, N], and the bias.

    x: [T, K] if `gather`, else [T * top_k, K] in the order of places. weight: [E, N, K]; if `is_gated`,
    [E, 2N, K], and the result is act(gate) * up. Weights of 4 bits are unpacked in registers if the tile
    swaps, else dequantised first. scatter: the result is in the order of pairs, else of places.
    """
    if isinstance(weight, Int4Experts) and not tile.swap:
        weight = dequantise_experts(weight)
    n, k = weight.shape[1] // 2 if is_gated else weight.shape[1], weight.shape[2]
    pairs, top_k = len(tiles.order), tiles.chosen.ids.shape[1]
    packed = weight if isinstance(weight, Int4Experts) else None
    assert x.stride(1) == 1 and x.dtype == weight.dtype
    assert not isinstance(weight, torch.Tensor) or weight.is_contiguous()
    out = x.new_empty(pairs, n)
    bias = mlp.gate_up_bias if is_gated else mlp.down_bias
    assert bias is None or bias.is_contiguous()
    most = len(tiles.experts)
    programs = most * -(-n // tile.columns)
    if programs == 0:
        return out
    _experts_kernel[(programs,)](
        x if gather else _descriptor(x, [tiles.rows, tile.k]),
        x.stride(0),
        _weight_descriptor(weight, tile),
        bias,
        None if packed is None else packed.scales,
        None if packed is None else packed.factors,
        out,
        *tiles[1:6],
        pairs,
        most,
        N=n,
        K=k,
        TOP_K=top_k,
        BIASES=mlp.width if is_gated else n,
        KIND=mlp.activation.number,
        GATED=is_gated,
        GATHER=gather,
        SCATTER=scatter,
        GROUP=None if packed is None else packed.group,
        ROWS=tiles.rows,
        COLUMNS=tile.columns,
        BLOCK_K=tile.k,
        SWAP=tile.swap,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
        **pdl_options(x),
    )
    return out


def sum_experts_triton(products: torch.Tensor, chosen: Chosen) -> torch.Tensor:
    """The sum over a row's pairs of weight * product, [T, N]; products: [T * top_k, N]."""
    (num_rows, top_k), n = chosen.ids.shape, products.shape[1]
    out = products.new_empty(num_rows, n)
    if num_rows:
        columns = min(_COLUMNS, next_power_of_2(n))
        _sum_kernel[(num_rows, -(-n // columns))](
            products,
            chosen.ids,
            chosen.weights,
            out,
            N=n,
            TOP_K=top_k,
            COLUMNS=columns,
            num_warps=4,
            **pdl_options(products),
        )
    return out


def experts_triton(
    x: torch.Tensor,
    gate_up: torch.Tensor | Int4Experts,
    down: torch.Tensor | Int4Experts,
    tiles: ExpertTiles,
    choice: ExpertChoice | None = None,
    mlp: ExpertMLP = PLAIN_MLP,
) -> torch.Tensor:
    """The sum over a row's experts of weight * down @ (silu(gate @ x) * (up @ x)), [T, H].

    x: [T, H], gate_up: [E, 2I, H], down: [E, H, I], of one dtype; rows of the weights are whole 16 bytes.
    The weights may both be of 4 bits, with a choice for them; I is then a multiple of 8. mlp: another
    activation, and biases.
    """
    choice = choice or choose_experts(len(tiles.order), len(down), x.dtype, x.device)
    assert tiles.rows == choice.rows
    first, second = choice.gate_up, choice.down
    inner = grouped_triton(x, gate_up, tiles, first, is_gated=True, gather=True, scatter=False, mlp=mlp)
    products = grouped_triton(inner, down, tiles, second, is_gated=False, gather=False, scatter=True, mlp=mlp)
    return sum_experts_triton(products, tiles.chosen)
