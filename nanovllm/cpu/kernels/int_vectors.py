"""Products of integers for kernels, 32 inputs at a time, with the dot product of each instruction set.

Weights are unsigned bytes, x is signed; `int_layout.py` says how weights are packed. A group of a row of x is
a record: 32 int8, or int16 where no instruction multiplies bytes; the scales of its two halves; what their
products start from. All instruction sets compute the same integers.

Groups of real models often have one large value, beside which others keep few bits. It costs those of its
half alone: with a scale for each half the error of answers (KL) is about half (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.emitting import (
    call,
    constant,
    emitted,
    f32x16,
    i64,
    load,
    multiply_add,
    plus,
    prefetch,
    shuffle,
    spread,
    store,
    void,
)
from nanovllm.cpu.kernels.int_layout import FORMATS, GROUP, LANES, IntFormat
from nanovllm.cpu.kernels.int_numbers import number, numbers_of
from nanovllm.kernels.kinds import Kinds

HALF = GROUP // 2  # values of x that share a scale
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_VF, _VI = (ir.VectorType(each, LANES) for each in (_F32, _I32))
_BYTES, _WORDS = ir.VectorType(_I8, 4 * LANES), ir.VectorType(_I16, 2 * LANES)
MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, which is in the lower bits
_TINY = 1e-30  # a half whose largest value is below is 0
AHEAD_OF_GROUP = 256  # bytes that a tile of several rows asks for with each group
_AHEAD = 2048  # bytes that are asked for before they are needed
_MOST_ROWS = Kinds(  # whose sums stay in registers
    "instruction set", {"amx": 8, "avx512_bf16": 8, "avx512": 8, "avx2": 4, "generic": 4}
)
_DOTS = Kinds(  # of four bytes at once
    "instruction set", {"amx": True, "avx512_bf16": True, "avx512": False, "avx2": False, "generic": False}
)


def _is_wide(format: IntFormat) -> bool:
    """Whether x is int16: products of bytes would need more than 16 bits, and there is no instruction."""
    return isa.level() == "generic" or (format.bits == 8 and not _DOTS[isa.level()])


def _code_bytes(format: IntFormat) -> int:
    """Bytes of a value of x."""
    return 2 if _is_wide(format) else 1


def _record(format: IntFormat) -> int:
    """Bytes of a record: 2 scales, and 2 starts, int32, or with a minimum one, float32."""
    return GROUP * _code_bytes(format) + 8 + (4 if format.numbers == 2 else 8)


# -- rows of x ----------------------------------------------------------------------------------------------


def _combined(b: Any, pair: list[Any], combine: Callable[[Any, Any], Any]) -> list[Any]:
    """Each of two vectors, combined to a single number."""
    x, y = pair
    both = combine(*(shuffle(b, x, y, [*range(at, at + 8), *range(at + 16, at + 24)]) for at in (0, 8)))
    for lanes in (4, 2, 1):
        both = combine(both, shuffle(b, both, both, [each ^ lanes for each in range(LANES)]))
    return [b.extract_element(both, ir.Constant(_I32, lane)) for lane in (0, 8)]


def _quantised(b: Any, x: Any, y: Any) -> list[tuple[Any, Any]]:
    """For each of two vectors codes from -127 to 127, int32, and their scale."""

    def larger(left: Any, right: Any) -> Any:
        return b.select(b.icmp_signed(">", left, right), left, right)

    # The bits of positive numbers are in their order, and those of NaN the largest.
    bits = [b.and_(b.bitcast(each, _VI), constant(0x7FFFFFFF, _VI)) for each in (x, y)]
    steps, zero, magic = ir.Constant(_F32, 127.0), ir.Constant(_F32, 0.0), constant(MAGIC)
    found = []
    for values, most in zip((x, y), _combined(b, bits, larger), strict=True):
        largest = b.bitcast(most, _F32)
        tiny = b.fcmp_ordered("<", largest, ir.Constant(_F32, _TINY))
        factor = spread(b, b.select(tiny, zero, b.fdiv(steps, largest)))
        rounded = b.bitcast(b.fadd(b.fmul(values, factor), magic), _VI)
        codes = b.sub(rounded, b.bitcast(magic, _VI))
        found.append((codes, b.select(tiny, zero, b.fdiv(largest, steps))))
    return found


def quantise(name: str) -> Any:
    """(record of a row's first group, number of the group, its 32 values): write the record."""
    format = FORMATS[name]

    @emitted(void, i64, i64, f32x16, f32x16)
    def quantise_group(b: Any, row: Any, group: Any, x: Any, y: Any) -> None:
        size, wide = _code_bytes(format), _is_wide(format)
        scales = GROUP * size
        place = b.add(row, b.mul(group, number(_record(format))))
        kind = ir.VectorType(_I16 if wide else _I8, LANES)
        order = [4 * quad + each for quad in range(4) for each in (0, 2, 1, 3)]
        sums, found = [], _quantised(b, x, y)
        totals = _combined(b, [codes for codes, _ in found], b.add)
        for half, ((codes, scale), total) in enumerate(zip(found, totals, strict=True)):
            stored = b.trunc(codes, kind)
            if wide:
                stored = shuffle(b, stored, stored, order)
            store(b, plus(b, place, HALF * size * half), stored)
            store(b, plus(b, place, scales + 4 * half), scale)
            if format.numbers == 1:
                start = b.mul(total, ir.Constant(_I32, -format.middle))
                store(b, plus(b, place, scales + 8 + 4 * half), start)
            sums.append(b.fmul(scale, b.sitofp(total, _F32)))
        if format.numbers == 2:
            store(b, plus(b, place, scales + 8), b.fadd(sums[0], sums[1]))

    return quantise_group


# -- products -----------------------------------------------------------------------------------------------


def _halves(b: Any, x: Any) -> list[Any]:
    lanes = x.type.count // 2
    return [shuffle(b, x, x, list(range(first, first + lanes))) for first in (0, lanes)]


def _joined(b: Any, parts: list[Any]) -> Any:
    low, high = parts
    return shuffle(b, low, high, list(range(2 * low.type.count)))


def _pairs(b: Any, x: Any, y: Any) -> Any:
    """32 x int16 times 32 x int16, neighbours added: 16 x int32."""
    if isa.level() == "generic":
        wide = ir.VectorType(_I32, 2 * LANES)
        products = b.mul(b.sext(x, wide), b.sext(y, wide))
        even, odd = (shuffle(b, products, products, list(range(first, 2 * LANES, 2))) for first in (0, 1))
        return b.add(even, odd)
    if isa.level() == "avx2":
        kind, name = ir.VectorType(_I32, LANES // 2), "llvm.x86.avx2.pmadd.wd"
        sums = [call(b, name, kind, p, q) for p, q in zip(_halves(b, x), _halves(b, y), strict=True)]
        return _joined(b, sums)
    if isa.level() in ("avx512", "avx512_bf16", "amx"):
        return call(b, "llvm.x86.avx512.pmaddw.d.512", _VI, x, y)
    raise ValueError(f"no product of int16 for the level {isa.level()}")


def _byte_pairs(b: Any, x: Any, y: Any) -> Any:
    """64 x uint8 times 64 x int8, neighbours added: 32 x int16, which must suffice."""
    if isa.level() == "avx2":
        kind, name = ir.VectorType(_I16, LANES), "llvm.x86.avx2.pmadd.ub.sw"
        sums = [call(b, name, kind, p, q) for p, q in zip(_halves(b, x), _halves(b, y), strict=True)]
        return _joined(b, sums)
    if isa.level() == "avx512":
        return call(b, "llvm.x86.avx512.pmaddubs.w.512", _WORDS, x, y)
    raise ValueError(f"no product of bytes in int16 for the level {isa.level()}")


def _dot(b: Any, sums: list[Any], weight: Any, rows: list[Any]) -> list[Any]:
    """Add 4 inputs of 16 outputs, 16 x int32 with a byte for each, times those of each row."""
    if _DOTS[isa.level()]:
        name = "llvm.x86.avx512.vpdpbusd.512"
        values = [spread(b, load(b, row, _I32)) for row in rows]
        return [call(b, name, _VI, s, weight, x) for s, x in zip(sums, values, strict=True)]
    even = b.bitcast(b.and_(weight, constant(0x00FF00FF, _VI)), _WORDS)
    odd = b.lshr(b.bitcast(weight, _WORDS), constant(8, _WORDS))
    added = []
    for total, row in zip(sums, rows, strict=True):
        for index, part in enumerate((even, odd)):
            x = spread(b, load(b, plus(b, row, 4 * index), _I32))
            total = b.add(total, _pairs(b, part, b.bitcast(x, _WORDS)))
        added.append(total)
    return added


def _hidden(b: Any, number: Any) -> Any:
    """The same int64, which LLVM does not know: it would write a loop of so many rounds out, and mix rounds
    until registers do not suffice."""
    kind = ir.FunctionType(_I64, [_I64])
    return b.asm(kind, "", "=r,0", [number], side_effect=False)


def _half_sums(
    b: Any, format: IntFormat, half: int, weight: Any, rows: list[Any], starts: list[Any]
) -> list[Any]:
    """The sums over a half of a group, 16 x int32 for each row."""
    short = format.bits == 4 and not _is_wide(format) and not _DOTS[isa.level()]
    # In int16 16 products of at most 15 * 127 are added in pairs.
    sums = [ir.Constant(_WORDS, None)] * len(rows) if short else starts
    size, quads = _code_bytes(format), HALF // 4
    if format.bits == 8:
        weight = plus(b, weight, 4 * LANES * quads * half)
    rows = [plus(b, row, HALF * size * half) for row in rows]

    def added(sums: list[Any], weight: Any, rows: list[Any]) -> list[Any]:
        """The sums with 4 more inputs."""
        part = load(b, weight, _VI)
        if format.bits == 4:
            part = b.and_(b.lshr(part, constant(4 * half, _VI)), constant(0x0F0F0F0F, _VI))
        if not short:
            return _dot(b, sums, part, rows)
        values = [spread(b, load(b, row, _I32)) for row in rows]
        products = [_byte_pairs(b, b.bitcast(part, _BYTES), b.bitcast(x, _BYTES)) for x in values]
        return [b.add(total, product) for total, product in zip(sums, products, strict=True)]

    if len(rows) == 1 or _MOST_ROWS[isa.level()] == 8:
        for quad in range(quads):
            own = [plus(b, row, 4 * size * quad) for row in rows]
            sums = added(sums, plus(b, weight, 4 * LANES * quad), own)
    else:
        kept = [cgutils.alloca_once_value(b, total) for total in sums]
        with cgutils.for_range(b, _hidden(b, number(quads))) as loop:
            offset = b.mul(loop.index, number(4 * size))
            place = b.add(weight, b.mul(loop.index, number(4 * LANES)))
            own = [b.add(row, offset) for row in rows]
            for total, value in zip(kept, added([b.load(each) for each in kept], place, own), strict=True):
                b.store(value, total)
        sums = [b.load(each) for each in kept]
    if short:
        sums = [
            b.add(start, _pairs(b, total, constant(1, _WORDS)))
            for start, total in zip(starts, sums, strict=True)
        ]
    return sums


def _emit_tile(b: Any, format: IntFormat, rows: list[Any], weight: Any, ahead: Any, groups: Any) -> list[Any]:
    """The product of each row with 16 outputs, groups in order: float32."""
    size, codes = _record(format), LANES * format.code_bytes
    totals = [cgutils.alloca_once(b, _VF) for _ in rows]
    for total in totals:
        b.store(constant(0.0), total)
    scales = b.add(weight, b.mul(groups, number(codes)))
    with cgutils.for_range(b, groups) as loop:
        place = b.add(weight, b.mul(loop.index, number(codes)))
        own = [b.add(row, b.mul(loop.index, number(size))) for row in rows]
        if len(rows) == 1:
            for line in range(0, codes, 4 * LANES):
                prefetch(b, plus(b, place, _AHEAD + line))
        else:
            with b.if_then(b.icmp_signed("!=", ahead, number(0))):
                coming = b.add(ahead, b.mul(loop.index, number(AHEAD_OF_GROUP)))
                for line in range(0, AHEAD_OF_GROUP, 4 * LANES):
                    prefetch(b, plus(b, coming, line))
        scale, minimum = numbers_of(b, format, scales, groups, loop.index)

        def spread_at(row: Any, offset: int, kind: Any) -> Any:
            return spread(b, load(b, plus(b, row, GROUP * _code_bytes(format) + offset), kind))

        values: list[Any] = []
        for half in range(2):
            starts = [
                spread_at(row, 8 + 4 * half, _I32) if minimum is None else ir.Constant(_VI, None)
                for row in own
            ]
            found = _half_sums(b, format, half, place, own, starts)
            terms = [b.sitofp(each, _VF) for each in found]
            factors = [spread_at(row, 4 * half, _F32) for row in own]
            if len(scale) == 2:
                factors = [b.fmul(factor, scale[half]) for factor in factors]
            if half == 0:
                values = [b.fmul(term, factor) for term, factor in zip(terms, factors, strict=True)]
            else:
                values = [
                    multiply_add(b, term, factor, value)
                    for term, factor, value in zip(terms, factors, values, strict=True)
                ]
        for total, row, value in zip(totals, own, values, strict=True):
            value = (
                multiply_add(b, value, scale[0], b.load(total))
                if len(scale) == 1
                else b.fadd(value, b.load(total))
            )
            if minimum is not None:
                value = multiply_add(b, minimum, spread_at(row, 8, _F32), value)
            b.store(value, total)
    return [b.load(total) for total in totals]


def tile(name: str, rows: int) -> Any:
    """(first record of x, bytes of a row, a block of 16 outputs, ahead, groups) -> where `sum_of` finds the
    products of `rows` rows, [rows, 16]. With several rows, `AHEAD_OF_GROUP` bytes for each group from `ahead`
    on come into the cache meanwhile, unless it is 0."""
    format = FORMATS[name]

    @emitted(i64, i64, i64, i64, i64, i64)
    def product(b: Any, x: Any, stride: Any, weight: Any, ahead: Any, groups: Any) -> Any:
        kept = cgutils.alloca_once(b, ir.ArrayType(_VF, rows))
        first = b.ptrtoint(kept, _I64)
        step = min(rows, _MOST_ROWS[isa.level()])
        with cgutils.for_range(b, number(rows // step)) as loop:
            begin = b.add(x, b.mul(b.mul(stride, number(step)), loop.index))
            own = [b.add(begin, b.mul(stride, number(row))) for row in range(step)]
            target = b.add(first, b.mul(loop.index, number(4 * LANES * step)))
            for index, total in enumerate(_emit_tile(b, format, own, weight, ahead, groups)):
                place = b.inttoptr(plus(b, target, 4 * LANES * index), _VF.as_pointer())
                b.store(total, place).align = 1
        return first

    return product


@emitted(f32x16, i64)
def sum_of(b: Any, address: Any) -> Any:
    """16 sums that a tile left on the stack."""
    value = b.load(b.inttoptr(address, _VF.as_pointer()))
    value.align = 1
    return value


@emitted(void, i64, f32x16)
def store_codes(b: Any, address: Any, x: Any) -> None:
    """16 floats from 0 to 255 as bytes."""
    store(b, address, b.trunc(b.fptosi(x, _VI), ir.VectorType(_I8, LANES)))


# -- rows of a weight ---------------------------------------------------------------------------------------


def looked_up(name: str, half: int) -> Any:
    """(block, groups, group, output of the block) -> the first or second 16 inputs of a group, as float32."""
    format = FORMATS[name]

    @emitted(f32x16, i64, i64, i64, i64)
    def half_group(b: Any, block: Any, groups: Any, group: Any, lane: Any) -> Any:
        codes = LANES * format.code_bytes
        place = b.add(b.add(block, b.mul(group, number(codes))), b.mul(lane, number(4)))
        words = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
        for quad in range(4):
            offset = 4 * LANES * (quad + (4 * half if format.bits == 8 else 0))
            word = load(b, plus(b, place, offset), _I32)
            words = b.insert_element(words, word, ir.Constant(_I32, quad))
        values = b.zext(b.bitcast(words, ir.VectorType(_I8, LANES)), _VI)
        if format.bits == 4:
            values = b.lshr(values, constant(4, _VI)) if half else b.and_(values, constant(15, _VI))
        values = b.sitofp(b.sub(values, constant(format.middle, _VI)), _VF)
        scales = b.add(block, b.mul(groups, number(codes)))
        scale, minimum = numbers_of(b, format, scales, groups, group, lane)
        values = b.fmul(values, spread(b, scale[half if len(scale) == 2 else 0]))
        return values if minimum is None else b.fadd(values, spread(b, minimum))

    return half_group
