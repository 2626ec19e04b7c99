"""The scales and minimums of groups of integers, for kernels; `int_layout.py` says where they lie."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from nanovllm.cpu.kernels.emitting import constant, converts_halves, load, plus
from nanovllm.cpu.kernels.int_layout import LANES, IntFormat

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_VF, _VI = (ir.VectorType(each, LANES) for each in (_F32, _I32))


def number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _from_half(b: Any, bits: Any) -> Any:
    """float16, given as int16 or a vector of them -> float32."""
    vector = isinstance(bits.type, ir.VectorType)
    whole, real = (_VI, _VF) if vector else (_I32, _F32)
    if converts_halves():
        half = ir.VectorType(ir.HalfType(), LANES) if vector else ir.HalfType()
        return b.fpext(b.bitcast(bits, half), real)

    def same(value: float, kind: Any) -> Any:
        return constant(value, kind) if vector else ir.Constant(kind, value)

    wide = b.zext(bits, whole)
    magnitude = b.shl(b.and_(wide, same(0x7FFF, whole)), same(13, whole))
    scaled = b.bitcast(b.fmul(b.bitcast(magnitude, real), same(2.0**112, real)), whole)
    infinite = b.icmp_unsigned(">=", magnitude, same(0x0F800000, whole))  # or NaN
    magnitude = b.select(infinite, b.or_(magnitude, same(0x7F800000, whole)), scaled)
    sign = b.shl(b.and_(wide, same(0x8000, whole)), same(16, whole))
    return b.bitcast(b.or_(magnitude, sign), real)


def numbers_of(
    b: Any, format: IntFormat, first: Any, groups: Any, group: Any, lane: Any = None
) -> tuple[list[Any], Any]:
    """The scales of a group, one or one for each half, and its minimum or None: those of 16 outputs, or of
    one (lane). first: the address behind the codes of a block."""
    count = LANES if lane is None else 1

    def at(place: Any, index: int, kind: Any) -> Any:
        place = plus(b, place, kind.width // 8 * LANES * index)
        if lane is not None:
            place = b.add(place, b.mul(lane, number(kind.width // 8)))
        return load(b, place, ir.VectorType(kind, count) if count > 1 else kind)

    own = b.add(first, b.mul(group, number(LANES * format.group_bytes)))
    if not format.shared:
        found = [_from_half(b, at(own, index, _I16)) for index in range(format.numbers)]
        return found[:1], found[1] if format.numbers == 2 else None
    common = b.add(first, b.mul(groups, number(LANES * format.group_bytes)))
    which = b.udiv(group, number(format.shared))
    common = b.add(common, b.mul(which, number(2 * LANES * format.numbers)))
    factors = [_from_half(b, at(common, index, _I16)) for index in range(format.numbers)]
    real, whole = (_VF, _VI) if count > 1 else (_F32, _I32)
    multiples = [b.sitofp(b.sext(at(own, index, _I8), whole), real) for index in range(2)]
    if format.numbers == 1:
        return [b.fmul(factors[0], each) for each in multiples], None
    return [b.fmul(factors[0], multiples[0])], b.fneg(b.fmul(factors[1], multiples[1]))
