"""Products of bfloat16 by AMX, the matrix instructions of Intel's CPUs. A tile is 16 rows of 64 bytes.

A packed weight is read as it lies: 16 pairs of K of 16 columns are a tile. Emits machine code only; knows no
tensor. An element is summed over K in steps of 32, so that its bits depend on nothing but its row and its
column. A thread configures its tiles with `configure` and gives them back with `release`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.checking import CHECKED
from nanovllm.cpu.kernels.emitting import I8, I64, check, emitted, i64, plus, prefetch, store, void

_TILE_ROWS, _TILE_BYTES = 16, 64  # a tile's rows, and bytes of one
_GROUPS = 4  # tiles of a block of a weight, for each step of K
_LINE_BYTES = _GROUPS * _TILE_BYTES  # a pair of K of a block, or a row of its sums
_ROUND_BYTES = _TILE_ROWS * _LINE_BYTES  # of a block, for each step of K
# Numbers of tiles. Sums are 0 to 3: of a tile of activations and 4 groups, or of two tiles and 2 groups.
_FIRST_X, _SECOND_X, _FACTORS = 4, 5, (6, 7)
_OF_SECOND = (2, 3, _SECOND_X)


def _number(value: int) -> Any:
    return ir.Constant(I64, value)


_WHOLE, _LINE = _number(_TILE_ROWS), _number(_LINE_BYTES)


def _tile(b: Any, name: str, *arguments: Any) -> None:
    """An instruction of tiles; a tile is its number."""
    values = [ir.Constant(I8, each) if isinstance(each, int) else each for each in arguments]
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in values])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), values)


def _pointer(b: Any, address: Any, stride: Any, rows: Any) -> Any:
    if CHECKED:
        with cgutils.for_range(b, rows) as loop:
            check(b, b.add(address, b.mul(loop.index, stride)), _TILE_BYTES)
    return b.inttoptr(address, I8.as_pointer())


def _load(b: Any, tile: int, address: Any, stride: Any, rows: Any) -> None:
    _tile(b, "tileloadd64", tile, _pointer(b, address, stride, rows), stride)


def _store(b: Any, tile: int, address: Any, stride: Any, rows: Any) -> None:
    _tile(b, "tilestored64", tile, _pointer(b, address, stride, rows), stride)


@emitted(void, i64, i64)
def configure(b: Any, memory: Any, rows: Any) -> None:
    """Give the tiles of this thread their sizes, for products of 1 to 32 rows.

    memory: of MATRIX_CONFIG bytes.
    """
    first = b.select(b.icmp_signed("<", rows, _WHOLE), rows, _WHOLE)
    second = b.select(b.icmp_signed(">", rows, _WHOLE), b.sub(rows, _WHOLE), first)
    heights = [second if tile in _OF_SECOND else _WHOLE if tile in _FACTORS else first for tile in range(8)]
    for word in range(isa.MATRIX_CONFIG // 8):
        store(b, plus(b, memory, 8 * word), _number(0))
    store(b, memory, ir.Constant(I8, 1))  # the palette
    for tile, height in enumerate(heights):
        store(b, plus(b, memory, 16 + 2 * tile), ir.Constant(I8, _TILE_BYTES))
        store(b, plus(b, memory, 48 + tile), b.trunc(height, I8))
    _tile(b, "ldtilecfg", b.inttoptr(memory, I8.as_pointer()))


@emitted(void)
def release(b: Any) -> None:
    _tile(b, "tilerelease")


@emitted(void, i64, i64, i64, i64, i64, i64, i64)
def product(b: Any, rows: Any, sums: Any, x: Any, x_stride: Any, w: Any, ahead: Any, steps: Any) -> None:
    """x [rows, K] times a block of a packed weight, written to sums [rows, 64] float32. x_stride in bytes;
    steps: K / 2, a multiple of 16. The tiles are configured for `rows`. With more than 16 rows it meanwhile
    asks for two cache lines a step from `ahead` on, unless that is 0."""
    rounds = b.sdiv(steps, _WHOLE)
    with b.if_else(b.icmp_signed(">", rows, _WHOLE)) as (many, few):
        with many, b.if_else(b.icmp_signed("!=", ahead, _number(0))) as (asks, is_quiet):
            with asks:
                _many_rows(b, rows, sums, x, x_stride, w, ahead, rounds)
            with is_quiet:
                _many_rows(b, rows, sums, x, x_stride, w, None, rounds)
        with few:
            _few_rows(b, rows, sums, x, x_stride, w, rounds)


def _few_rows(b: Any, rows: Any, sums: Any, x: Any, x_stride: Any, w: Any, rounds: Any) -> None:
    """Up to 16 rows: one tile of activations, all columns at once, so that the weight is read in order. Each
    round asks for the lines of the next one: loads of tiles alone wait for memory (one row of 6,144 x 1,024
    from memory, two threads: 1,113 to 1,986 us without, 832 to 1,026 with)."""
    for tile in range(_GROUPS):
        _tile(b, "tilezero", tile)
    with cgutils.for_range(b, rounds) as loop:
        block = b.add(w, b.mul(loop.index, _number(_ROUND_BYTES)))
        for line in range(0, _ROUND_BYTES, 64):
            prefetch(b, plus(b, block, _ROUND_BYTES + line))
        _load(b, _FIRST_X, b.add(x, b.mul(loop.index, _number(_TILE_BYTES))), x_stride, rows)
        for group in range(_GROUPS):
            factor = _FACTORS[group % 2]
            _load(b, factor, plus(b, block, _TILE_BYTES * group), _LINE, _WHOLE)
            _tile(b, "tdpbf16ps", group, _FIRST_X, factor)
    for group in range(_GROUPS):
        _store(b, group, plus(b, sums, _TILE_BYTES * group), _LINE, rows)


def _many_rows(b: Any, rows: Any, sums: Any, x: Any, x_stride: Any, w: Any, ahead: Any, rounds: Any) -> None:
    """17 to 32 rows: two tiles of activations times two of the weight, which are each read half as often."""
    starts, counts = (x, b.add(x, b.mul(x_stride, _WHOLE))), (_WHOLE, b.sub(rows, _WHOLE))
    for half in range(2):
        for tile in range(4):
            _tile(b, "tilezero", tile)
        with cgutils.for_range(b, rounds) as loop:
            place = b.mul(loop.index, _number(_TILE_BYTES))
            block = b.add(w, b.mul(loop.index, _number(_ROUND_BYTES)))
            for tile, start, count in zip((_FIRST_X, _SECOND_X), starts, counts, strict=True):
                _load(b, tile, b.add(start, place), x_stride, count)
            for group, factor in enumerate(_FACTORS):
                _load(b, factor, plus(b, block, _TILE_BYTES * (2 * half + group)), _LINE, _WHOLE)
            for row, tile in enumerate((_FIRST_X, _SECOND_X)):
                for group, factor in enumerate(_FACTORS):
                    _tile(b, "tdpbf16ps", 2 * row + group, tile, factor)
            if ahead is not None:
                done = b.add(loop.index, b.mul(rounds, _number(half)))
                coming = b.add(ahead, b.mul(done, _number(_ROUND_BYTES // 4)))
                for line in range(0, _ROUND_BYTES // 4, 64):
                    prefetch(b, plus(b, coming, line))
        for row, count in enumerate(counts):
            for group in range(2):
                at = row * _TILE_ROWS * _LINE_BYTES + _TILE_BYTES * (2 * half + group)
                _store(b, 2 * row + group, plus(b, sums, at), _LINE, count)


@emitted(void, i64, i64, i64, i64, i64, i64, i64)
def add_product(
    b: Any, rows: Any, sums: Any, x: Any, x_stride: Any, m: Any, columns: Any, steps: Any
) -> None:
    """sums [rows, columns] float32 += x [rows, K] @ m; columns and K are multiples of 32, steps is K / 2.

    m: pairs of K, [K / 2, columns, 2]. The tiles are configured for `rows`, more than 16 or 16 at most.
    """
    rounds = b.sdiv(steps, _WHOLE)
    stride = b.mul(columns, _number(4))
    with b.if_else(b.icmp_signed(">", rows, _WHOLE)) as (many, few):
        with many:
            _add(b, (_WHOLE, b.sub(rows, _WHOLE)), sums, x, x_stride, m, stride, rounds)
        with few:
            _add(b, (rows,), sums, x, x_stride, m, stride, rounds)


def _add(
    b: Any, counts: tuple[Any, ...], sums: Any, x: Any, x_stride: Any, m: Any, stride: Any, rounds: Any
) -> None:
    pair = 2 * _TILE_BYTES  # two tiles of columns at once
    with cgutils.for_range(b, b.sdiv(stride, _number(pair))) as columns:
        left = b.mul(columns.index, _number(pair))
        out = b.add(sums, left)
        places = [
            (
                2 * row + group,
                plus(b, b.add(out, b.mul(stride, _number(16 * row))), _TILE_BYTES * group),
                count,
            )
            for row, count in enumerate(counts)
            for group in range(2)
        ]
        for tile, place, count in places:
            _load(b, tile, place, stride, count)
        with cgutils.for_range(b, rounds) as loop:
            at = b.add(x, b.mul(loop.index, _number(_TILE_BYTES)))
            block = b.add(b.add(m, left), b.mul(loop.index, b.mul(stride, _WHOLE)))
            for row, count in enumerate(counts):
                _load(b, _FIRST_X + row, b.add(at, b.mul(x_stride, _number(16 * row))), x_stride, count)
            for group, factor in enumerate(_FACTORS):
                _load(b, factor, plus(b, block, _TILE_BYTES * group), stride, _WHOLE)
            for row in range(len(counts)):
                for group, factor in enumerate(_FACTORS):
                    _tile(b, "tdpbf16ps", 2 * row + group, _FIRST_X + row, factor)
        for tile, place, count in places:
            _store(b, tile, place, stride, count)
