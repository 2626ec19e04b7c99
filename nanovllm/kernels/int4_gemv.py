"""The product of one row, or a few, with a weight of 4 bits, fused with residual, norm and activation.

As `gemv.py`, it is limited by reading the weight: a code becomes a float with one instruction for its bits
and one for its zero point. Owns no weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.activation import gated, silu_and_mul_reference
from nanovllm.kernels.compat import await_inputs, by_device, jit, next_power_of_2, pdl_options, tl, use_triton
from nanovllm.kernels.int4_layout import BLOCK, SUB, Int4Weight
from nanovllm.kernels.int4_matmul import int4_linear_reference
from nanovllm.kernels.int4_values import scale_of, triton_dtype, zero_of
from nanovllm.kernels.rms_norm import rms_norm_reference

_PAIRS = BLOCK // 8  # int32 words of a row of the weight in a block: of 4 pairs of neighbouring columns each


class GemvShape(NamedTuple):
    """What a program computes at once, and compile options."""

    columns: int  # outputs
    blocks: int = 32  # blocks of the weight; all of them with a norm or residual
    warps: int = 4


def choose_gemv_shape(blocks: int, silu: bool) -> GemvShape:
    """The fastest shape for a weight of so many blocks. Not measured yet."""
    columns = 2 if silu else 4  # of twice as many rows of the weight
    return GemvShape(max(1, columns * 32 // max(blocks, 32)))


@jit()
def _floats(words: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The two values of 16 bits in int32 words, the lower one first, as float32."""
    low = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@jit()
def _words(low: tl.tensor, high: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The inverse of `_floats`, rounded."""
    low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@jit()
def _read(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Pairs `at` of x + residual, rounded. The first program of a row also writes them."""
    low, high = _floats(tl.load(x_ptr + at, mask=mask, other=0), DTYPE)
    if residual_ptr is not None:
        more_low, more_high = _floats(tl.load(residual_ptr + at, mask=mask, other=0), DTYPE)
        total = _words(low + more_low, high + more_high, DTYPE)
        if tl.program_id(0) < ROWS:
            tl.store(sum_ptr + at, total, mask=mask)
        low, high = _floats(total, DTYPE)
    return low, high


@jit()
def _normed(
    low: tl.tensor,
    high: tl.tensor,
    norm_ptr: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    factor: tl.tensor,
    DTYPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Pairs of x times `factor`, rounded, times the norm's weight, rounded."""
    if norm_ptr is not None:
        low_weight, high_weight = _floats(tl.load(norm_ptr + at, mask=mask, other=0), DTYPE)
        low = ((low * factor).to(DTYPE).to(tl.float32) * low_weight).to(DTYPE).to(tl.float32)
        high = ((high * factor).to(DTYPE).to(tl.float32) * high_weight).to(DTYPE).to(tl.float32)
    return low, high


@jit()
def _added(
    total: tl.tensor,
    words: tl.tensor,
    pair: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    J: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """total + (codes J - zero points) * x for words [n, blocks, _PAIRS], without scales. pair: [n, blocks]"""
    base: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 1024.0
    zero = (-zero_of(pair, DTYPE).to(tl.float32) - base)[:, :, None]
    words = words >> (4 * J)
    first = ((words & 0xF) | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)
    second = ((words & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True) - (zero + 128.0)
    total += first * low[None, :, :]
    return total + second * high[None, :, :]


@jit()
def _product(
    words: tl.tensor,
    scale_ptrs: tl.tensor,
    live: tl.tensor,
    block: tl.tensor,
    N: tl.constexpr,
    x0: tl.tensor,
    y0: tl.tensor,
    x1: tl.tensor,
    y1: tl.tensor,
    x2: tl.tensor,
    y2: tl.tensor,
    x3: tl.tensor,
    y3: tl.tensor,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The products of words [n, blocks, _PAIRS] with the pairs (x, y) [blocks, _PAIRS] of 4 parts of x."""
    pair = tl.load(scale_ptrs + block * 128 // GROUP * N, mask=live, other=0)
    nothing = tl.zeros(words.shape, dtype=tl.float32)
    total = _added(nothing, words, pair, x0, y0, 0, DTYPE)
    if GROUP >= 128:
        total = _added(total, words, pair, x1, y1, 1, DTYPE)
        total = _added(total, words, pair, x2, y2, 2, DTYPE)
        total = _added(total, words, pair, x3, y3, 3, DTYPE)
        total *= scale_of(pair, DTYPE).to(tl.float32)[:, :, None]
    else:
        total *= scale_of(pair, DTYPE).to(tl.float32)[:, :, None]
        pair = tl.load(scale_ptrs + (block * 128 + 32) // GROUP * N, mask=live, other=0)
        part = _added(nothing, words, pair, x1, y1, 1, DTYPE)
        total += part * scale_of(pair, DTYPE).to(tl.float32)[:, :, None]
        pair = tl.load(scale_ptrs + (block * 128 + 64) // GROUP * N, mask=live, other=0)
        part = _added(nothing, words, pair, x2, y2, 2, DTYPE)
        total += part * scale_of(pair, DTYPE).to(tl.float32)[:, :, None]
        pair = tl.load(scale_ptrs + (block * 128 + 96) // GROUP * N, mask=live, other=0)
        part = _added(nothing, words, pair, x3, y3, 3, DTYPE)
        total += part * scale_of(pair, DTYPE).to(tl.float32)[:, :, None]
    return total


@jit()
def _int4_gemv_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_stride: int,
    eps: float,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
    PAIRS: tl.constexpr = _PAIRS,
    SUB: tl.constexpr = SUB,
) -> None:
    """One program per row and BLOCK_N outputs. With a norm or residual, BLOCKS covers K. Pointers
    are to int32 words."""
    WIDTH: tl.constexpr = 2 * N if GATED else N  # rows of the weight
    TOTAL: tl.constexpr = (K + 127) // 128
    row = (tl.program_id(0) % ROWS).to(tl.int64)
    outputs = tl.program_id(0) // ROWS * BLOCK_N + tl.arange(0, BLOCK_N)
    blocks = tl.arange(0, BLOCKS)
    pairs = tl.arange(0, PAIRS)
    word_ptrs = words_ptr + blocks.to(tl.int64)[None, :, None] * (WIDTH * PAIRS)
    word_ptrs += outputs[:, None, None] * PAIRS + pairs[None, None, :]
    scale_ptrs = scales_ptr + outputs[:, None]
    live = (outputs < N)[:, None] & (blocks < TOTAL)[None, :]
    words = tl.load(word_ptrs, mask=live[:, :, None], other=0)
    up_words = words
    if GATED:
        up_words = tl.load(word_ptrs + N * PAIRS, mask=live[:, :, None], other=0)
    await_inputs(USE_PDL)  # while the weights are loading
    x_ptr += row * x_stride
    if residual_ptr is not None:
        residual_ptr += row * (K // 2)
        sum_ptr += row * (K // 2)
    at = (blocks * 2 * SUB)[:, None] + pairs[None, :]
    mask = at < K // 2
    mask1 = at + 16 < K // 2
    mask2 = at + 32 < K // 2
    mask3 = at + 48 < K // 2
    x0, y0 = _read(x_ptr, residual_ptr, sum_ptr, at, mask, ROWS, DTYPE)
    x1, y1 = _read(x_ptr, residual_ptr, sum_ptr, at + 16, mask1, ROWS, DTYPE)
    x2, y2 = _read(x_ptr, residual_ptr, sum_ptr, at + 32, mask2, ROWS, DTYPE)
    x3, y3 = _read(x_ptr, residual_ptr, sum_ptr, at + 48, mask3, ROWS, DTYPE)
    if norm_ptr is not None:
        squares = x0 * x0 + y0 * y0 + x1 * x1 + y1 * y1 + x2 * x2 + y2 * y2 + x3 * x3 + y3 * y3
        factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
        x0, y0 = _normed(x0, y0, norm_ptr, at, mask, factor, DTYPE)
        x1, y1 = _normed(x1, y1, norm_ptr, at + 16, mask1, factor, DTYPE)
        x2, y2 = _normed(x2, y2, norm_ptr, at + 32, mask2, factor, DTYPE)
        x3, y3 = _normed(x3, y3, norm_ptr, at + 48, mask3, factor, DTYPE)
    block = blocks[None, :]
    acc = _product(
        words, scale_ptrs, live, block, WIDTH, x0, y0, x1, y1, x2, y2, x3, y3, GROUP=GROUP, DTYPE=DTYPE
    )
    up_acc = acc
    if GATED:
        up_acc = _product(
            up_words,
            scale_ptrs + N,
            live,
            block,
            WIDTH,
            x0,
            y0,
            x1,
            y1,
            x2,
            y2,
            x3,
            y3,
            GROUP=GROUP,
            DTYPE=DTYPE,
        )
    for start in tl.static_range(BLOCKS, TOTAL, BLOCKS):
        at = ((start + blocks) * 2 * SUB)[:, None] + pairs[None, :]
        x0, y0 = _floats(tl.load(x_ptr + at, mask=at < K // 2, other=0), DTYPE)
        x1, y1 = _floats(tl.load(x_ptr + at + 16, mask=at + 16 < K // 2, other=0), DTYPE)
        x2, y2 = _floats(tl.load(x_ptr + at + 32, mask=at + 32 < K // 2, other=0), DTYPE)
        x3, y3 = _floats(tl.load(x_ptr + at + 48, mask=at + 48 < K // 2, other=0), DTYPE)
        block = (start + blocks)[None, :]
        live = (outputs < N)[:, None] & (block < TOTAL)
        word_ptrs += BLOCKS * WIDTH * PAIRS
        words = tl.load(word_ptrs, mask=live[:, :, None], other=0)
        acc += _product(
            words, scale_ptrs, live, block, WIDTH, x0, y0, x1, y1, x2, y2, x3, y3, GROUP=GROUP, DTYPE=DTYPE
        )
        if GATED:
            words = tl.load(word_ptrs + N * PAIRS, mask=live[:, :, None], other=0)
            up_acc += _product(
                words,
                scale_ptrs + N,
                live,
                block,
                WIDTH,
                x0,
                y0,
                x1,
                y1,
                x2,
                y2,
                x3,
                y3,
                GROUP=GROUP,
                DTYPE=DTYPE,
            )
    out = tl.sum(tl.sum(acc, axis=2), axis=1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(tl.sum(up_acc, axis=2), axis=1)
        if bias_ptr is not None:
            up += tl.load(bias_ptr + N + outputs, mask=outputs < N, other=0.0).to(tl.float32)
        out = gated(out.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), DTYPE)
    tl.store(out_ptr + row * N + outputs, out.to(DTYPE), mask=outputs < N)


def int4_gemv_triton(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    silu: bool = False,
    shape: GemvShape | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gemv` for a weight of 4 bits, with the same arguments and results. K and x's row stride are even."""
    rows, k = x.shape
    n = weight.n // 2 if silu else weight.n
    out = x.new_empty(rows, n)
    total = x if residual is None else torch.empty_like(residual)
    if rows == 0:
        return out, total
    assert x.shape[1] == weight.k and (residual is None or residual.is_contiguous())
    blocks = next_power_of_2(len(weight.words))
    whole = norm_weight is not None or residual is not None
    shape = shape or choose_gemv_shape(blocks if whole else 1, silu)
    blocks = blocks if whole else min(shape.blocks, blocks)
    _int4_gemv_kernel[(rows * -(-n // shape.columns),)](
        as_pairs(x),
        None if residual is None else as_pairs(residual),
        None if norm_weight is None else as_pairs(norm_weight[None]),
        weight.words.view(torch.int32),
        weight.scales,
        bias,
        out,
        None if residual is None else as_pairs(total),
        x.stride(0) // 2,
        eps,
        ROWS=rows,
        N=n,
        K=k,
        GROUP=weight.group,
        BLOCK_N=shape.columns,
        BLOCKS=blocks,
        GATED=silu,
        DTYPE=triton_dtype(x.dtype),
        num_warps=shape.warps,
        **pdl_options(x),
    )
    return out, total


def as_pairs(x: torch.Tensor) -> torch.Tensor:
    """Rows x [T, K] of 16 bits as int32 [T, K / 2]."""
    return x.view(torch.int32)


def int4_gemv_reference(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    silu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`int4_gemv` in plain torch."""
    x = total = x if residual is None else x + residual
    if norm_weight is not None:
        x = rms_norm_reference(total, norm_weight, eps)
    out = int4_linear_reference(x, weight, bias)
    return silu_and_mul_reference(out) if silu else out, total


int4_gemv = by_device(int4_gemv_triton, int4_gemv_reference)


def use_int4_gemv(x: torch.Tensor) -> bool:
    """Whether `int4_gemv` is the fastest kernel for these rows."""
    return use_triton(x) and x.dim() == 2 and len(x) == 1 and x.data_ptr() % 4 == 0
