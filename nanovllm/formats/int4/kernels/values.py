"""Weights of 4 bits become floats: in the registers of a kernel that multiplies them, or as a whole matrix.

Two neighbours share a register, and each step is one instruction for both. Owns no weight.
"""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.formats.int4.kernels.e2m1 import constant, half_of, mxfp4_values, nvfp4_values
from nanovllm.formats.int4.kernels.layout import BLOCK, SUB, Int4Experts, Int4Weight, dequantise_reference
from nanovllm.kernels.compat import INTERPRETED, await_inputs, by_device, jit, pdl_options, tl
from nanovllm.kernels.kinds import Kinds

# The constants of kernels, by name: without Triton there are none.
_DTYPES = Kinds("dtype of 4 bits", {torch.bfloat16: "bfloat16", torch.float16: "float16"})


def _asm(shift: int, base: int, one: int, kind: str) -> Any:
    """Two codes of 4 bits at `shift`, as floats without their zero points: exact. Each code becomes the last
    bits of a float `base`; $2 is -(base + zero point)."""
    return constant(f"""{{
        .reg .b32 code, one;
        shr.b32 code, $1, {shift};
        lop3.b32 code, code, 0x000F000F, {base | base << 16:#x}, 0xEA;
        mov.b32 one, {one | one << 16:#x};
        fma.rn.{kind}x2 $0, code, one, $2;
    }}""")


_BF16_0, _BF16_1, _BF16_2, _BF16_3 = (_asm(shift, 0x4300, 0x3F80, "bf16") for shift in (0, 4, 8, 12))
_F16_0, _F16_1, _F16_2, _F16_3 = (_asm(shift, 0x6400, 0x3C00, "f16") for shift in (0, 4, 8, 12))
_BF16_MUL = constant("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }")
_F16_MUL = constant("mul.rn.f16x2 $0, $1, $2;")


@jit()
def _values(words: tl.tensor, zero: tl.tensor, J: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Codes J of int16 `words` [..., SUB] minus zero points, exactly. zero [...]: -(base + zero point)."""
    tl.static_assert(J >= 0 and J < 4, "a word has codes 0 to 3")
    zero = tl.broadcast_to(tl.expand_dims(zero, -1), words.shape)
    if INTERPRETED:
        base: tl.constexpr = 128.0 * (tl.bfloat16 == DTYPE) + 1024.0 * (tl.float16 == DTYPE)
        tl.static_assert(base > 0, "no code here for this DTYPE of 4 bits")
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
    elif tl.float16 == DTYPE:
        if J == 0:
            values = _two(_F16_0, words, zero)
        elif J == 1:
            values = _two(_F16_1, words, zero)
        elif J == 2:
            values = _two(_F16_2, words, zero)
        else:
            values = _two(_F16_3, words, zero)
    else:
        tl.static_assert(False, "no code here for this DTYPE of 4 bits")
    return values


@jit()
def _two(ASM: tl.constexpr, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """The instructions ASM on two neighbours at once, which share a register."""
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [first, second], dtype=second.dtype, is_pure=True, pack=2)


@jit()
def _scaled(values: tl.tensor, scale: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """values [..., SUB] * scale [...], rounded to DTYPE."""
    scale = tl.broadcast_to(tl.expand_dims(scale, -1), values.shape)
    if INTERPRETED:
        values = (values.to(tl.float32) * scale.to(tl.float32)).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        values = _two(_BF16_MUL, values, scale)
    elif tl.float16 == DTYPE:
        values = _two(_F16_MUL, values, scale)
    else:
        tl.static_assert(False, "no code here for this DTYPE of 4 bits")
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
def code_values(
    words: tl.tensor, pair: tl.tensor, J: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """The values of codes J of `words` [..., SUB], whose words of scales are `pair` [...]."""
    if GROUP == 0:  # MXFP4
        values = mxfp4_values(words, pair, J)
    elif GROUP == 16:  # NVFP4
        values = nvfp4_values(words, pair, J, DTYPE)
    elif GROUP > 0:
        values = _scaled(_values(words, _zero_of(pair, DTYPE), J, DTYPE), _scale_of(pair, DTYPE), DTYPE)
    else:
        tl.static_assert(False, "no code here for this GROUP of 4 bits")
    return values


@jit()
def first_scale(block: tl.tensor, GROUP: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The number of the words of scales that codes 0 of a block have; for GROUP 64 those of codes 2 follow,
    and for 32 those of all codes."""
    known: tl.constexpr = GROUP == 0 or GROUP == 16 or GROUP == 32 or GROUP == 64
    tl.static_assert(known or (GROUP > 0 and GROUP % BLOCK == 0))
    return block if GROUP == 0 or GROUP == 16 else block * BLOCK // GROUP  # MXFP4, NVFP4


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
    inside: tl.tensor,
) -> tl.tensor:
    """The values [n, BLOCK] of a block of words [n, SUB]. pair: the words of its first scales, at `pairs`;
    N: from a group to the next one."""
    if GROUP == 16:  # NVFP4
        words = words.reshape(words.shape[0], 2, GROUP)
        pair = tl.join(half_of(pair, 0), half_of(pair, 1))
    pair1 = pair
    pair2 = pair
    pair3 = pair
    if GROUP == 64:
        pair2 = tl.load(pairs + (2 * block + 1) * N, mask=inside, other=0)
        pair3 = pair2
    if GROUP == 32:
        pair1 = tl.load(pairs + (4 * block + 1) * N, mask=inside, other=0)
        pair2 = tl.load(pairs + (4 * block + 2) * N, mask=inside, other=0)
        pair3 = tl.load(pairs + (4 * block + 3) * N, mask=inside, other=0)
    first = code_values(words, pair, 0, GROUP, DTYPE)
    second = code_values(words, pair1, 1, GROUP, DTYPE)
    third = code_values(words, pair2, 2, GROUP, DTYPE)
    fourth = code_values(words, pair3, 3, GROUP, DTYPE)
    four = tl.join(tl.join(first, third), tl.join(second, fourth))
    four = four.permute(0, 1, 3, 4, 2) if GROUP == 16 else four.permute(0, 2, 3, 1)
    return four.reshape(words.shape[0], BLOCK)


@jit()
def waited(total: tl.tensor) -> tl.tensor:
    """`total`, but the compiler sees that it is read. Else it would unpack the next values while tensor cores
    still read these from the same registers (Triton 3.6). Costs no instruction."""
    if not INTERPRETED:
        total = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [total], dtype=tl.float32, is_pure=True, pack=1
        )
    return total


def triton_dtype(dtype: torch.dtype) -> Any:
    """The constant of a kernel for `dtype`, float16 or bfloat16."""
    return getattr(tl, _DTYPES[dtype])


@jit()
def _dequantise_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: int,
    K: int,
    groups: int,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
    SUB: tl.constexpr = SUB,
) -> None:
    """One program per ROWS rows and BLOCK columns of each weight. groups: the rows of its scales."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SUB)
    block, weight = tl.program_id(1), tl.program_id(2).to(tl.int64)
    exists = (rows < N)[:, None]
    word_ptrs = (
        words_ptr + ((weight * tl.num_programs(1) + block) * N + rows)[:, None] * SUB + columns[None, :]
    )
    words = tl.load(word_ptrs, mask=exists, other=0)
    await_inputs(USE_PDL)
    pairs = scales_ptr + weight * groups * N + rows
    pair = tl.load(pairs + first_scale(block, GROUP, BLOCK) * N, mask=rows < N, other=0)
    values = tile_values(words, pair, pairs, block, N, GROUP, DTYPE, BLOCK, rows < N)
    if factors_ptr is not None:
        factors = tl.load(factors_ptr + weight * N + rows, mask=rows < N, other=0.0)
        values = (values.to(tl.float32) * factors[:, None]).to(DTYPE)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    out_ptrs = out_ptr + (weight * N + rows)[:, None] * K + columns[None, :]
    tl.store(out_ptrs, values, mask=exists & (columns < K)[None, :])


def _dequantised(
    words: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor | None, out: torch.Tensor, group: int
) -> torch.Tensor:
    """Fill out [E, n, k]. words: [E, blocks, n, SUB], scales: [E, groups, n], factors: [E, n]."""
    num, n, k = out.shape
    _dequantise_kernel[(-(-n // 64), words.shape[1], num)](
        words,
        scales,
        factors,
        out,
        n,
        k,
        scales.shape[1],
        GROUP=group,
        ROWS=64,
        DTYPE=triton_dtype(out.dtype),
        num_warps=4,
        **pdl_options(words),
    )
    return out


def dequantise_triton(words: torch.Tensor, weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """`dequantise` with Triton."""
    out = torch.empty(1, weight.n, weight.k, dtype=dtype, device=words.device)
    factors = None if weight.factors is None else weight.factors[None]
    return _dequantised(words[None], weight.scales[None], factors, out, weight.group)[0]


def dequantise_experts(experts: Int4Experts) -> torch.Tensor:
    """The weights of all experts, [E, n, k], with Triton."""
    words = experts.words
    out = torch.empty(experts.shape, dtype=experts.dtype, device=words.device)
    return _dequantised(words, experts.scales, experts.factors, out, experts.group)


dequantise = by_device(dequantise_triton, dequantise_reference)
