"""Vectors of 16 lanes for kernels: each function here becomes a few instructions of LLVM, on any CPU.

Addresses are plain integers. A vector is `f32x16` or `i32x16`; on CPUs with narrower registers LLVM splits
it. Only dot products have a form for each instruction set. With NANOVLLM_CPU_CHECK=1 every access is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from nanovllm.cpu import isa
from nanovllm.cpu.kernels import emitting as e
from nanovllm.cpu.kernels.emitting import (
    LANES,
    call,
    constant,
    emitted,
    load,
    multiply_add,
    shuffle,
    spread,
    store,
)

_I8, _I16, _I32, _I64, _VF, _VI = e.I8, e.I16, e.I32, e.I64, e.VF, e.VI
_F16, _BF16, _F32 = e.F16, e.BF16, e.F32
f32, f32x16, i32x16, i64, void = e.f32, e.f32x16, e.i32x16, e.i64, e.void


def _mask(b: Any, count: Any) -> Any:
    lanes = ir.Constant(_VI, list(range(LANES)))
    return b.icmp_signed("<", lanes, spread(b, b.trunc(count, _I32)))


def _widened(b: Any, bits: Any) -> Any:
    """16 x i16, the bits of bfloat16 -> float32."""
    return b.bitcast(b.shl(b.zext(bits, _VI), constant(16, _VI)), _VF)


def _narrowed(b: Any, x: Any) -> Any:
    """float32 -> 16 x i16, the bits of bfloat16, rounded to nearest even; NaN stays NaN."""
    if isa.has_bf16():
        return b.bitcast(b.fptrunc(x, ir.VectorType(_BF16, LANES)), ir.VectorType(_I16, LANES))
    bits = b.bitcast(x, _VI)
    odd = b.and_(b.lshr(bits, constant(16, _VI)), constant(1, _VI))
    rounded = b.lshr(b.add(b.add(bits, constant(0x7FFF, _VI)), odd), constant(16, _VI))
    quiet = b.or_(b.lshr(bits, constant(16, _VI)), constant(0x40, _VI))
    chosen = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
    return b.trunc(chosen, ir.VectorType(_I16, LANES))


# -- memory -------------------------------------------------------------------------------------------------

_V16, _VH = ir.VectorType(_I16, LANES), ir.VectorType(_F16, LANES)


@emitted(f32x16, i64)
def load_f32(b: Any, p: Any) -> Any:
    return load(b, p, _VF)


@emitted(f32x16, i64)
def load_bf16(b: Any, p: Any) -> Any:
    return _widened(b, load(b, p, _V16))


@emitted(f32x16, i64)
def load_f16(b: Any, p: Any) -> Any:
    return e.from_half(b, load(b, p, _VH))


@emitted(void, i64, f32x16)
def store_f32(b: Any, p: Any, x: Any) -> None:
    store(b, p, x)


@emitted(void, i64, f32x16)
def store_bf16(b: Any, p: Any, x: Any) -> None:
    store(b, p, _narrowed(b, x))


@emitted(void, i64, f32x16)
def store_f16(b: Any, p: Any, x: Any) -> None:
    store(b, p, e.to_half(b, x))


def _partial(b: Any, kind: Any, p: Any, count: Any) -> Any:
    """The first `count` elements at `p`, the other lanes 0. Reads nothing beyond them."""
    kept = b.alloca(kind)
    store_plain = b.store(ir.Constant(kind, None), kept)
    store_plain.align = 1
    first = b.bitcast(kept, kind.element.as_pointer())
    with cgutils.for_range(b, count) as loop:
        size = ir.Constant(_I64, {_I16: 2, _F16: 2, _F32: 4}[kind.element])
        value = load(b, b.add(p, b.mul(loop.index, size)), kind.element)
        b.store(value, b.gep(first, [loop.index]))
    value = b.load(kept)
    value.align = 1
    return value


def _store_partial(b: Any, p: Any, x: Any, count: Any) -> None:
    kept = b.alloca(x.type)
    b.store(x, kept).align = 1
    first = b.bitcast(kept, x.type.element.as_pointer())
    with cgutils.for_range(b, count) as loop:
        size = ir.Constant(_I64, {_I16: 2, _F16: 2, _F32: 4}[x.type.element])
        store(b, b.add(p, b.mul(loop.index, size)), b.load(b.gep(first, [loop.index])))


@emitted(f32x16, i64, i64)
def load_f32_part(b: Any, p: Any, count: Any) -> Any:
    return _partial(b, _VF, p, count)


@emitted(f32x16, i64, i64)
def load_bf16_part(b: Any, p: Any, count: Any) -> Any:
    return _widened(b, _partial(b, _V16, p, count))


@emitted(f32x16, i64, i64)
def load_f16_part(b: Any, p: Any, count: Any) -> Any:
    return e.from_half(b, _partial(b, _VH, p, count))


@emitted(void, i64, f32x16, i64)
def store_f32_part(b: Any, p: Any, x: Any, count: Any) -> None:
    _store_partial(b, p, x, count)


@emitted(void, i64, f32x16, i64)
def store_bf16_part(b: Any, p: Any, x: Any, count: Any) -> None:
    _store_partial(b, p, _narrowed(b, x), count)


@emitted(void, i64, f32x16, i64)
def store_f16_part(b: Any, p: Any, x: Any, count: Any) -> None:
    _store_partial(b, p, e.to_half(b, x), count)


# By the name of a dtype: (load, store) of 16 elements, and (load, store) of the first `count` of them.
WHOLE = {
    "float32": (load_f32, store_f32),
    "bfloat16": (load_bf16, store_bf16),
    "float16": (load_f16, store_f16),
}
PART = {
    "float32": (load_f32_part, store_f32_part),
    "bfloat16": (load_bf16_part, store_bf16_part),
    "float16": (load_f16_part, store_f16_part),
}


SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element


@emitted(i32x16, i64)
def load_i32(b: Any, p: Any) -> Any:
    return load(b, p, _VI)


@emitted(f32, i64)
def get_f32(b: Any, p: Any) -> Any:
    """One float32."""
    return load(b, p, _F32)


@emitted(void, i64, f32)
def set_f32(b: Any, p: Any, x: Any) -> None:
    store(b, p, x)


@emitted(f32, i64)
def get_bf16(b: Any, p: Any) -> Any:
    bits = b.shl(b.zext(load(b, p, _I16), _I32), ir.Constant(_I32, 16))
    return b.bitcast(bits, _F32)


@emitted(f32, i64)
def get_f16(b: Any, p: Any) -> Any:
    halves = b.bitcast(spread(b, load(b, p, _I16)), ir.VectorType(_F16, LANES))
    return b.extract_element(e.from_half(b, halves), ir.Constant(_I32, 0))


GET = {"float32": get_f32, "bfloat16": get_bf16, "float16": get_f16}  # one element, by the name of its dtype


@emitted(void, i64, f32)
def set_bf16(b: Any, p: Any, x: Any) -> None:
    """One bfloat16, rounded as `store_bf16`."""
    store(b, p, b.extract_element(_narrowed(b, spread(b, x)), ir.Constant(_I32, 0)))


@emitted(void, i64, f32)
def set_f16(b: Any, p: Any, x: Any) -> None:
    bits = b.bitcast(e.to_half(b, spread(b, x)), ir.VectorType(_I16, LANES))
    store(b, p, b.extract_element(bits, ir.Constant(_I32, 0)))


@emitted(i64, i64)
def get_i32(b: Any, p: Any) -> Any:
    """One int32, as int64."""
    return b.sext(load(b, p, _I32), _I64)


@emitted(void, i64, i64)
def set_i32(b: Any, p: Any, x: Any) -> None:
    store(b, p, b.trunc(x, _I32))


@emitted(i64, i64)
def get_i64(b: Any, p: Any) -> Any:
    return load(b, p, _I64)


@emitted(f32, i64)
def get_f64(b: Any, p: Any) -> Any:
    """One float64, as float32."""
    return b.fptrunc(load(b, p, ir.DoubleType()), _F32)


@emitted(void, i64, i64)
def set_i64(b: Any, p: Any, x: Any) -> None:
    store(b, p, x)


prefetch = emitted(void, i64)(e.prefetch)


# -- arithmetic ---------------------------------------------------------------------------------------------


@emitted(f32x16, f32)
def splat(b: Any, x: Any) -> Any:
    return spread(b, x)


@emitted(f32x16, f32x16, f32x16)
def add(b: Any, x: Any, y: Any) -> Any:
    return b.fadd(x, y)


@emitted(f32x16, f32x16, f32x16)
def sub(b: Any, x: Any, y: Any) -> Any:
    return b.fsub(x, y)


@emitted(f32x16, f32x16, f32x16)
def mul(b: Any, x: Any, y: Any) -> Any:
    return b.fmul(x, y)


@emitted(f32x16, f32x16, f32x16)
def div(b: Any, x: Any, y: Any) -> Any:
    return b.fdiv(x, y)


@emitted(f32x16, f32x16, f32x16, f32x16)
def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return multiply_add(b, x, y, z)


@emitted(f32x16, f32x16, f32x16)
def maximum(b: Any, x: Any, y: Any) -> Any:
    """The larger one; `y` if either is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@emitted(f32x16, f32x16, f32x16)
def minimum(b: Any, x: Any, y: Any) -> Any:
    """The smaller one; `y` if either is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@emitted(f32x16, f32x16)
def absolute(b: Any, x: Any) -> Any:
    return b.bitcast(b.and_(b.bitcast(x, _VI), constant(0x7FFFFFFF, _VI)), _VF)


def _halves(b: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the lanes of a vector in a fixed tree."""
    lanes = x.type.count
    while lanes > 1:
        lanes //= 2
        undefined = ir.Constant(x.type, ir.Undefined)
        low = shuffle(b, x, undefined, list(range(lanes)))
        high = shuffle(b, x, undefined, list(range(lanes, 2 * lanes)))
        x = combine(low, high)
    return b.extract_element(x, ir.Constant(_I32, 0))


@emitted(f32, f32)
def sqrt(b: Any, x: Any) -> Any:
    return call(b, "llvm.sqrt.f32", _F32, x)


@emitted(f32, f32x16)
def total(b: Any, x: Any) -> Any:
    """The sum of the lanes."""
    return _halves(b, x, b.fadd)


@emitted(f32, f32x16)
def largest(b: Any, x: Any) -> Any:
    """The largest lane; lanes with NaN may be passed over."""
    return _halves(b, x, lambda low, high: b.select(b.fcmp_ordered(">", low, high), low, high))


@emitted(f32x16, f32x16, f32x16, i64)
def first_lanes(b: Any, x: Any, other: Any, count: Any) -> Any:
    """The first `count` lanes of `x`, then those of `other`."""
    return b.select(_mask(b, count), x, other)


def emit_exp(b: Any, x: Any) -> Any:
    """e**x with a relative error below 3e-7; 0 below -87, NaN stays. Cephes' polynomial, after Moshier."""
    small = b.fcmp_ordered("<", x, constant(-87.0))
    x = b.select(b.fcmp_ordered(">", x, constant(88.0)), constant(88.0), x)
    x = b.select(small, constant(-87.0), x)
    n = call(b, "llvm.rint.v16f32", _VF, b.fmul(x, constant(1.4426950408889634)))
    r = multiply_add(b, n, constant(-0.693359375), x)
    r = multiply_add(b, n, constant(2.12194440e-4), r)
    y = constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = multiply_add(b, y, r, constant(factor))
    y = multiply_add(b, y, b.fmul(r, r), b.fadd(r, constant(1.0)))
    shifted = b.shl(b.fptosi(n, _VI), constant(23, _VI))
    raised = b.bitcast(b.add(b.bitcast(y, _VI), shifted), _VF)
    raised = b.select(small, constant(0.0), raised)
    return b.select(b.fcmp_unordered("uno", y, y), y, raised)


@emitted(f32x16, f32x16)
def exp(b: Any, x: Any) -> Any:
    return emit_exp(b, x)


@emitted(f32x16, f32x16)
def tanh(b: Any, x: Any) -> Any:
    """1 - 2 / (e**2x + 1), with an absolute error below 3e-7."""
    two = b.fadd(x, x)
    below = b.fdiv(constant(2.0), b.fadd(emit_exp(b, two), constant(1.0)))
    return b.fsub(constant(1.0), below)


@emitted(f32x16, f32x16)
def round_bf16(b: Any, x: Any) -> Any:
    """Rounded to bfloat16 and back."""
    return _widened(b, _narrowed(b, x))


@emitted(f32x16, f32x16)
def round_f16(b: Any, x: Any) -> Any:
    return e.from_half(b, e.to_half(b, x))


@emitted(f32x16, f32x16)
def round_f32(b: Any, x: Any) -> Any:
    return x


ROUND = {"float32": round_f32, "bfloat16": round_bf16, "float16": round_f16}


# -- bits, for packed weights -------------------------------------------------------------------------------


def emit_low(b: Any, x: Any) -> Any:
    """The lower bfloat16 of each lane, as float32."""
    return b.bitcast(b.shl(x, constant(16, _VI)), _VF)


def emit_high(b: Any, x: Any) -> Any:
    """The upper bfloat16 of each lane, as float32."""
    return b.bitcast(b.and_(x, constant(-65536, _VI)), _VF)


def emit_dot_bf16(b: Any, total: Any, x: Any, y: Any) -> Any:
    """total + the dot product of the two bfloat16 in each lane of x and y; float32. Only AVX512_BF16 rounds
    less exactly, and takes subnormal numbers as 0."""
    if isa.has_bf16():
        pairs = ir.VectorType(_BF16, 2 * LANES)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call(b, name, _VF, total, b.bitcast(x, pairs), b.bitcast(y, pairs))
    low = multiply_add(b, emit_low(b, x), emit_low(b, y), total)
    return multiply_add(b, emit_high(b, x), emit_high(b, y), low)
