"""Values of E2M1 in weights of 4 bits, MXFP4 and NVFP4, become floats in the registers of a kernel.

Two neighbours share a register, and each step is one instruction for both. Owns no weight.
"""

from __future__ import annotations

from typing import Any

from nanovllm.formats.int4.kernels.layout import SIGN_BITS, SIZE_BITS
from nanovllm.kernels.compat import HAS_TRITON, INTERPRETED, jit, tl


def constant(asm: str) -> Any:
    """Instructions as a constant of kernels."""
    return tl.constexpr(asm) if HAS_TRITON else asm


def _asm_code(place: int, first: int) -> str:
    """Move the bits of two codes ($1) to the sign, and to bits `first` to `first` + 2, which are the last of
    the exponent and the first of the fraction."""
    sign, size = 15 - SIGN_BITS[place], first - SIZE_BITS[place]  # how far bits move to the left
    bits = (7 << first) * 0x10001
    code = f"shl.b32 code, $1, {size};" if size >= 0 else f"shr.b32 code, $1, {-size};"
    if sign == size:
        return code + f"and.b32 code, code, {bits | 0x80008000:#x};"
    if moves_apart(place, first):  # one product moves both, and leaves copies at bits that are masked
        own = (7 << SIZE_BITS[place] | 1 << SIGN_BITS[place]) * 0x10001
        product = f"mul.lo.u32 code, code, {(1 << size) + (1 << sign)};"
        return f"and.b32 code, $1, {own:#x}; {product} and.b32 code, code, {bits | 0x80008000:#x};"
    code += f"shl.b32 sign, $1, {sign}; and.b32 sign, sign, 0x80008000;"
    return code + f"lop3.b32 code, code, {bits:#x}, sign, 0xEA;"


def moves_apart(place: int, first: int) -> bool:
    """Whether a code's bits, moved as its sign is and as its size is, meet nowhere: no bit of a sum of both
    carries, and none but the wanted ones lies at the sign or the size of either half of a register."""
    sign, size = 15 - SIGN_BITS[place], first - SIZE_BITS[place]
    own = {SIGN_BITS[place], *range(SIZE_BITS[place], SIZE_BITS[place] + 3)}
    by_sign, by_size = ({bit + moved for bit in own} for moved in (sign, size))
    wanted = {15, *range(first, first + 3)}
    others = {bit % 16 for bit in (by_sign | by_size) - wanted}
    return size >= 0 and not by_sign & by_size and not others & wanted


def mxfp4_asm(place: int) -> Any:
    """Two values of MXFP4 as bfloat16. The bits of a code ($1) become the sign, and the last bits of the
    exponent and the first of the fraction; byte `place` of the words of scales ($2, $3: the same) becomes
    the exponent of the factor."""
    return constant(f"""{{
        .reg .b32 code, sign, scale, zero;
        {_asm_code(place, 6)}
        prmt.b32 scale, $2, 0, {place << 12 | place << 4 | 0x404:#x};
        shr.b32 scale, scale, 1;
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 $0, code, scale, zero;
    }}""")


_MXFP4_0, _MXFP4_1, _MXFP4_2, _MXFP4_3 = (mxfp4_asm(place) for place in range(4))


def nvfp4_asm(place: int, kind: str) -> Any:
    """Two values of NVFP4. The bits of a code ($1) become a float as in `mxfp4_asm`. $2 ($3: the same) has
    the factors of codes 0 and 2, or of 1 and 3; see `nvfp4_factors`."""
    first = {"bf16": 6, "f16": 9}[kind]
    product = {"bf16": "fma.rn.bf16x2 $0, code, scale, zero;", "f16": "mul.rn.f16x2 $0, code, scale;"}[kind]
    return constant(f"""{{
        .reg .b32 code, sign, scale, zero;
        {_asm_code(place, first)}
        prmt.b32 scale, $2, 0, {0x3232 if place > 1 else 0x1010:#x};
        mov.b32 zero, 0x80008000;
        {product}
    }}""")


_NVFP4_BF16_0, _NVFP4_BF16_1, _NVFP4_BF16_2, _NVFP4_BF16_3 = (nvfp4_asm(j, "bf16") for j in range(4))
_NVFP4_F16_0, _NVFP4_F16_1, _NVFP4_F16_2, _NVFP4_F16_3 = (nvfp4_asm(j, "f16") for j in range(4))


@jit()
def mxfp4_values(words: tl.tensor, octets: tl.tensor, J: tl.constexpr) -> tl.tensor:
    """Codes J of int16 `words` [..., SUB] times their scales, bytes J of `octets` [...], in bfloat16."""
    tl.static_assert(J >= 0 and J < 4, "a word has codes 0 to 3")
    octets = tl.broadcast_to(tl.expand_dims(octets, -1), words.shape)
    if INTERPRETED:
        octet = (octets >> (8 * J)) & 255
        scale = tl.where(octet == 0, 0.0, tl.exp2((octet - 253).to(tl.float32)))
        values = (_e2m1(words, J) * scale).to(tl.bfloat16)
    elif J == 0:
        values = _scaled_bf16(_MXFP4_0, words, octets)
    elif J == 1:
        values = _scaled_bf16(_MXFP4_1, words, octets)
    elif J == 2:
        values = _scaled_bf16(_MXFP4_2, words, octets)
    else:
        values = _scaled_bf16(_MXFP4_3, words, octets)
    return values


@jit()
def nvfp4_factors(octets: tl.tensor, ODD: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Two of the four bytes of scales in each of `octets`, 0 and 2 or with ODD 1 and 3, as floats in the
    halves of a register, with 2 ** -9: a byte becomes the last five bits of the exponent and the first three
    of the fraction."""
    if tl.bfloat16 == DTYPE:
        factors = ((octets >> 4) if ODD else (octets << 4)) & 0x0FF00FF0 | 0x70007000
    elif tl.float16 == DTYPE:
        factors = ((octets >> 1) if ODD else (octets << 7)) & 0x7F807F80
    else:
        tl.static_assert(False, "no code here for this DTYPE of 4 bits")
    return factors


@jit()
def nvfp4_values(words: tl.tensor, octets: tl.tensor, J: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Codes J of int16 `words` [..., SUB] times their scales, bytes J of `octets` [...] or of the same
    shape, and 2 ** -9, in DTYPE: exactly."""
    tl.static_assert(J >= 0 and J < 4, "a word has codes 0 to 3")
    factors = nvfp4_factors(octets, J % 2 == 1, DTYPE)
    if len(factors.shape) < len(words.shape):
        factors = tl.broadcast_to(tl.expand_dims(factors, -1), words.shape)
    if INTERPRETED:
        small: tl.constexpr = 2.0**-126 * (tl.bfloat16 == DTYPE) + 2.0**-14 * (tl.float16 == DTYPE)
        factor = (factors >> (16 * (J // 2))).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        values = (_e2m1(words, J) * (factor * small)).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        if J == 0:
            values = _scaled_bf16(_NVFP4_BF16_0, words, factors)
        elif J == 1:
            values = _scaled_bf16(_NVFP4_BF16_1, words, factors)
        elif J == 2:
            values = _scaled_bf16(_NVFP4_BF16_2, words, factors)
        else:
            values = _scaled_bf16(_NVFP4_BF16_3, words, factors)
    elif tl.float16 == DTYPE:
        if J == 0:
            values = _scaled_f16(_NVFP4_F16_0, words, factors)
        elif J == 1:
            values = _scaled_f16(_NVFP4_F16_1, words, factors)
        elif J == 2:
            values = _scaled_f16(_NVFP4_F16_2, words, factors)
        else:
            values = _scaled_f16(_NVFP4_F16_3, words, factors)
    else:
        tl.static_assert(False, "no code here for this DTYPE of 4 bits")
    return values


@jit()
def _e2m1(words: tl.tensor, J: tl.constexpr) -> tl.tensor:
    """The values of codes J in float32, for the interpreter."""
    bits = words.to(tl.int32)
    sign: tl.constexpr = 12 if J == 1 else (15 if J == 0 else 11 + J)  # as SIGN_BITS and SIZE_BITS
    start: tl.constexpr = 9 if J == 3 else 6 - 3 * J
    fraction = ((bits >> start) & 1).to(tl.float32) * 0.5
    exponent = (bits >> (start + 1)) & 3
    size = tl.where(exponent == 0, fraction, (1.0 + fraction) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where((bits >> sign) & 1 == 1, -size, size)


@jit()
def _scaled_bf16(ASM: tl.constexpr, words: tl.tensor, octets: tl.tensor) -> tl.tensor:
    """The instructions ASM on two neighbours at once, which share a register and a scale."""
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [words, octets], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@jit()
def _scaled_f16(ASM: tl.constexpr, words: tl.tensor, octets: tl.tensor) -> tl.tensor:
    """The same in float16."""
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [words, octets], dtype=tl.float16, is_pure=True, pack=2)


@jit()
def half_of(pair: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """The four bytes of scales of a half of NVFP4's words, of all eight."""
    return (pair >> (32 * HALF)).to(tl.int32)
