"""More vectors of 16 lanes for kernels: functions of mathematics, comparisons, and single bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from nanovllm.kernels.cpu.emitting import (
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
    spread,
)
from nanovllm.kernels.cpu.vectors import emit_exp


def _polynomial(b: Any, x: Any, factors: tuple[float, ...]) -> Any:
    """Horner's rule; `factors` from the highest power on."""
    y = constant(factors[0])
    for factor in factors[1:]:
        y = call(b, "llvm.fma.v16f32", VF, y, x, constant(factor))
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


# Formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions: an error below 1.5e-7.
_ERF_P = 0.3275911
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0)


@emitted(f32x16, f32x16)
def erf(b: Any, x: Any) -> Any:
    """The error function, with an absolute error below 5e-7; NaN stays."""
    bits = b.bitcast(x, VI)
    size = b.bitcast(b.and_(bits, constant(0x7FFFFFFF, VI)), VF)
    t = b.fdiv(constant(1.0), call(b, "llvm.fma.v16f32", VF, size, constant(_ERF_P), constant(1.0)))
    tail = b.fmul(_polynomial(b, t, _ERF), emit_exp(b, b.fneg(b.fmul(size, size))))
    sign = b.and_(bits, constant(-0x80000000, VI))
    return b.bitcast(b.or_(b.bitcast(b.fsub(constant(1.0), tail), VI), sign), VF)


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
