"""The products of rows with weights of 4 bits of their experts: the tiles of the grouped product, and
matrix-vector products for one or two rows, as `moe/kernels/gemv.py` for floats. Owns no weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from nanovllm.formats.int4.kernels.e2m1 import half_of
from nanovllm.formats.int4.kernels.layout import BLOCK, SUB, Int4Experts
from nanovllm.formats.int4.kernels.values import code_values, first_scale
from nanovllm.kernels.activation import gated
from nanovllm.kernels.compat import await_inputs, by_device, jit, pdl_options, shared_memory, tl
from nanovllm.moe.kernels.grouped_matmul import ExpertChoice, ExpertTile, choose_experts
from nanovllm.moe.kernels.reference import experts_reference
from nanovllm.moe.kernels.tiles import Chosen


def _tile(stages: int = 3, registers: int | None = None) -> ExpertTile:
    """Of 128 columns, as all of them have."""
    return ExpertTile(128, BLOCK, stages, swap=True, registers=registers)


# By the pairs of an expert, as in `moe/kernels/grouped_matmul.py`, from an H200 and the shapes of gpt-oss-20b
# and 30B-A3B (`tools/bench_int4_experts.py`): within 3 % of the fastest. For more, weights are dequantised.
_INT4_CHOICES: tuple[tuple[float, ExpertChoice], ...] = (
    (9, ExpertChoice(16, _tile(stages=4), _tile())),
    (40, ExpertChoice(32, _tile(registers=168), _tile(registers=128))),
    (450, ExpertChoice(64, _tile(), _tile(registers=168))),
)


@lru_cache(maxsize=4096)
def choose_int4_experts(
    num_pairs: int, num_experts: int, device: torch.device, keeps: bool = False
) -> ExpertChoice:
    """As `choose_experts`, for weights of 4 bits. keeps: never dequantise them first; with NVFP4 that gives
    other bits."""
    for most, (rows, gate_up, down) in _INT4_CHOICES:
        if num_pairs <= most * num_experts or (keeps and most == _INT4_CHOICES[-1][0]):
            return ExpertChoice(
                rows, fitted_int4(gate_up, rows, True, device), fitted_int4(down, rows, False, device)
            )
    return choose_experts(num_pairs, num_experts, torch.bfloat16, device)


def fitted_int4(tile: ExpertTile, rows: int, is_gated: bool, device: torch.device) -> ExpertTile:
    """The tile with as many stages as fit into the device's shared memory."""
    stage = 2 * rows * BLOCK + (2 * SUB + 4) * tile.columns * (2 if is_gated else 1)
    return tile._replace(stages=max(1, min(tile.stages, (shared_memory(device) - 2048) // stage)))


class Int4GemvChoice(NamedTuple):
    """The outputs of a program, the blocks of K that it reads at once, and its warps, for both products."""

    gate_up: int = 8
    down: int = 8
    blocks: int = 8
    gate_up_warps: int = 4
    down_warps: int = 4


_CHOICE = Int4GemvChoice()


@jit()
def _add_product(
    total: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    start: tl.tensor,
    exists: tl.tensor,
    share: tl.tensor,
    K: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
    SUB: tl.constexpr = SUB,
) -> tl.tensor:
    """total [n, BLOCKS, SUB], of places in a block, + products of BLOCKS blocks from `start` on with x.

    words and scales: pointers [n, 1, 1] and [n, 1] to the first ones of rows of a weight [HEIGHT, K].
    x: a pointer to a row. exists: [n]. share: a factor, or [n, 1, 1], or None.
    """
    blocks = start + tl.arange(0, BLOCKS)
    columns = tl.arange(0, SUB)
    inside = exists[:, None] & (blocks < (K + BLOCK - 1) // BLOCK)[None, :]
    word_ptrs = words + (blocks * (HEIGHT * SUB))[None, :, None] + columns[None, None, :]
    word = tl.load(word_ptrs, mask=inside[:, :, None], other=0)
    pairs = scales + (first_scale(blocks, GROUP, BLOCK) * HEIGHT)[None, :]
    pair = tl.load(pairs, mask=inside, other=0)
    width: tl.constexpr = GROUP if GROUP == 16 else SUB  # columns in a row of a code of words in a row
    if GROUP == 16:  # NVFP4
        first, second = half_of(pair, 0)[:, :, None], half_of(pair, 1)[:, :, None]
        pair = tl.where((columns < width)[None, None, :], first, second)
    # Each thread loads the part of x that its words need, in their layout: no exchange between threads.
    in_block = columns // width * (4 * width) + columns % width
    places_of_words = (blocks * BLOCK)[None, :, None] + in_block[None, None, :] + exists[:, None, None] * 0
    for j in tl.static_range(4):
        if GROUP >= SUB and j > 0 and j * SUB % GROUP == 0:
            pair = tl.load(pairs + j * SUB // GROUP * HEIGHT, mask=inside, other=0)
        places = places_of_words + j * width
        part = tl.load(x + places, mask=(places < K) & exists[:, None, None], other=0.0).to(tl.float32)
        if share is not None:
            part *= share
        total += code_values(word, pair, j, GROUP, DTYPE).to(tl.float32) * part
    return total


@jit()
def _gate_up_kernel(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: int,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
    SUB: tl.constexpr = SUB,
) -> None:
    """One program per pair and BLOCK_N outputs: silu(gate @ x) * (up @ x) of its expert."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    most: tl.constexpr = (K + BLOCK - 1) // BLOCK
    pair = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    await_inputs(USE_PDL)
    expert = tl.load(ids_ptr + pair)
    exists = outputs < tl.where(expert >= 0, N, 0)
    expert = tl.maximum(expert, 0).to(tl.int64)
    words = words_ptr + (expert * (most * 2 * N) + outputs)[:, None, None] * SUB
    scales = scales_ptr + (expert * (GROUPS * 2 * N) + outputs)[:, None]
    x = x_ptr + pair // TOP_K * x_stride
    gate = tl.zeros((BLOCK_N, BLOCKS, SUB), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCKS, SUB), dtype=tl.float32)
    for start in range(0, most, BLOCKS):
        gate = _add_product(gate, words, scales, x, start, exists, None, K, 2 * N, GROUP, dtype, BLOCKS)
        up = _add_product(
            up, words + N * SUB, scales + N, x, start, exists, None, K, 2 * N, GROUP, dtype, BLOCKS
        )
    gate = tl.sum(tl.sum(gate, axis=2), axis=1)
    up = tl.sum(tl.sum(up, axis=2), axis=1)
    if factors_ptr is not None:
        factors = factors_ptr + expert * 2 * N + outputs
        gate *= tl.load(factors, mask=exists, other=0.0)
        up *= tl.load(factors + N, mask=exists, other=0.0)
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    tl.store(out_ptr + pair * N + outputs, gated(gate, up, dtype), mask=outputs < N)


@jit()
def _down_kernel(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
    SUB: tl.constexpr = SUB,
) -> None:
    """One program per row and BLOCK_N outputs: the weighted sum of its experts' products."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    most: tl.constexpr = (K + BLOCK - 1) // BLOCK
    row = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N, BLOCKS, SUB), dtype=tl.float32)
    await_inputs(USE_PDL)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        expert = tl.load(ids_ptr + pair)
        share = tl.load(weights_ptr + pair)
        exists = outputs < tl.where(expert >= 0, N, 0)
        expert = tl.maximum(expert, 0).to(tl.int64)
        words = words_ptr + (expert * (most * N) + outputs)[:, None, None] * SUB
        scales = scales_ptr + (expert * (GROUPS * N) + outputs)[:, None]
        x = x_ptr + pair * K
        if factors_ptr is not None:
            factors = tl.load(factors_ptr + expert * N + outputs, mask=exists, other=0.0)
            share *= factors[:, None, None]
        for start in range(0, most, BLOCKS):
            total = _add_product(total, words, scales, x, start, exists, share, K, N, GROUP, dtype, BLOCKS)
    out = tl.sum(tl.sum(total, axis=2), axis=1)
    tl.store(out_ptr + row * N + outputs, out.to(dtype), mask=outputs < N)


def int4_expert_gemv_triton(
    x: torch.Tensor,
    gate_up: Int4Experts,
    down: Int4Experts,
    chosen: Chosen,
    choice: Int4GemvChoice = _CHOICE,
) -> torch.Tensor:
    """`expert_gemv_triton` of weights of 4 bits, whose scales are of x's dtype."""
    (num_rows, hidden), width = x.shape, down.k
    top_k = chosen.ids.shape[1]
    inner, out = x.new_empty(num_rows * top_k, width), x.new_empty(num_rows, hidden)
    if num_rows == 0:
        return out
    assert x.stride(1) == 1
    _gate_up_kernel[(-(-width // choice.gate_up), num_rows * top_k)](
        x,
        chosen.ids,
        gate_up.words,
        gate_up.scales,
        gate_up.factors,
        inner,
        x.stride(0),
        N=width,
        K=hidden,
        TOP_K=top_k,
        GROUP=gate_up.group,
        GROUPS=gate_up.scales.shape[1],
        BLOCK_N=choice.gate_up,
        BLOCKS=choice.blocks,
        num_warps=choice.gate_up_warps,
        **pdl_options(x),
    )
    _down_kernel[(-(-hidden // choice.down), num_rows)](
        inner,
        chosen.ids,
        chosen.weights,
        down.words,
        down.scales,
        down.factors,
        out,
        N=hidden,
        K=width,
        TOP_K=top_k,
        GROUP=down.group,
        GROUPS=down.scales.shape[1],
        BLOCK_N=choice.down,
        BLOCKS=choice.blocks,
        num_warps=choice.down_warps,
        **pdl_options(x),
    )
    return out


int4_expert_gemv = by_device(int4_expert_gemv_triton, experts_reference)
