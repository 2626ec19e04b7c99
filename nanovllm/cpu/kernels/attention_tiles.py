"""Tiles of products for attention on a CPU: accumulators stay in registers while a tile is summed.

Each `make_...` returns a function that kernels call, for constant sizes. Addresses and strides are in bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.emitting import (
    F16,
    emitted,
    f32x16,
    from_half,
    i32x16,
    i64,
    load,
    multiply_add,
    shuffle,
    spread,
    store,
    void,
)
from nanovllm.cpu.kernels.vectors import SIZES, emit_dot_bf16
from nanovllm.kernels.kinds import Kinds, unknown

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_F32 = ir.FloatType()
_VF, _VI = ir.VectorType(_F32, 16), ir.VectorType(_I32, 16)
_WORDS = "pairs"  # in place of a dtype: words of two bfloat16, whose products are added
_MOST_ROWS = 6  # of a pass
_ACCUMULATORS = Kinds(
    "instruction set", {"amx": 24, "avx512_bf16": 24, "avx512": 24, "avx2": 6, "generic": 6}
)


def _accumulators() -> int:
    """Vectors of 16 lanes that fit into the registers beside the factors."""
    return _ACCUMULATORS[isa.level()]


def _constant(value: int) -> Any:
    return ir.Constant(_I64, value)


def _at(b: Any, address: Any, index: int, stride: Any) -> Any:
    """address + index * stride; stride: a constant number or a value."""
    step = _constant(index * stride) if isinstance(stride, int) else b.mul(stride, _constant(index))
    return b.add(address, step)


def _widened(b: Any, address: Any, dtype: str, lanes: int) -> Any:
    """So many elements at an address, as 16 lanes of float32, or of words; the other lanes are 0."""
    if dtype == _WORDS:
        return load(b, address, ir.VectorType(_I32, 16))
    if dtype == "bfloat16":
        bits = b.zext(load(b, address, ir.VectorType(_I16, lanes)), ir.VectorType(_I32, lanes))
        shifted = b.shl(bits, ir.Constant(bits.type, [16] * lanes))
        x = b.bitcast(shifted, ir.VectorType(_F32, lanes))
    elif dtype == "float16":
        half = load(b, address, ir.VectorType(_I16, lanes))
        zeros = ir.Constant(half.type, [0] * lanes)
        half = half if lanes == 16 else shuffle(b, half, zeros, list(range(16)))
        return from_half(b, b.bitcast(half, ir.VectorType(F16, 16)))
    elif dtype == "float32":
        x = load(b, address, ir.VectorType(_F32, lanes))
    else:
        raise unknown("dtype of keys and values", dtype)
    return x if lanes == 16 else shuffle(b, x, ir.Constant(x.type, [0.0] * lanes), list(range(16)))


def _lanes(width: int) -> list[int]:
    """The lanes of the vectors of a row of `width` elements, a multiple of 8."""
    return [16] * (width // 16) + [8] * (width % 16 // 8)


def make_load(dtype: str, lanes: int) -> Any:
    """(address) -> 16 lanes, of which so many are read and the others are 0."""

    @emitted(f32x16, i64)
    def load_lanes(b: Any, address: Any) -> Any:
        return _widened(b, address, dtype, lanes)

    return load_lanes


def make_product(rows: int, width: int, dtype: str, fresh: bool = False) -> Any:
    """(c, c_row, a, a_row, m, m_row, count): c [rows, width] += a [rows, count] @ m [count, width].

    c and a are float32; rows of c are padded to 16 elements. m: of `dtype`. With "pairs" an element of a and
    of m is two bfloat16, along `count`. Each element of c is summed in the order of m's rows, whatever the
    sizes. fresh: c = a @ m.
    """
    few = -(-rows // -(-rows // _MOST_ROWS))  # of a pass
    wide = max(1, _accumulators() // few)
    lanes = _lanes(width)
    pairs = dtype == _WORDS
    size = 4 if pairs else SIZES[dtype]

    def tile(b: Any, members: range, columns: range, values: tuple[Any, ...]) -> None:
        c, c_row, a, a_row, m, m_row, count = values
        places = {(r, j): b.add(_at(b, c, r, c_row), _constant(64 * j)) for r in members for j in columns}
        kept = {place: cgutils.alloca_once(b, _VF) for place in places}
        for place, address in places.items():
            b.store(ir.Constant(_VF, [0.0] * 16) if fresh else load(b, address, _VF), kept[place])
        starts = {r: _at(b, a, r, a_row) for r in members}
        with cgutils.for_range(b, count) as loop:
            row, offset = b.add(m, b.mul(loop.index, m_row)), b.mul(loop.index, _constant(4))
            factors = {j: _widened(b, b.add(row, _constant(16 * size * j)), dtype, lanes[j]) for j in columns}
            for r in members:
                factor = spread(b, load(b, b.add(starts[r], offset), _I32 if pairs else _F32))
                for j in columns:
                    total = b.load(kept[r, j])
                    if pairs:
                        total = emit_dot_bf16(b, total, factor, factors[j])
                    else:
                        total = multiply_add(b, factor, factors[j], total)
                    b.store(total, kept[r, j])
        for place, address in places.items():
            store(b, address, b.load(kept[place]))

    @emitted(void, *[i64] * 7)
    def product(b: Any, *values: Any) -> None:
        for first in range(0, rows, few):
            for left in range(0, len(lanes), wide):
                members = range(first, min(rows, first + few))
                tile(b, members, range(left, min(len(lanes), left + wide)), values)

    return product


def make_dots(rows: int, width: int, dtype: str, keys: int) -> Any:
    """(out, q, k, k_row): products of q [rows, width] with so many keys, lane by lane.

    out [rows, 16, 16]: for each row, of each key a vector whose lanes sum to the dot product; those of later
    keys stay. q: float32, rows padded to 16 elements. k: of `dtype`.
    """
    lanes = _lanes(width)
    few = max(1, _MOST_ROWS // keys)

    @emitted(void, i64, i64, i64, i64)
    def dots(b: Any, out: Any, q: Any, k: Any, k_row: Any) -> None:
        starts = [_at(b, k, key, k_row) for key in range(keys)]
        for first in range(0, rows, few):
            members = range(first, min(rows, first + few))
            sums = {(r, key): ir.Constant(_VF, [0.0] * 16) for r in members for key in range(keys)}
            for j, count in enumerate(lanes):
                cells = [
                    _widened(b, b.add(start, _constant(16 * SIZES[dtype] * j)), dtype, count)
                    for start in starts
                ]
                for r in members:
                    query = load(b, b.add(q, _constant(64 * (r * len(lanes) + j))), _VF)
                    for key in range(keys):
                        sums[r, key] = multiply_add(b, query, cells[key], sums[r, key])
            for (r, key), value in sums.items():
                store(b, b.add(out, _constant(1024 * r + 64 * key)), value)

    return dots


@emitted(f32x16, i64)
def sums_of_16(b: Any, address: Any) -> Any:
    """The sum of the lanes of each of 16 vectors. Each vector is summed in the same order."""
    vectors = [load(b, b.add(address, _constant(64 * index)), _VF) for index in range(16)]
    width = 16  # lanes that belong to one vector
    while len(vectors) > 1:
        half, parts = width // 2, 16 // width
        first = [part * width + lane for part in range(2 * parts) for lane in range(half)]
        second = [part * width + half + lane for part in range(2 * parts) for lane in range(half)]
        vectors = [
            b.fadd(shuffle(b, x, y, first), shuffle(b, x, y, second))
            for x, y in zip(vectors[0::2], vectors[1::2], strict=True)
        ]
        width = half
    return vectors[0]


def make_load_words(count: int) -> Any:
    """(address) -> `count` bfloat16, a multiple of 8, as the first of 16 words of two; the others are 0."""

    @emitted(i32x16, i64)
    def load_words(b: Any, address: Any) -> Any:
        x = load(b, address, ir.VectorType(_I16, count))
        zeros = ir.Constant(x.type, [0] * count)
        order = [*range(count), *[count] * (32 - count)]
        return b.bitcast(shuffle(b, x, zeros, order), ir.VectorType(_I32, 16))

    return load_words


@emitted(void, i64, i32x16)
def store_words(b: Any, out: Any, x: Any) -> None:
    store(b, out, x)


@emitted(void, i64, i64, i64)
def interleave(b: Any, out: Any, first: Any, second: Any) -> None:
    """Write 16 words: 16-bit values at `first` are the lower halves, those at `second` the upper ones."""
    low, high = (b.zext(load(b, each, ir.VectorType(_I16, 16)), _VI) for each in (first, second))
    store(b, out, b.or_(low, b.shl(high, ir.Constant(_VI, [16] * 16))))


@emitted(void, i64, i64, i64, i64)
def transpose_16(b: Any, out: Any, out_row: Any, address: Any, row: Any) -> None:
    """Write the 16 columns of 16 rows of 16 words as rows at `out`."""
    vectors = [load(b, _at(b, address, index, row), _VF) for index in range(16)]
    low = [lane // 2 + 16 * (lane % 2) for lane in range(16)]
    high = [8 + each for each in low]
    for _ in range(4):
        vectors = [
            shuffle(b, x, y, order)
            for x, y in zip(vectors[:8], vectors[8:], strict=True)
            for order in (low, high)
        ]
    for index, vector in enumerate(vectors):
        store(b, _at(b, out, index, out_row), vector)
