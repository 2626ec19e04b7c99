"""Attention of one new token for each sequence over the paged cache, on a CPU, in place.

A context is split into parts, by its own length only, so that bits depend on no other row. A program does the
query heads of one KV head for some parts of one context; a second launch merges the parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty, scratch
from nanovllm.kernels.paged import PLAIN, KVCache, Variant

_PARTS = 8  # the most parts of a context
_LEAST = 512  # positions of a part, if there are several
_KEYS = 128  # scores at once
_ENOUGH = 64  # programs; with fewer the parts of a context have programs of their own


def _sizes(group: int, head_dim: int) -> tuple[int, int, int]:
    """Bytes of a head's row in float32, of a thread's scratch memory, of a part's result."""
    row = -(-head_dim // 16) * 64
    return row, group * (2 * row + 1024 + 4 * _KEYS + 8) + 64, group * (row + 64)


def _make(dtype: str, group: int, head_dim: int, sink_dtype: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import attention_tiles as tiles
    from nanovllm.cpu.kernels import vectors as v

    size, rest = v.SIZES[dtype], head_dim % 16
    load, store, store_part = v.WHOLE[dtype][0], v.WHOLE[dtype][1], v.PART[dtype][1]
    load_rest = tiles.make_load(dtype, 8)
    keys_at_once = max(1, 4 // group)
    dots, dots_one = (tiles.make_dots(group, head_dim, dtype, keys) for keys in (keys_at_once, 1))
    product, sums_of_16 = tiles.make_product(group, head_dim, dtype), tiles.sums_of_16
    add, sub, mul, div, splat, exp, tanh = v.add, v.sub, v.mul, v.div, v.splat, v.exp, v.tanh
    maximum, largest, total_of, first_lanes = v.maximum, v.largest, v.total, v.first_lanes
    load_f32, store_f32, get_f32, set_f32, get_i32 = v.load_f32, v.store_f32, v.get_f32, v.set_f32, v.get_i32
    get_sink = v.GET[sink_dtype or "float32"]
    has_sinks, sink_size = sink_dtype != "", v.SIZES[sink_dtype or "float32"]
    row_bytes, scratch_bytes, part_bytes = _sizes(group, head_dim)
    whole, vectors_of_row = head_dim // 16, row_bytes // 64
    most_parts, least, tile_keys = _PARTS, _LEAST, _KEYS
    prefetch, lines, ahead = v.prefetch, -(-head_dim * size // 64), 16  # keys

    def decode(
        q: Address,
        k: Address,
        v: Address,
        tables: Address,
        contexts: Address,
        sinks: Address,
        out: Address,
        partial: Address,
        memory: Address,
        kv_heads: int,
        parts_at_once: int,
        q_stride: int,
        q_head_stride: int,
        table_stride: int,
        page: int,
        block_stride: int,
        position_stride: int,
        head_stride: int,
        window: int,
        scale: float,
        softcap: float,
        program: int,
        thread: int,
    ) -> None:
        row, within = program // (kv_heads * parts_at_once), program % (kv_heads * parts_at_once)
        head, first_part = within // parts_at_once, within % parts_at_once
        context = get_i32(contexts + 4 * row)
        out += (row * kv_heads + head) * group * head_dim * size
        if context == 0:
            if first_part == 0:
                for g in range(group):
                    for j in range(whole):
                        store(out + (g * head_dim + 16 * j) * size, splat(0.0))
                    if rest:
                        store_part(out + (g * head_dim + 16 * whole) * size, splat(0.0), 8)
            return
        start = max(0, context - window) if window else 0
        length = max(least, ((context - start + most_parts - 1) // most_parts + 127) // 128 * 128)
        parts = (context - start + length - 1) // length
        if first_part >= parts:
            return
        queries = memory + thread * scratch_bytes
        sums = queries + group * row_bytes
        lanes = sums + group * row_bytes
        scores = lanes + group * 1024
        tops = scores + group * 4 * tile_keys
        totals = tops + 4 * group
        for g in range(group):
            source = q + (row * q_stride + (head * group + g) * q_head_stride) * size
            for j in range(whole):
                store_f32(queries + g * row_bytes + 64 * j, mul(load(source + 16 * size * j), splat(scale)))
            if rest:
                value = mul(load_rest(source + 16 * size * whole), splat(scale))
                store_f32(queries + g * row_bytes + 64 * whole, value)
        tables += 4 * row * table_stride
        k += head * head_stride * size
        v += head * head_stride * size
        step = position_stride * size
        for part in range(first_part, parts, parts_at_once):
            begin = start + part * length
            end = min(context, begin + length)
            for g in range(group):
                for j in range(vectors_of_row):
                    store_f32(sums + g * row_bytes + 64 * j, splat(0.0))
                set_f32(tops + 4 * g, -1e30)
                set_f32(totals + 4 * g, 0.0)
            for tile in range(begin, end, tile_keys):
                tile_end = min(end, tile + tile_keys)
                for few in range(tile, tile_end, 16):
                    at, few_end = few, min(tile_end, few + 16)
                    while at < few_end:
                        run = min(few_end - at, page - at % page)
                        block = get_i32(tables + 4 * (at // page))
                        cell = k + (block * block_stride + at % page * position_stride) * size
                        place = lanes + 64 * (at - few)
                        # Values and later keys come into the cache while keys are multiplied.
                        value = v + (block * block_stride + at % page * position_stride) * size
                        done = 0
                        while done + keys_at_once <= run:
                            dots(place + 64 * done, queries, cell + done * step, step)
                            for key in range(done, done + keys_at_once):
                                for line in range(lines):
                                    prefetch(value + key * step + 64 * line)
                                    prefetch(cell + (key + ahead) * step + 64 * line)
                            done += keys_at_once
                        while done < run:
                            dots_one(place + 64 * done, queries, cell + done * step, step)
                            done += 1
                        at += run
                    for g in range(group):
                        score = sums_of_16(lanes + 1024 * g)
                        if softcap != 0.0:
                            score = mul(tanh(div(score, splat(softcap))), splat(softcap))
                        score = first_lanes(score, splat(-1e38), few_end - few)
                        store_f32(scores + 4 * (g * tile_keys + few - tile), score)
                for g in range(group):
                    own = scores + 4 * g * tile_keys
                    top = get_f32(tops + 4 * g)
                    high = splat(top)
                    for i in range(0, tile_end - tile, 16):
                        high = maximum(load_f32(own + 4 * i), high)
                    new_top = splat(largest(high))
                    added = splat(0.0)
                    for i in range(0, tile_end - tile, 16):
                        weight = exp(sub(load_f32(own + 4 * i), new_top))
                        store_f32(own + 4 * i, weight)
                        added = add(added, weight)
                    decay = exp(sub(splat(top), new_top))
                    kept = largest(mul(decay, splat(get_f32(totals + 4 * g))))
                    set_f32(totals + 4 * g, kept + total_of(added))
                    set_f32(tops + 4 * g, largest(new_top))
                    for j in range(vectors_of_row):
                        place = sums + g * row_bytes + 64 * j
                        store_f32(place, mul(load_f32(place), decay))
                at = tile
                while at < tile_end:
                    run = min(tile_end - at, page - at % page)
                    block = get_i32(tables + 4 * (at // page))
                    cell = v + (block * block_stride + at % page * position_stride) * size
                    weights = scores + 4 * (at - tile)
                    product(sums, row_bytes, weights, 4 * tile_keys, cell, step, run)
                    at += run
            if parts > 1:
                result = partial + ((row * kv_heads + head) * most_parts + part) * part_bytes
                for g in range(group):
                    for j in range(vectors_of_row):
                        value = load_f32(sums + g * row_bytes + 64 * j)
                        store_f32(result + g * (row_bytes + 64) + 64 * j, value)
                    set_f32(result + g * (row_bytes + 64) + row_bytes, get_f32(tops + 4 * g))
                    set_f32(result + g * (row_bytes + 64) + row_bytes + 4, get_f32(totals + 4 * g))
                continue
            for g in range(group):
                total = splat(get_f32(totals + 4 * g))
                if has_sinks:
                    sink = get_sink(sinks + (head * group + g) * sink_size)
                    total = add(total, exp(sub(splat(sink), splat(get_f32(tops + 4 * g)))))
                for j in range(vectors_of_row):
                    value = div(load_f32(sums + g * row_bytes + 64 * j), total)
                    place = out + (g * head_dim + 16 * j) * size
                    if j < whole:
                        store(place, value)
                    else:
                        store_part(place, value, 8)

    return decode


def _make_merge(dtype: str, group: int, head_dim: int, sink_dtype: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    size, rest = v.SIZES[dtype], head_dim % 16
    store, store_part = v.WHOLE[dtype][1], v.PART[dtype][1]
    add, sub, div, fma, splat, exp = v.add, v.sub, v.div, v.fma, v.splat, v.exp
    load_f32, get_f32, get_i32 = v.load_f32, v.get_f32, v.get_i32
    get_sink = v.GET[sink_dtype or "float32"]
    has_sinks, sink_size = sink_dtype != "", v.SIZES[sink_dtype or "float32"]
    row_bytes, _, part_bytes = _sizes(group, head_dim)
    whole, vectors_of_row = head_dim // 16, row_bytes // 64
    most_parts, least = _PARTS, _LEAST

    def merge(
        contexts: Address,
        sinks: Address,
        out: Address,
        partial: Address,
        kv_heads: int,
        window: int,
        program: int,
        thread: int,
    ) -> None:
        context = get_i32(contexts + 4 * program)
        start = max(0, context - window) if window else 0
        length = max(least, ((context - start + most_parts - 1) // most_parts + 127) // 128 * 128)
        parts = (context - start + length - 1) // length
        if parts <= 1:
            return
        for index in range(kv_heads * group):
            head, g = index // group, index % group
            source = partial + (program * kv_heads + head) * most_parts * part_bytes + g * (row_bytes + 64)
            top = get_f32(source + row_bytes)
            for part in range(1, parts):
                top = max(top, get_f32(source + part * part_bytes + row_bytes))
            total = splat(0.0)
            for part in range(parts):
                place = source + part * part_bytes + row_bytes
                total = fma(exp(sub(splat(get_f32(place)), splat(top))), splat(get_f32(place + 4)), total)
            if has_sinks:
                total = add(total, exp(sub(splat(get_sink(sinks + index * sink_size)), splat(top))))
            target = out + (program * kv_heads * group + index) * head_dim * size
            for j in range(vectors_of_row):
                value = splat(0.0)
                for part in range(parts):
                    place = source + part * part_bytes
                    weight = exp(sub(splat(get_f32(place + row_bytes)), splat(top)))
                    value = fma(weight, load_f32(place + 64 * j), value)
                if j < whole:
                    store(target + 16 * size * j, div(value, total))
                elif rest:
                    store_part(target + 16 * size * j, div(value, total), 8)

    return merge


_KERNEL, _MERGE = Kernel(_make), Kernel(_make_merge)


def paged_decode_attention(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """`paged_decode_attention_triton` on a CPU, for caches of q's dtype.

    Heads of the cache may lie in any order; a head's elements are contiguous. Reads no length here.
    """
    rows, q_heads, head_dim = q.shape
    page, kv_heads = cache.k.shape[1:3]
    group = q_heads // kv_heads
    if cache.k.dtype != q.dtype:
        raise ValueError(f"queries of {q.dtype} need a KV cache of this dtype here, not {cache.k.dtype}")
    assert q.stride(2) == 1 and cache.k.stride(3) == 1 and cache.k.stride() == cache.v.stride()
    out = empty(q.shape, q.dtype)
    reach = min(max_context_len, variant.window or max_context_len)
    several = reach > _LEAST
    at_once = min(_PARTS, -(-reach // _LEAST), max(1, _ENOUGH // max(1, rows * kv_heads)))
    _, scratch_bytes, part_bytes = _sizes(group, head_dim)
    memory = scratch(scratch_bytes)
    partial = empty((rows, kv_heads, _PARTS, part_bytes), torch.uint8) if several else None
    sinks = variant.sinks
    if sinks is not None and sinks.dtype == torch.float16:
        sinks = sinks.float()
    heads = DTYPES[q.dtype], group, head_dim
    sink_dtype = "" if sinks is None else DTYPES[sinks.dtype]
    block_stride, position_stride, head_stride = cache.k.stride()[:3]
    _KERNEL.launch(
        (*heads, sink_dtype),
        rows * kv_heads * max(1, at_once),
        *(q, cache.k, cache.v, block_tables, context_lens, sinks, out, partial, memory),
        *(kv_heads, max(1, at_once), q.stride(0), q.stride(1), block_tables.stride(0), page),
        *(block_stride, position_stride, head_stride, variant.window or 0, scale, variant.softcap or 0.0),
    )
    if several:
        window = variant.window or 0
        _MERGE.launch((*heads, sink_dtype), rows, context_lens, sinks, out, partial, kv_heads, window)
    return out
