"""Causal attention of new tokens over the paged cache, on a CPU, in place.

A program is some queries of one sequence with the query heads of one KV head. It copies a tile of keys,
turned, and of values to its own memory, and then multiplies tiles that stay in registers. Tiles of keys begin
at multiples of their size, so that a query's bits depend on no other query. Products are those of float32; on
CPUs with AVX512_BF16 bfloat16 is multiplied in pairs, with AMX in tiles; the weights of values are rounded to
it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel, empty, scratch
from nanovllm.kernels.paged import PLAIN, KVCache, Variant

_KEYS = 64  # of a tile
_ROWS = 96  # about so many query rows of a program
_SPARE = 64 + isa.MATRIX_CONFIG  # bytes
_PASS = 6  # rows of a product
_TILE_PASS = 32  # by AMX; 16 where a program has no more rows


def _by_matrices(dtype: str, head_dim: int) -> bool:
    """Whether AMX multiplies here, in tiles of 32 elements of a head."""
    return dtype == "bfloat16" and isa.has_matrices() and head_dim % isa.MATRIX_STEP == 0


def _sizes(group: int, head_dim: int) -> tuple[int, int, int, int]:
    """Queries of a program, its rows, bytes of a row in float32, bytes of a thread's scratch memory."""
    queries = max(1, _ROWS // group)
    rows = -(-queries * group // _TILE_PASS) * _TILE_PASS  # of either pass
    rows = max(rows, -(-queries * group // _PASS) * _PASS)
    row = -(-head_dim // 16) * 64
    return queries, rows, row, rows * (2 * row + 4 * _KEYS + 8) + (2 * _KEYS + 18) * row + _SPARE


def _make(dtype: str, group: int, head_dim: int, sink_dtype: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import attention_tiles as tiles
    from nanovllm.cpu.kernels import matrices
    from nanovllm.cpu.kernels import vectors as v

    size, rest = v.SIZES[dtype], head_dim % 16
    pairs = dtype == "bfloat16" and isa.has_bf16()
    kind, of_pair = ("pairs", 2) if pairs else ("float32", 1)
    words, last_words = -(-head_dim // 32), tiles.make_load_words(head_dim % 32 or 32)
    whole_words, store_words, interleave = v.load_i32, tiles.store_words, tiles.interleave
    load, store, store_part = v.WHOLE[dtype][0], v.WHOLE[dtype][1], v.PART[dtype][1]
    load_rest = tiles.make_load(dtype, 8)
    fresh = tiles.make_product(_PASS, _KEYS, kind, fresh=True)
    product = tiles.make_product(_PASS, -(-head_dim // 16) * 16, kind)
    transpose_16 = tiles.transpose_16
    add, sub, mul, div, splat, exp, tanh = v.add, v.sub, v.mul, v.div, v.splat, v.exp, v.tanh
    maximum, largest, total_of, first_lanes = v.maximum, v.largest, v.total, v.first_lanes
    load_f32, store_f32, get_f32, set_f32, get_i32 = v.load_f32, v.store_f32, v.get_f32, v.set_f32, v.get_i32
    get_sink = v.GET[sink_dtype or "float32"]
    has_sinks, sink_size = sink_dtype != "", v.SIZES[sink_dtype or "float32"]
    most_queries, most_rows, row_bytes, scratch_bytes = _sizes(group, head_dim)
    whole, vectors_of_row, keys = head_dim // 16, row_bytes // 64, _KEYS
    by_matrices = _by_matrices(dtype, head_dim)
    in_tiles, add_in_tiles = matrices.product, matrices.add_product
    configure, release = matrices.configure, matrices.release
    unit = isa.MATRIX_STEP if by_matrices else 16  # keys that are filled up with zeros
    config_bytes = isa.MATRIX_CONFIG
    plain_pass, tile_pass, half_pass = _PASS, _TILE_PASS, _TILE_PASS // 2

    def prefill(
        q: Address,
        k: Address,
        values: Address,
        tables: Address,
        bounds: Address,
        contexts: Address,
        sinks: Address,
        out: Address,
        memory: Address,
        kv_heads: int,
        tiles_of_row: int,
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
        head, place = program % kv_heads, program // kv_heads
        row, tile_index = place // tiles_of_row, tiles_of_row - 1 - place % tiles_of_row  # long ones first
        begin, end = get_i32(bounds + 4 * row), get_i32(bounds + 4 * row + 4)
        first = begin + tile_index * most_queries
        if first >= end:
            return
        count, context = min(most_queries, end - first), get_i32(contexts + 4 * row)
        out += (first * kv_heads + head) * group * head_dim * size
        out_stride = kv_heads * group * head_dim * size
        rows = count * group
        few = plain_pass
        if by_matrices:
            few = tile_pass if rows > half_pass else half_pass
        passes = (rows + few - 1) // few
        position = context - end + first  # of the first query
        queries = memory + thread * scratch_bytes
        sums = queries + most_rows * row_bytes
        scores = sums + most_rows * row_bytes
        tops = scores + most_rows * 4 * keys
        totals = tops + 4 * most_rows
        turned = totals + 4 * most_rows
        panels = turned + keys * row_bytes  # of values: rows of keys, or of pairs of keys
        stage = panels + keys * row_bytes
        if by_matrices:
            configure(queries + scratch_bytes - config_bytes, few)
        for r in range(passes * few):
            source = q + ((first + r // group) * q_stride + (head * group + r % group) * q_head_stride) * size
            for j in range(vectors_of_row):
                store_f32(sums + r * row_bytes + 64 * j, splat(0.0))
                store_f32(queries + r * row_bytes + 64 * j, splat(0.0))
            if pairs and r < rows:
                for j in range(words - 1):
                    store_words(queries + r * row_bytes + 64 * j, whole_words(source + 64 * j))
                j = words - 1
                store_words(queries + r * row_bytes + 64 * j, last_words(source + 64 * j))
            elif r < rows:
                for j in range(vectors_of_row):
                    if j < whole:
                        value = mul(load(source + 16 * size * j), splat(scale))
                    else:
                        value = mul(load_rest(source + 16 * size * j), splat(scale))
                    store_f32(queries + r * row_bytes + 64 * j, value)
            set_f32(tops + 4 * r, -1e30)
            set_f32(totals + 4 * r, 0.0)
        tables += 4 * row * table_stride
        k += head * head_stride * size
        values += head * head_stride * size
        low = max(0, position - window + 1) if window else 0
        high = position + count if context else 0
        for tile in range(low // keys * keys, high, keys):
            stop = min(tile + keys, high)
            groups = (stop - tile + unit - 1) // unit * (unit // 16)
            for at in range(tile, tile + 16 * groups):
                inside = at - tile
                key_row, block = stage + inside % 16 * row_bytes, 0
                if low <= at < stop:
                    block = get_i32(tables + 4 * (at // page))
                cell = (block * block_stride + at % page * position_stride) * size
                value_row = stage + (16 + inside % 2) * row_bytes if pairs else panels + inside * row_bytes
                if not low <= at < stop:
                    for j in range(vectors_of_row):
                        store_f32(key_row + 64 * j, splat(0.0))
                        store_f32(value_row + 64 * j, splat(0.0))
                elif pairs:
                    for j in range(words - 1):
                        store_words(key_row + 64 * j, whole_words(k + cell + 64 * j))
                        store_words(value_row + 64 * j, whole_words(values + cell + 64 * j))
                    j = words - 1
                    store_words(key_row + 64 * j, last_words(k + cell + 64 * j))
                    store_words(value_row + 64 * j, last_words(values + cell + 64 * j))
                else:
                    for j in range(vectors_of_row):
                        if j < whole:
                            key, value = load(k + cell + 16 * size * j), load(values + cell + 16 * size * j)
                        else:
                            key = load_rest(k + cell + 16 * size * j)
                            value = load_rest(values + cell + 16 * size * j)
                        store_f32(key_row + 64 * j, key)
                        store_f32(value_row + 64 * j, value)
                if pairs and inside % 2:
                    for j in range(vectors_of_row):
                        target = panels + inside // 2 * row_bytes + 64 * j
                        interleave(target, value_row - row_bytes + 32 * j, value_row + 32 * j)
                if inside % 16 == 15:
                    for j in range(words if pairs else vectors_of_row):
                        target = turned + (16 * j * keys + inside - 15) * 4
                        transpose_16(target, 4 * keys, stage + 64 * j, row_bytes)
            for each in range(passes):
                r = each * few
                if position + (min(r + few, rows) - 1) // group >= tile:
                    target, source = scores + 4 * r * keys, queries + r * row_bytes
                    if by_matrices:
                        in_tiles(few, target, source, row_bytes, turned, 0, head_dim // 2)
                    else:
                        fresh(target, 4 * keys, source, row_bytes, turned, 4 * keys, head_dim // of_pair)
            for r in range(rows):
                own, mine = scores + 4 * r * keys, position + r // group
                seen, hidden = mine + 1 - tile, (mine - window + 1 - tile if window else 0)
                top = get_f32(tops + 4 * r)
                highest = splat(top)
                for i in range(0, 16 * groups, 16):
                    score = load_f32(own + 4 * i)
                    if pairs:
                        score = mul(score, splat(scale))
                    if softcap != 0.0:
                        score = mul(tanh(div(score, splat(softcap))), splat(softcap))
                    if seen < i + 16:
                        score = first_lanes(score, splat(-1e38), seen - i)
                    if hidden > i:
                        score = first_lanes(splat(-1e38), score, hidden - i)
                    store_f32(own + 4 * i, score)
                    highest = maximum(score, highest)
                new_top = splat(largest(highest))
                added = splat(0.0)
                for i in range(0, 16 * groups, 16):
                    weight = exp(sub(load_f32(own + 4 * i), new_top))
                    if pairs:
                        store(own + 2 * i, weight)
                    else:
                        store_f32(own + 4 * i, weight)
                    added = add(added, weight)
                new = largest(new_top)
                if new != top:
                    decay = exp(sub(splat(top), new_top))
                    for j in range(vectors_of_row):
                        target = sums + r * row_bytes + 64 * j
                        store_f32(target, mul(load_f32(target), decay))
                    set_f32(totals + 4 * r, largest(mul(decay, splat(get_f32(totals + 4 * r)))))
                    set_f32(tops + 4 * r, new)
                set_f32(totals + 4 * r, get_f32(totals + 4 * r) + total_of(added))
            for each in range(passes):
                r = each * few
                used = min(stop, position + (min(r + few, rows) - 1) // group + 1) - tile
                if used > 0:
                    target, source = sums + r * row_bytes, scores + 4 * r * keys
                    count_used = (used + of_pair - 1) // of_pair
                    if by_matrices:
                        add_in_tiles(few, target, source, 4 * keys, panels, head_dim, 8 * groups)
                    else:
                        product(target, row_bytes, source, 4 * keys, panels, row_bytes, count_used)
        if by_matrices:
            release()
        for r in range(rows):
            total = splat(get_f32(totals + 4 * r))
            if has_sinks:
                sink = get_sink(sinks + (head * group + r % group) * sink_size)
                total = add(total, exp(sub(splat(sink), splat(get_f32(tops + 4 * r)))))
            if context == 0:
                total = splat(1.0)
            for j in range(vectors_of_row):
                value = div(load_f32(sums + r * row_bytes + 64 * j), total)
                target = out + r // group * out_stride + (r % group * head_dim + 16 * j) * size
                if j < whole:
                    store(target, value)
                elif rest:
                    store_part(target, value, 8)

    return prefill


_KERNEL = Kernel(_make)


def paged_prefill_attention(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """`paged_prefill_attention_triton` on a CPU, for caches of q's dtype.

    Heads of the cache may lie in any order; a head's elements are contiguous.
    """
    q_heads, head_dim = q.shape[1:]
    page, kv_heads = cache.k.shape[1:3]
    group = q_heads // kv_heads
    if cache.k.dtype != q.dtype:
        raise ValueError(f"queries of {q.dtype} need a KV cache of this dtype here, not {cache.k.dtype}")
    assert q.stride(2) == 1 and cache.k.stride(3) == 1 and cache.k.stride() == cache.v.stride()
    out = empty(q.shape, q.dtype)
    out[int(cu_seqlens_q[-1]) :] = 0
    queries, _, _, scratch_bytes = _sizes(group, head_dim)
    tiles = -(-max_seqlen_q // queries)
    memory = scratch(scratch_bytes)
    sinks = variant.sinks
    if sinks is not None and sinks.dtype == torch.float16:
        sinks = sinks.float()
    _KERNEL.launch(
        (DTYPES[q.dtype], group, head_dim, "" if sinks is None else DTYPES[sinks.dtype]),
        len(context_lens) * tiles * kv_heads,
        *(q, cache.k, cache.v, block_tables, cu_seqlens_q, context_lens, sinks, out, memory),
        *(kv_heads, tiles, q.stride(0), q.stride(1), block_tables.stride(0), page, *cache.k.stride()[:3]),
        *(variant.window or 0, scale, variant.softcap or 0.0),
    )
    return out
