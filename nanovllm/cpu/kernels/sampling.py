"""Draws one token per row of logits on a CPU, without sorting.

The first pass finds, for each block of the vocabulary, its largest logit and the sum of its weights, and the
largest one of every 16 logits. The second pass has one program for each row. It draws a block, then a token
of it. With filters it makes a list of the logits that reach a floor, which the largest ones of each 16 bound
closely: the list is hardly longer than top_k. All draws and rejections are those of `kernels/filters.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.batch import NOT_FINITE
from nanovllm.cpu.kernels.drawing import SEGMENT, make_filtered, make_lists, make_random
from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty, scratch
from nanovllm.cpu.kernels.native import jit

BLOCK = 2048  # vocabulary entries, as in kernels/sampling.py: drawn tokens depend on it
_BLOCKS = 4  # of a program of the first pass
_GREEDY_BELOW = 1e-5
_LEAST_FACTOR = 1e-30


def _make_factor() -> Callable[[Any], Any]:
    from numpy import float32

    log2_e, least = float32(math.log2(math.e)), float32(_LEAST_FACTOR)

    @jit
    def factor_of(temperature: Any) -> Any:
        """Weights are 2 ** ((logit - best) * factor)."""
        factor = log2_e / temperature
        return factor if factor > least else least

    return factor_of


def _make_blocks(dtype: str) -> Callable[..., None]:
    from numpy import float32

    from nanovllm.cpu.kernels import vector_math as m
    from nanovllm.cpu.kernels import vectors as v

    load, load_part, size = v.WHOLE[dtype][0], v.PART[dtype][0], v.SIZES[dtype]
    add, mul, sub, splat, maximum, largest, total_of = (
        v.add,
        v.mul,
        v.sub,
        v.splat,
        v.maximum,
        v.largest,
        v.total,
    )
    first_lanes, store_f32, get_f32, set_f32 = v.first_lanes, v.store_f32, v.get_f32, v.set_f32
    exp2, bad_as_infinity = m.exp2_normal, m.bad_as_infinity  # too small to count
    factor_of = _make_factor()
    infinity, greedy_below = float32(math.inf), float32(_GREEDY_BELOW)
    block_size, segment_size, per_program = BLOCK, SEGMENT, _BLOCKS

    def sample_blocks(
        logits: Address,
        temperatures: Address,
        stats: Address,
        maxima: Address,
        logits_stride: int,
        vocab: int,
        blocks: int,
        segments: int,
        program: int,
        thread: int,
    ) -> None:
        parts = (blocks + per_program - 1) // per_program
        row, part = program // parts, program % parts
        temperature = get_f32(temperatures + 4 * row)
        drawn = temperature >= greedy_below
        logits += row * logits_stride * size
        nothing = splat(-infinity)
        for block in range(per_program * part, min(per_program * (part + 1), blocks)):
            start, end = block_size * block, min(block_size * (block + 1), vocab)
            top = nothing
            for first in range(start, end, segment_size):
                count = min(segment_size, end - first)
                most = nothing
                place = logits + size * first
                for i in range(count // 16):
                    most = maximum(bad_as_infinity(load(place + 16 * size * i)), most)
                rest = count % 16
                if rest:
                    x = load_part(place + size * (count - rest), rest)
                    most = maximum(first_lanes(bad_as_infinity(x), nothing, rest), most)
                store_f32(maxima + 64 * (row * segments + first // segment_size), most)
                top = maximum(most, top)
            best = largest(top)
            weight = float32(1.0)
            if drawn and best > -infinity and best < infinity:
                bests, factors = splat(best), splat(factor_of(temperature))
                sums = splat(0.0)
                whole, rest = (end - start) // 16, (end - start) % 16
                for i in range(whole):
                    x = load(logits + size * (start + 16 * i))
                    sums = add(sums, exp2(mul(sub(x, bests), factors)))
                if rest:
                    x = load_part(logits + size * (end - rest), rest)
                    weights = exp2(mul(sub(first_lanes(x, nothing, rest), bests), factors))
                    sums = add(sums, weights)
                weight = total_of(sums)
            cell = stats + 4 * (row * 2 * blocks + block)
            set_f32(cell, best)
            set_f32(cell + 4 * blocks, weight)

    return sample_blocks


def _make_pick(dtype: str) -> Callable[..., None]:
    from numpy import float32

    from nanovllm.cpu.kernels import vector_math as m
    from nanovllm.cpu.kernels import vectors as v

    splat, first_lanes, mul, sub, largest = v.splat, v.first_lanes, v.mul, v.sub, v.largest
    store_f32, get_f32, get_i32, get_i64, set_i64 = v.store_f32, v.get_f32, v.get_i32, v.get_i64, v.set_i64
    load_f32_part, exp2, maximum = v.load_f32_part, m.exp2, v.maximum
    size = v.SIZES[dtype]
    load_logits, find_first = make_lists(dtype)[:2]
    random_word, pick, _ = make_random()
    draw_filtered, factor_of = make_filtered(dtype), _make_factor()
    infinity, greedy_below, one, nothing = (
        float32(math.inf),
        float32(_GREEDY_BELOW),
        float32(1.0),
        float32(0.0),
    )
    block_size, not_finite = BLOCK, NOT_FINITE

    def sample_pick(
        logits: Address,
        temperatures: Address,
        seeds: Address,
        positions: Address,
        top_ks: Address,
        top_ps: Address,
        min_ps: Address,
        stats: Address,
        maxima: Address,
        values: Address,
        ids: Address,
        weights: Address,
        out: Address,
        logits_stride: int,
        vocab: int,
        blocks: int,
        segments: int,
        room: int,
        program: int,
        thread: int,
    ) -> None:
        row = program
        logits += row * logits_stride * size
        stats += row * 8 * blocks
        maxima += row * 64 * segments
        values += thread * 4 * room
        ids += thread * 4 * room
        weights += thread * 4 * room
        tops = splat(-infinity)
        for i in range(0, blocks, 16):
            count = min(16, blocks - i)
            tops = maximum(first_lanes(load_f32_part(stats + 4 * i, count), splat(-infinity), count), tops)
        best = largest(tops)
        if not (best > -infinity and best < infinity):
            set_i64(out + 8 * row, not_finite)
            return
        temperature = get_f32(temperatures + 4 * row)
        if not temperature >= greedy_below:
            set_i64(out + 8 * row, find_first(logits, maxima, segments, vocab, best))
            return
        factor, bests = factor_of(temperature), splat(best)
        factors = splat(factor)
        whole = 0.0
        for i in range(0, blocks, 16):
            count = min(16, blocks - i)
            relative = mul(sub(load_f32_part(stats + 4 * i, count), bests), factors)
            shares = mul(load_f32_part(stats + 4 * (blocks + i), count), exp2(relative))
            store_f32(weights + 4 * i, shares)
        for i in range(blocks):
            whole += get_f32(weights + 4 * i)
        seed, position = get_i64(seeds + 8 * row), get_i32(positions + 4 * row)
        word = random_word(seed, position, 0)
        start = block_size * pick(weights, blocks, word >> 32)
        end = min(start + block_size, vocab)
        for i in range(start, end, 16):
            x = load_logits(logits, i, end)
            store_f32(weights + 4 * (i - start), exp2(mul(sub(x, bests), factors)))
        token = start + pick(weights, end - start, word)
        top_k, top_p, min_p = get_i32(top_ks + 4 * row), get_f32(top_ps + 4 * row), get_f32(min_ps + 4 * row)
        if (top_k > 0 and top_k < vocab) or top_p < one or min_p > nothing:
            token = draw_filtered(
                token, whole, seed, position, temperature, factor, best, top_k, top_p, min_p,
                logits, maxima, segments, vocab, values, ids, weights,
            )  # fmt: skip
        set_i64(out + 8 * row, token)

    return sample_pick


_BLOCKS_KERNEL, _PICK_KERNEL = Kernel(_make_blocks), Kernel(_make_pick)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`draw` of kernels/sampling.py."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 or vocab == 1
    out = empty((rows,), torch.int64)
    blocks, segments = -(-vocab // BLOCK), -(-vocab // SEGMENT)
    stats = empty((rows, 2, blocks), torch.float32)
    maxima = empty((rows, segments, 16), torch.float32)
    room = max(vocab, 16) + 32
    values, ids, weights = (scratch(4 * room) for _ in range(3))
    variant, stride = (DTYPES[logits.dtype],), logits.stride(0)
    programs = rows * -(-blocks // _BLOCKS)
    _BLOCKS_KERNEL.launch(
        variant, programs, logits, temperature, stats, maxima, stride, vocab, blocks, segments
    )
    _PICK_KERNEL.launch(
        variant,
        rows,
        *(logits, temperature, seeds, positions, top_k, top_p, min_p),
        *(stats, maxima, values, ids, weights, out, stride, vocab, blocks, segments, room),
    )
    return out
