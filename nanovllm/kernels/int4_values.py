"""Weights of 4 bits become floats: in the registers of a kernel that multiplies them, or as a whole matrix.

Two neighbours share a register, and each step is one instruction for both. Owns no weight.
"""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.kernels.compat import HAS_TRITON, INTERPRETED, await_inputs, by_device, jit, pdl_options, tl
from nanovllm.kernels.int4_layout import BLOCK, SUB, Int4Weight, dequantise_reference


def _text(asm: str) -> Any:
    return tl.constexpr(asm) if HAS_TRITON else asm


def _asm(shift: int, base: int, one: int, kind: str) -> Any:
    """Two codes of 4 bits at `shift`, as floats without their zero points: exact. Each code becomes the last
    bits of a float `base`; $2 is -(base + zero point)."""
    return _text(f"""{{
        .reg .b32 code, one;
        shr.b32 code, $1, {shift};
        lop3.b32 code, code, 0x000F000F, {base | base << 16:#x}, 0xEA;
        mov.b32 one, {one | one << 16:#x};
        fma.rn.{kind}x2 $0, code, one, $2;
    }}""")


_BF16_0, _BF16_1, _BF16_2, _BF16_3 = (_asm(shift, 0x4300, 0x3F80, "bf16") for shift in (0, 4, 8, 12))
_F16_0, _F16_1, _F16_2, _F16_3 = (_asm(shift, 0x6400, 0x3C00, "f16") for shift in (0, 4, 8, 12))
_BF16_MUL = _text("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }")
_F16_MUL = _text("mul.rn.f16x2 $0, $1, $2;")


@jit()
def _values(words: tl.tensor, zero: tl.tensor, J: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Codes J of int16 `words` [n, SUB] minus their zero points, exactly. zero: [n], -(base + zero point)."""
    zero = tl.broadcast_to(zero[:, None], words.shape)
    if INTERPRETED:
        base: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 1024.0
        codes = ((words.to(tl.int32) >> (4 * J)) & 15).to(tl.float32)
        values = (codes + base + zero.to(tl.float32)).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        if J == 0:
            values = _two(_BF16_0, words, zero)
        elif J == 1:
            values = _two(_BF16_1, words, zero)
        elif J == 2:
            values = _two(_BF16_2, words, zero)
        else:
            values = _two(_BF16_3, words, zero)
    elif J == 0:
        values = _two(_F16_0, words, zero)
    elif J == 1:
        values = _two(_F16_1, words, zero)
    elif J == 2:
        values = _two(_F16_2, words, zero)
    else:
        values = _two(_F16_3, words, zero)
    return values


@jit()
def _two(ASM: tl.constexpr, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """The instructions ASM on two neighbours at once, which share a register."""
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [first, second], dtype=second.dtype, is_pure=True, pack=2)


@jit()
def _scaled(values: tl.tensor, scale: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """values [n, SUB] * scale [n], rounded to DTYPE."""
    scale = tl.broadcast_to(scale[:, None], values.shape)
    if INTERPRETED:
        values = (values.to(tl.float32) * scale.to(tl.float32)).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        values = _two(_BF16_MUL, values, scale)
    else:
        values = _two(_F16_MUL, values, scale)
    return values


@jit()
def _zero_of(pair: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The upper half of words of `Int4Weight.scales`: -(base + zero point)."""
    return (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@jit()
def _scale_of(pair: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The lower half of words of `Int4Weight.scales`."""
    return pair.to(tl.int16).to(DTYPE, bitcast=True)


@jit()
def tile_values(
    words: tl.tensor,
    pair: tl.tensor,
    pairs: tl.tensor,
    block: tl.tensor,
    N: tl.tensor,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
    columns: tl.tensor,
) -> tl.tensor:
    """The values [n, BLOCK] of a block of words [n, SUB]."""
    pair1 = pair
    pair2 = pair
    pair3 = pair
    if GROUP == 64:
        pair2 = tl.load(pairs + (2 * block + 1) * N, mask=columns < N, other=0)
        pair3 = pair2
    if GROUP == 32:
        pair1 = tl.load(pairs + (4 * block + 1) * N, mask=columns < N, other=0)
        pair2 = tl.load(pairs + (4 * block + 2) * N, mask=columns < N, other=0)
        pair3 = tl.load(pairs + (4 * block + 3) * N, mask=columns < N, other=0)
    first = _values(words, _zero_of(pair, DTYPE), 0, DTYPE)
    second = _values(words, _zero_of(pair1, DTYPE), 1, DTYPE)
    third = _values(words, _zero_of(pair2, DTYPE), 2, DTYPE)
    fourth = _values(words, _zero_of(pair3, DTYPE), 3, DTYPE)
    first = _scaled(first, _scale_of(pair, DTYPE), DTYPE)
    second = _scaled(second, _scale_of(pair1, DTYPE), DTYPE)
    third = _scaled(third, _scale_of(pair2, DTYPE), DTYPE)
    fourth = _scaled(fourth, _scale_of(pair3, DTYPE), DTYPE)
    four = tl.join(tl.join(first, third), tl.join(second, fourth))
    return four.permute(0, 2, 3, 1).reshape(words.shape[0], BLOCK)


def triton_dtype(dtype: torch.dtype) -> Any:
    """The constant of a kernel for `dtype`, float16 or bfloat16."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


@jit()
def _dequantise_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: int,
    K: int,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
    SUB: tl.constexpr = SUB,
) -> None:
    """One program per ROWS rows of the weight and BLOCK columns."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SUB)
    block = tl.program_id(1)
    exists = (rows < N)[:, None]
    word_ptrs = words_ptr + (block * N + rows).to(tl.int64)[:, None] * SUB + columns[None, :]
    words = tl.load(word_ptrs, mask=exists, other=0)
    await_inputs(USE_PDL)
    pairs = scales_ptr + rows
    pair = tl.load(pairs + block * BLOCK // GROUP * N, mask=rows < N, other=0)
    values = tile_values(words, pair, pairs, block, N, GROUP, DTYPE, BLOCK, SUB, rows)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(out_ptrs, values, mask=exists & (columns < K)[None, :])


def dequantise_triton(words: torch.Tensor, weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """`dequantise` with Triton."""
    out = torch.empty(weight.n, weight.k, dtype=dtype, device=words.device)
    _dequantise_kernel[(-(-weight.n // 64), len(words))](
        words,
        weight.scales,
        out,
        weight.n,
        weight.k,
        GROUP=weight.group,
        ROWS=64,
        DTYPE=triton_dtype(dtype),
        num_warps=4,
        **pdl_options(words),
    )
    return out


dequantise = by_device(dequantise_triton, dequantise_reference)
