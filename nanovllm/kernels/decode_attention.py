"""Attention of one new token per sequence over its paged context, in chunks of fixed length that are merged.

With `invariant` chunk length and tiles do not depend on the batch, so a row has the same bits in any batch,
unless the caller asks for wide tiles of shared prefixes. Writes no cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.batch import PADDING
from nanovllm.kernels.compat import (
    FEW_ROWS,
    await_inputs,
    jit,
    next_power_of_2,
    pdl_options,
    shared_memory,
    tl,
)
from nanovllm.kernels.merge_chunks import merge_chunks
from nanovllm.kernels.paged import (
    LOG2_E,
    PLAIN,
    Heads,
    KVCache,
    Variant,
    as_words,
    attend_range,
    finish_softmax,
    load_pages,
    start_softmax,
    window_start,
    with_sinks,
)

# Launch choices, measured on an H200 unless stated otherwise (docs/log/2026-11-22-techniques.md).
CHUNK = 512  # positions per partial result
SHARED_CHUNK = 256  # the same for shared prefixes: two blocks of the default size
LONG_PREFIX = 2048  # not measured: from this length on CHUNK loses little, and halves the partial results
# Chunks for small batches, which chunks of 512 would not spread over the device: of up to FEW_ROWS sequences,
# and of up to so many programs.
_FEW_CHUNK, _SMALL_CHUNK, _SMALL_PROGRAMS = 128, 256, 128
_FP8_CHUNK = 2048  # with an FP8 cache and enough programs to fill the device many times
_FULL_PROGRAMS = 1600  # the number of programs that is enough, each with a single warp
_MERGED_HEADS = 4  # in a large batch: with one head, most of 4,096 programs would have nothing to merge
_MAX_PARTIAL = 3 * 2**29  # bytes of partial results; CUDA graphs keep this memory
_LANES = 2  # chunks of a sequence computed in parallel; more in a small batch
_PROGRAMS = 2048  # a batch with fewer programs is small
_UNITS = 16  # units of sequences computed in parallel
_MANY_PROGRAMS = 1024  # from this number on each program has a single warp: eight on each multiprocessor
_SINGLE_PROGRAMS = 128  # for a single sequence, with one program on each multiprocessor
_MUCH_SHARED_MEMORY = 160 * 2**10  # bytes that such a program, or one with a wide tile, may need
_HEAD_TILE = 16  # the minimum number of rows of tl.dot; a group of query heads is padded to it
_WIDE_TILE = 64  # rows of the tiles for shared prefixes: more would not fit into registers


def least_chunk(q_heads: int, head_dim: int, max_context_len: int, sequences: int) -> int:
    """The minimum number of positions per partial result, a power of 2, for which the partial results of
    `sequences` sequences fit into `_MAX_PARTIAL` bytes."""
    most_chunks = max(1, _MAX_PARTIAL // (4 * sequences * q_heads * head_dim))
    return next_power_of_2(-(-max_context_len // most_chunks))


def _chunk(sequences: int, heads: Heads, invariant: bool, max_context_len: int) -> int:
    """Positions per partial result, for `sequences` sequences without shared prefixes."""
    if invariant:
        return CHUNK
    tiles = heads.kv_heads * -(-heads.group // _HEAD_TILE)
    chunk = _SMALL_CHUNK if sequences * tiles <= _SMALL_PROGRAMS else CHUNK
    chunk = _FEW_CHUNK if sequences <= FEW_ROWS else chunk
    if heads.step == 2 and heads.dim <= 128 and sequences * tiles >= _FULL_PROGRAMS:
        chunk = _FP8_CHUNK
    return max(chunk, least_chunk(heads.q_heads, heads.head_dim, max_context_len, sequences))


class _Tiles(NamedTuple):
    """The tile sizes of one launch."""

    block_n: int  # positions per tile: 16 KiB of keys, so that two tiles of three programs fit; at least 16
    warps: int
    stages: int


def _tiles(heads: Heads, cell_size: int, chunk: int, programs: int, plain: bool, single: bool) -> _Tiles:
    """The tiles for `programs` programs per chunk. plain: tiles have `_HEAD_TILE` rows."""
    block_n = min(128, max(16, (8192 if cell_size <= 2 else 4096) // heads.dim))
    if single:
        block_n = min(chunk, 2 * block_n)
    # With an FP8 cache the warps of a program wait for each other more than for memory, so use one warp.
    if heads.step == 1 or heads.dim > 128 or not plain or chunk == _FEW_CHUNK:
        stages = 3 if heads.dim <= 256 else 2 if cell_size <= 2 else 1
        return _Tiles(block_n, 4, stages)
    if programs >= _MANY_PROGRAMS:
        return _Tiles(max(16, block_n // 4), 1, 4)
    return _Tiles(block_n, 2, 3)


def _of_window(window: int, chunk: int, tiles: _Tiles, head_dim: int) -> tuple[int, _Tiles]:
    """The chunk length and the tiles for a window, near those for full attention.

    A window begins within a tile, so small windows have small tiles. No chunk holds only that first part.
    head_dim: with a few small tiles one warp is faster (64/8 heads of 64 and a window of 128 on an H100: 16
    sequences take 4.8 us instead of 6.3, 256 take 29.8 instead of 30.8).
    """
    block_n = min(tiles.block_n, max(16, next_power_of_2(window) // 4))
    if block_n < tiles.block_n and head_dim <= 64:
        tiles = tiles._replace(warps=1)
    chunks = max(1, window // chunk)
    return -(-(window + block_n - 1) // (chunks * block_n)) * block_n, tiles._replace(block_n=block_n)


class Shared(NamedTuple):
    """Units of sequences that begin with the same blocks; int32."""

    members: torch.Tensor  # [U, members], the rows of each unit
    lens: torch.Tensor  # [U], the positions that each unit shares
    skips: torch.Tensor  # [S], the same for each row, or 0
    units: torch.Tensor  # [1], the number of units
    chunk: int  # positions per partial result; each length is a multiple of this


class SharedUnit(NamedTuple):
    """The size of a group for shared prefixes: maximum sequences, and the unit of shared positions."""

    sequences: int
    positions: int


def shared_unit(
    group: int, head_dim: int, cache_dtype: torch.dtype, device: torch.device, invariant: bool
) -> SharedUnit:
    """The unit of shared prefixes for `group` query heads of each KV head; one program computes one tile.

    With `invariant` the tiles are the same as without sharing, so no bit changes. Wide tiles round
    differently, and must fit into a program's shared memory and registers.
    """
    small = not invariant and head_dim <= 128 and cache_dtype.itemsize <= 2
    wide = small and device.type != "cpu" and shared_memory(device) >= _MUCH_SHARED_MEMORY
    tile, chunk = _WIDE_TILE if wide else _HEAD_TILE, CHUNK if invariant else SHARED_CHUNK
    return SharedUnit(tile // group, chunk)


@jit("tables_ptr", "contexts_ptr", "table_stride", "chunks")
def _decode_chunk_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_ptr: tl.tensor,
    out_ptr: tl.tensor,
    members_ptr: tl.tensor,
    units_ptr: tl.tensor,
    skips_ptr: tl.tensor,
    scale_log2: float,
    q_stride_s: int,
    q_stride_h: int,
    table_stride: int,
    chunks: int,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
    PADDING: tl.constexpr = PADDING,
    sinks_ptr: tl.tensor = None,
    WINDOW: tl.constexpr = 0,
    SOFTCAP: tl.constexpr = 0.0,
) -> None:
    """One program per (tile of a KV head's query heads, sequence, lane); a lane computes every n-th chunk.

    Writes a chunk's own attention to partial [S, Q_HEADS, chunks, HEAD_DIM] and log2 of its softmax sum to
    log [S, Q_HEADS, chunks]. The only chunk of a short context goes to out [S, Q_HEADS, HEAD_DIM]. The heads
    of a sequence are neighbours in the grid, so that concurrent reads are close together. With `members`
    [U, HEAD_TILE // GROUP], units replace sequences: all members of a unit share the first contexts[unit]
    positions, and a program may compute several units. With the same HEAD_TILE, each row of the tile has the
    same bits as without units. With a WINDOW, never with units, the first chunk begins at the window's first
    tile.
    """
    Q_HEADS: tl.constexpr = HEADS.q_heads
    HEAD_DIM: tl.constexpr = HEADS.head_dim
    DIM: tl.constexpr = HEADS.dim
    GROUP: tl.constexpr = HEADS.q_heads // HEADS.kv_heads
    TILES: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    kv_head = tl.program_id(0) // TILES
    rows = tl.arange(0, HEAD_TILE)
    dims = tl.arange(0, DIM)
    if k_scale_ptr is not None:
        scale_log2 *= tl.load(k_scale_ptr + kv_head)
    turns = 1
    if members_ptr is not None:
        turns = tl.cdiv(tl.load(units_ptr) - tl.program_id(1), tl.num_programs(1))
    for turn in range(turns):
        unit = tl.program_id(1) + turn * tl.num_programs(1)
        context = tl.load(contexts_ptr + unit)
        first = tl.program_id(2)
        base = 0
        if WINDOW:
            base = window_start(context, WINDOW, BLOCK_N)
        if members_ptr is None:
            sequence = tl.program_id(1).to(tl.int64)
            sequences = sequence
            members = (tl.program_id(0) % TILES) * HEAD_TILE + rows
            used = members < GROUP
            # At least one chunk: an empty context writes zeros.
            count = tl.maximum(tl.cdiv(context - base, CHUNK), 1)
            single = context - base <= CHUNK
            if skips_ptr is not None:
                first += tl.load(skips_ptr + sequence) // CHUNK
        else:
            PER_UNIT: tl.constexpr = HEAD_TILE // GROUP
            unit_ptr = members_ptr + unit * PER_UNIT
            sequence = tl.load(unit_ptr).to(tl.int64)
            filled = rows < PER_UNIT * GROUP
            sequences = tl.load(unit_ptr + rows // GROUP, mask=filled, other=PADDING).to(tl.int64)
            members = rows % GROUP
            used = sequences != PADDING
            count = tl.cdiv(context, CHUNK)
            single = False
        heads = kv_head * GROUP + members
        mask = used[:, None] & (dims < HEAD_DIM)[None, :]
        q_ptrs = q_ptr + (sequences * q_stride_s + heads * q_stride_h)[:, None] + dims[None, :]
        table_ptr = tables_ptr + sequence * table_stride
        keys = (k_ptr, v_ptr, table_ptr)
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + heads, mask=used, other=0.0).to(tl.float32)
        for chunk in range(first, count, tl.num_programs(2)):
            start = base + chunk * CHUNK
            end = tl.minimum(context, start + CHUNK)
            pages = load_pages(table_ptr, start, end, HEADS.page, BLOCK_N)
            await_inputs(USE_PDL)  # at least one program makes this call, which is enough for the next kernel
            q, state = start_softmax(tl.load(q_ptrs, mask=mask, other=0.0), HEADS)
            if sinks_ptr is not None:  # they count once
                state = with_sinks(state, tl.where(chunk == 0, sinks, float("-inf")))
            last = tl.zeros((HEAD_TILE,), tl.int32) + ((context if WINDOW else end) - 1)
            state, pages = attend_range(
                state,
                q,
                keys,
                kv_head,
                pages,
                (start, end, end),
                last,
                scale_log2,
                HEADS,
                BLOCK_N,
                True,
                False,
                WINDOW,
                SOFTCAP,
            )
            attended, logs = finish_softmax(state, context, v_scale_ptr, kv_head, HEADS)
            if single:
                cells = (sequences * Q_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
                tl.store(out_ptr + cells, attended.to(out_ptr.dtype.element_ty), mask=mask)
            else:
                # Read again soon: keep it in the L2 cache while keys and values stream through.
                parts = (sequences * Q_HEADS + heads) * chunks + chunk
                cells = parts[:, None] * HEAD_DIM + dims[None, :]
                tl.store(partial_ptr + cells, attended, mask=mask, eviction_policy="evict_last")
                tl.store(log_ptr + parts, logs, mask=used, eviction_policy="evict_last")


def paged_decode_attention_triton(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    shared: Shared | None = None,
    invariant: bool = True,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """Attend from each sequence's newest token to its whole context, which includes that token.

    q: [S, q_heads, head_dim], last dimension contiguous; with an FP8 cache it is cast to float16. Cache cells
    past a context may hold anything. block_tables: [S, W] int32; blocks past a context are not read.
    context_lens: [S] int32, each at most `max_context_len`; a row of length 0 gives zeros. Returns a new
    [S, q_heads, head_dim]. Only launches kernels, so a CUDA graph can capture it.

    The split over the context is that of flash-decoding (Dao et al., 2023), with chunks of fixed length.
    shared: groups of sequences with a common prefix, which is read once for each group. In units of 16 query
    heads the result has the same bits; in wider units it differs by rounding. Not with a window. Without
    `invariant` the order of a row's sum may depend on the number of rows.
    """
    sequences, heads, window = len(q), Heads.of(q, cache), variant.window
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if sequences == 0:
        return out
    assert block_tables.stride(1) == 1 and (shared is None or window is None)
    longest = max_context_len if window is None else min(max_context_len, window)
    chunk = _chunk(sequences, heads, invariant, longest) if shared is None else shared.chunk
    large, few = chunk >= CHUNK or shared is not None, chunk == _FEW_CHUNK
    single = few and sequences == 1 and shared_memory(q.device) >= _MUCH_SHARED_MEMORY
    tiles = heads.kv_heads * -(-heads.group // _HEAD_TILE)
    item = cache.k.element_size()
    alone = _tiles(heads, item, chunk, 0 if invariant else sequences * tiles, True, single)
    if window is not None:
        chunk, alone = _of_window(window, chunk, alone, heads.head_dim)
        longest = min(max_context_len, window + alone.block_n - 1)
    chunks = max(1, -(-longest // chunk))
    shape = (sequences, heads.q_heads, chunks) if chunks > 1 else (1, 1, 1)
    partial = q.new_empty((*shape, heads.head_dim), dtype=torch.float32)
    logs = q.new_empty(shape, dtype=torch.float32)

    def launch(
        units: int, lengths: torch.Tensor, prefixes: Shared | None, skips: torch.Tensor | None
    ) -> None:
        members, used_units = (None, None) if prefixes is None else (prefixes.members, prefixes.units)
        head_tile, wide, (block_n, warps, stages) = _HEAD_TILE, tiles, alone
        if members is not None:
            head_tile = max(_HEAD_TILE, next_power_of_2(members.shape[1] * heads.group))
            wide, units = heads.kv_heads, min(units, _UNITS)
            block_n, warps, stages = _tiles(heads, item, chunk, 0, head_tile == _HEAD_TILE, single)
        # Programs without work are cheap but not free, and `max_context_len` may be far above the contexts.
        programs = _SINGLE_PROGRAMS if single else _PROGRAMS
        lanes = min(chunks, max(_LANES, programs // (units * wide)))
        _decode_chunk_kernel[(wide, units, lanes)](
            q,
            as_words(cache.k),
            as_words(cache.v),
            cache.k_scale,
            cache.v_scale,
            block_tables,
            lengths,
            partial,
            logs,
            out,
            members,
            used_units,
            skips,
            scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            block_tables.stride(0),
            chunks,
            HEADS=heads,
            CHUNK=chunk,
            HEAD_TILE=head_tile,
            BLOCK_N=block_n,
            num_warps=warps,
            num_stages=stages,
            **variant.options(),
            **pdl_options(q),
        )

    if shared is None:
        launch(sequences, context_lens, None, None)
    else:
        launch(len(shared.lens), shared.lens, shared, None)
        launch(sequences, context_lens, None, shared.skips)
    if chunks > 1:
        begin = None if window is None else (window, alone.block_n)
        merge_chunks(partial, logs, context_lens, out, chunk, _MERGED_HEADS if large else 1, begin)
    return out
