"""The inner loops of products on a CPU: a few rows of activations times some columns of a packed weight.

Emits machine code only; knows no tensor. The sum of an element runs over K in order, so that its bits depend
on nothing but its row and its column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.emitting import (
    constant,
    emitted,
    from_half,
    i64,
    load,
    multiply_add,
    plus,
    prefetch,
    spread,
    store,
    void,
)
from nanovllm.cpu.kernels.vectors import emit_dot_bf16, emit_high, emit_low
from nanovllm.kernels.kinds import Kinds

COLUMNS = 64  # of a block of a packed weight
_WORD, _FLOAT, _INT = ir.IntType(64), ir.FloatType(), ir.IntType(32)
_VF, _VI, _VH = (ir.VectorType(each, 16) for each in (_FLOAT, _INT, ir.HalfType()))
_LOADED = Kinds("dtype of packed weights", {"float32": _VF, "bfloat16": _VI, "float16": _VH})  # 16 columns
_FACTOR = Kinds("dtype of activations", {"float32": _FLOAT, "bfloat16": _INT})
_UNROLL = 2
_NEVER_SEVERAL = 2  # rows of tiles that are the only one of their rows, or the last: they ask for nothing
# Rows at once, and for each number of rows the groups of 16 columns at once: as many sums as there are
# registers. An AVX-512 register holds a group, an AVX one half of it.
_TILES = Kinds(
    "instruction set",
    {
        "amx": dict.fromkeys(range(1, 7), 4),
        "avx512_bf16": dict.fromkeys(range(1, 7), 4),
        "avx512": dict.fromkeys(range(1, 7), 4),
        "avx2": {1: 4, 2: 2, 3: 1, 4: 1, 5: 1},
        "generic": {1: 2, 2: 1},
    },
)


def most_rows() -> int:
    """The rows of the largest tile."""
    return max(_TILES[isa.level()])


def groups_of(rows: int) -> int:
    """The groups of 16 columns of a tile with so many rows: 1, 2 or 4."""
    return _TILES[isa.level()][rows]


def _loop(b: Any, count: Any, sums: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """for i in range(count): sums = body(i, sums); `count` may be 0. Returns the sums after it."""
    before, head = b.block, b.append_basic_block("head")
    inside, after = b.append_basic_block("inside"), b.append_basic_block("after")
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(_WORD)
    index.add_incoming(ir.Constant(_WORD, 0), before)
    carried = []
    for value in sums:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        carried.append(phi)
    b.cbranch(b.icmp_signed("<", index, count), inside, after)
    b.position_at_end(inside)
    new = body(index, carried)
    index.add_incoming(b.add(index, ir.Constant(_WORD, 1)), b.block)
    for phi, value in zip(carried, new, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(after)
    return carried


def make_tile(rows: int, groups: int, activation: str, weight: str) -> Any:
    """(sums, x, x_stride, w, ahead, steps): x [rows, K] times 16 * groups columns of a block, written to sums
    [rows, COLUMNS] float32. Strides in bytes. Meanwhile tiles of more
    than two rows ask for two cache lines a step from `ahead` on.

    A step is one k; two for a weight in bfloat16, whose pairs along K are neighbours. activation "bfloat16"
    is multiplied by dot products of pairs; else it is float32.
    """
    loaded, factor = _LOADED[weight], _FACTOR[activation]
    dots, pairs, is_half = factor is _INT, loaded is _VI, loaded is _VH
    group_bytes = 32 if is_half else 64
    step_bytes = COLUMNS // 16 * group_bytes
    x_bytes = 8 if pairs and not dots else 4

    def step(b: Any, x: list[Any], w: Any, sums: list[Any]) -> list[Any]:
        sums = list(sums)
        columns = []
        for group in range(groups):
            column = load(b, plus(b, w, group_bytes * group), loaded)
            columns.append(from_half(b, column) if is_half else column)
        halves = [columns]
        if pairs and not dots:
            halves = [[half(b, each) for each in columns] for half in (emit_low, emit_high)]
        for row in range(rows):
            for index, half in enumerate(halves):
                value = spread(b, load(b, plus(b, x[row], 4 * index), factor))
                for group in range(groups):
                    place = row * groups + group
                    if dots:
                        sums[place] = emit_dot_bf16(b, sums[place], value, half[group])
                    else:
                        sums[place] = multiply_add(b, value, half[group], sums[place])
        return sums

    def tile(b: Any, out: Any, x: Any, x_stride: Any, w: Any, ahead: Any, steps: Any) -> None:
        starts = [b.add(x, b.mul(x_stride, ir.Constant(_WORD, row))) for row in range(rows)]

        def body(unroll: int, first: Any) -> Callable[[Any, list[Any]], list[Any]]:
            def run(index: Any, sums: list[Any]) -> list[Any]:
                place = b.add(first, b.mul(index, ir.Constant(_WORD, unroll)))
                columns = b.add(w, b.mul(place, ir.Constant(_WORD, step_bytes)))
                offset = b.mul(place, ir.Constant(_WORD, x_bytes))
                own = [b.add(start, offset) for start in starts]
                coming = b.add(ahead, b.mul(place, ir.Constant(_WORD, 128)))
                for each in range(unroll):
                    for line in (0, 64) if rows > _NEVER_SEVERAL else ():
                        prefetch(b, plus(b, coming, 128 * each + line))
                    at = [plus(b, start, x_bytes * each) for start in own]
                    sums = step(b, at, plus(b, columns, step_bytes * each), sums)
                return sums

            return run

        zero = ir.Constant(_WORD, 0)
        twice = b.sdiv(steps, ir.Constant(_WORD, _UNROLL))
        sums = _loop(b, twice, [constant(0.0)] * (rows * groups), body(_UNROLL, zero))
        done = b.mul(twice, ir.Constant(_WORD, _UNROLL))
        sums = _loop(b, b.sub(steps, done), sums, body(1, done))
        for row in range(rows):
            for group in range(groups):
                place = plus(b, out, 4 * (COLUMNS * row + 16 * group))
                store(b, place, sums[row * groups + group])

    return emitted(void, *[i64] * 6)(tile)
