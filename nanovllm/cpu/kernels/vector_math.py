"""More vectors of 16 lanes for kernels: functions of mathematics, comparisons, and single bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from nanovllm.cpu.kernels.emitting import (
    F32,
    I16,
    I32,
    I64,
    VF,
    VI,
    call,
    constant,
    emitted,
    f32,
    f32x16,
    i32x16,
    i64,
    multiply_add,
    spread,
)
from nanovllm.cpu.kernels.vectors import emit_exp


def _polynomial(b: Any, x: Any, factors: tuple[float, ...]) -> Any:
    """Horner's rule; `factors` from the highest power on."""
    y = constant(factors[0])
    for factor in factors[1:]:
        y = multiply_add(b, y, x, constant(factor))
    return y


# The polynomial of degree 6 that is nearest to 2**r for |r| <= 1/2: a relative error of 2e-9 before rounding.
_EXP2 = (1.53458120e-4, 1.33999312e-3, 9.61848896e-3, 5.55032878e-2, 2.40226469e-1, 6.93147206e-1, 1.0)
_TO_INTEGER = 12582912.0  # 1.5 * 2**23: added to a float32, it leaves the nearest integer in the lowest bits


def _exp2_normal(b: Any, x: Any) -> Any:
    least, magic = constant(-126.0), constant(_TO_INTEGER)
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    shifted = b.fadd(x, magic)
    y = _polynomial(b, b.fsub(x, b.fsub(shifted, magic)), _EXP2)
    return b.bitcast(b.add(b.bitcast(y, VI), b.shl(b.bitcast(shifted, VI), constant(23, VI))), VF)


@emitted(f32x16, f32x16)
def exp2_normal(b: Any, x: Any) -> Any:
    """As `exp2`, but 2**-126 below -126."""
    return _exp2_normal(b, x)


@emitted(f32x16, f32x16)
def exp2(b: Any, x: Any) -> Any:
    """2**x for x up to 0, with a relative error below 2e-7; 0 below -126. Not for NaN."""
    there = b.fcmp_ordered(">=", x, constant(-126.0))
    return b.select(there, _exp2_normal(b, x), constant(0.0))


# erfc(z) is t * exp(-z * z + polynomial(t)) with t = 1 / (1 + z / 2), for z from 0 on: the Chebyshev fit of
# Press et al., Numerical Recipes, section 6.2, with a relative error below 1.2e-7.
_ERFC = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)


@emitted(f32x16, f32x16)
def erfc(b: Any, x: Any) -> Any:
    """1 - the error function; its relative error grows to 5e-6 where it is 1e-30. NaN stays."""
    size = b.bitcast(b.and_(b.bitcast(x, VI), constant(0x7FFFFFFF, VI)), VF)
    t = b.fdiv(constant(1.0), multiply_add(b, size, constant(0.5), constant(1.0)))
    power = multiply_add(b, b.fneg(size), size, _polynomial(b, t, _ERFC))
    tail = b.fmul(t, emit_exp(b, power))
    return b.select(b.fcmp_ordered("<", x, constant(0.0)), b.fsub(constant(2.0), tail), tail)


@emitted(f32x16, f32x16)
def bad_as_infinity(b: Any, x: Any) -> Any:
    """`x`, with +inf for NaN."""
    infinity = constant(float("inf"))
    return b.select(b.fcmp_ordered("<", x, infinity), x, infinity)


@emitted(i64, f32x16, f32x16)
def reaching(b: Any, x: Any, floor: Any) -> Any:
    """A bit for each lane, the lowest for the first one: whether x >= floor."""
    bits = b.bitcast(b.fcmp_ordered(">=", x, floor), I16)
    return b.zext(bits, I64)


@emitted(i32x16, i32x16, f32x16, f32x16)
def count_reaching(b: Any, counts: Any, x: Any, floor: Any) -> Any:
    """Each lane's count, plus 1 where x >= floor."""
    return b.sub(counts, b.sext(b.fcmp_ordered(">=", x, floor), VI))


@emitted(i32x16, i64)
def splat_int(b: Any, x: Any) -> Any:
    """`x` in every lane."""
    return spread(b, b.trunc(x, I32))


@emitted(i64, i32x16)
def total_int(b: Any, x: Any) -> Any:
    """The sum of the lanes."""
    return b.sext(call(b, "llvm.vector.reduce.add.v16i32", I32, x), I64)


@emitted(i64, i64)
def lowest_bit(b: Any, x: Any) -> Any:
    """The place of the lowest bit that is 1; `x` is not 0."""
    return call(b, "llvm.cttz.i64", I64, x, ir.Constant(ir.IntType(1), 1))


@emitted(f32, i64)
def float_of_bits(b: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return b.bitcast(b.trunc(bits, I32), F32)


@emitted(i64, f32)
def bits_of_float(b: Any, x: Any) -> Any:
    """The 32 bits of a float32, as int32."""
    return b.sext(b.bitcast(x, I32), I64)
