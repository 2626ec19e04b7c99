"""Attention of one new token per sequence over its paged context, in chunks of fixed length that are merged.

With `invariant` chunk length and tiles do not depend on the batch, so a row's bits are the same alone and in
any batch, unless a caller asks for wide tiles of what sequences share. Writes no cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.batch import PADDING
from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.compat import (
    FEW_ROWS,
    INTERPRET,
    await_inputs,
    jit,
    launch_early,
    shared_memory,
    tl,
    triton,
    use_triton,
)
from nanovllm.kernels.merge_chunks import merge_chunks
from nanovllm.kernels.paged import FP8, as_words, attend_range, converts_fp8, dequantized, load_pages

CHUNK = 512  # positions per partial result
SHARED_CHUNK = 256  # the same where sequences share prefixes: a block of the default size can be shared
# The same for batches of up to so many sequences, which chunks of 512 would not spread over the device:
_SMALL_BATCHES = {FEW_ROWS: 128, 8: 256}
_FP8_CHUNK = 2048  # with an FP8 cache and programs enough to fill the device again and again
_FULL_PROGRAMS = 1600  # by how many they do, each with a single warp
_MERGED_HEADS = 4  # in a large batch: of 4,096 programs with one head most would find nothing to merge
_LANES = 2  # chunks of a sequence at work at a time, or more in a small batch
_PROGRAMS = 2048  # a batch is small if it has fewer programs than this
_UNITS = 16  # units of sequences at work at a time
_MANY_PROGRAMS = 1024  # so many that each can have a single warp: eight on each multiprocessor of an H200
_SINGLE_PROGRAMS = 128  # for a single sequence, where each has a multiprocessor to itself
_MUCH_SHARED_MEMORY = 160 * 2**10  # bytes, which such a program may need, or one with a wide tile
_HEAD_TILE = 16  # the fewest rows tl.dot takes; a group of query heads is padded to it
_WIDE_TILE = 64  # rows of the tiles that read a shared prefix: more would not fit the registers

# Units of sequences that begin in the same blocks, all int32: their rows [U, members], the positions each
# shares [U], the same by row [S] or 0, and the number of units [1].
Shared = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class SharedUnit(NamedTuple):
    """What the kernel reads once: a multiple of so many positions, for at most so many sequences together."""

    sequences: int
    positions: int


def shared_unit(
    group: int, head_dim: int, cache_dtype: torch.dtype, device: torch.device, invariant: bool
) -> SharedUnit:
    """The unit of shared prefixes for `group` query heads of each KV head: a tile of them is one program's.

    With `invariant` tiles are those of all other programs, so that no bit changes; wide ones round otherwise,
    and must fit a program's memory and registers.
    """
    small = not invariant and head_dim <= 128 and cache_dtype.itemsize <= 2
    wide = small and device.type == "cuda" and shared_memory(device) >= _MUCH_SHARED_MEMORY
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
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDING: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    CONVERTS: tl.constexpr,
    EARLY: tl.constexpr,
    INTERPRET: tl.constexpr,
) -> None:
    """One program per (tile of a KV head's query heads, sequence, lane); a lane does each n-th chunk.

    Writes a chunk's own attention to partial [S, Q_HEADS, chunks, HEAD_DIM] and log2 of its softmax sum to
    log [S, Q_HEADS, chunks]; the only chunk of a short context goes to out [S, Q_HEADS, HEAD_DIM]. The heads
    of a sequence are neighbours in the grid, so that what is read at a time lies together. With `members`
    [U, HEAD_TILE // GROUP], each of the `units` takes the place of a sequence, all with the same first
    contexts[unit] positions; a program may do several. If HEAD_TILE is the same too, so is each row of the
    tile, bit for bit.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    TILES: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    STEP: tl.constexpr = 2 if FP8 else 1  # elements of a head in one of the cache
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
        if members_ptr is None:
            sequence = tl.program_id(1).to(tl.int64)
            sequences = sequence
            members = (tl.program_id(0) % TILES) * HEAD_TILE + rows
            used = members < GROUP
            count = tl.maximum(tl.cdiv(context, CHUNK), 1)  # an empty context has zeros to be written
            single = context <= CHUNK
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
        for chunk in range(first, count, tl.num_programs(2)):
            start = chunk * CHUNK
            end = tl.minimum(context, start + CHUNK)
            pages = load_pages(table_ptr, start, end, PAGE, BLOCK_N)
            await_inputs(EARLY)  # some program comes here in every step, so the next kernel may rely on it
            q = tl.load(q_ptrs, mask=mask, other=0.0)
            q_odd = q
            if FP8:
                q, q_odd = tl.split(tl.reshape(q.to(tl.float16), (HEAD_TILE, DIM // 2, 2)))
            acc = tl.zeros((HEAD_TILE, DIM // STEP), tl.float32)
            acc_odd = tl.zeros((HEAD_TILE, DIM // STEP), tl.float32)
            total = tl.zeros((HEAD_TILE,), tl.float32)
            top = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
            last = tl.zeros((HEAD_TILE,), tl.int32) + (end - 1)
            acc, acc_odd, total, top, pages = attend_range(
                acc,
                acc_odd,
                total,
                top,
                q,
                q_odd,
                k_ptr + kv_head * (HEAD_DIM // STEP),
                v_ptr + kv_head * (HEAD_DIM // STEP),
                0,
                table_ptr,
                pages,
                start,
                end,
                end,
                last,
                scale_log2,
                True,
                KV_HEADS * HEAD_DIM // STEP,
                HEAD_DIM // STEP,
                DIM // STEP,
                PAGE,
                BLOCK_N,
                FP8,
                CONVERTS,
                False,
                INTERPRET,
            )

            total = tl.where(context > 0, total, 1.0)
            logs = top + tl.log2(total)
            v_scale = 1.0
            if v_scale_ptr is not None:
                v_scale = tl.load(v_scale_ptr + kv_head)
            if FP8:
                acc = tl.interleave(acc, acc_odd)
            attended = acc / total[:, None] * v_scale
            if single:
                cells = (sequences * Q_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
                tl.store(out_ptr + cells, attended.to(out_ptr.dtype.element_ty), mask=mask)
            else:
                # Soon read again: not to be pushed out of the L2 cache by the keys and values that stream by.
                parts = (sequences * Q_HEADS + heads) * chunks + chunk
                cells = parts[:, None] * HEAD_DIM + dims[None, :]
                tl.store(partial_ptr + cells, attended, mask=mask, eviction_policy="evict_last")
                tl.store(log_ptr + parts, logs, mask=used, eviction_policy="evict_last")


def _block_n(dim: int, element_size: int) -> int:
    """Positions per tile: 16 KiB of keys, so that a multiprocessor has room for three programs' two tiles."""
    return min(128, (8192 if element_size <= 2 else 4096) // dim)


def paged_decode_attention_triton(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    shared: Shared | None = None,
    invariant: bool = True,
) -> torch.Tensor:
    """`paged_decode_attention` by Triton. Launches only, so a CUDA graph can capture it.

    Without `invariant` the order in which a row's values are summed may depend on how many rows there are.
    """
    k_cache, v_cache, k_scale, v_scale = cache
    sequences, q_heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    group = q_heads // kv_heads
    fp8 = k_cache.dtype == FP8
    dim = max(32 if fp8 else 16, triton.next_power_of_2(head_dim))
    chunk = CHUNK if invariant or shared is None else SHARED_CHUNK
    if not invariant and shared is None:
        chunk = next((size for most, size in _SMALL_BATCHES.items() if sequences <= most), CHUNK)
        full = sequences * kv_heads * triton.cdiv(group, _HEAD_TILE) >= _FULL_PROGRAMS
        if full and fp8 and dim <= 128:
            chunk = _FP8_CHUNK
    few = chunk == _SMALL_BATCHES[FEW_ROWS]
    single = few and sequences == 1 and shared_memory(q.device) >= _MUCH_SHARED_MEMORY
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if sequences == 0:
        return out
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert q.stride(2) == 1 and block_tables.stride(1) == 1
    chunks = max(1, triton.cdiv(max_context_len, chunk))
    several = chunks > 1
    partial = q.new_empty((sequences, q_heads, chunks, head_dim) if several else 1, dtype=torch.float32)
    logs = q.new_empty((sequences, q_heads, chunks) if several else 1, dtype=torch.float32)
    block_n = _block_n(dim, k_cache.element_size())
    if single:
        block_n = min(chunk, 2 * block_n)
    early = launch_early(q)

    def launch(
        units: int, lengths: torch.Tensor, prefixes: Shared | None, skips: torch.Tensor | None
    ) -> None:
        members, used_units = (None, None) if prefixes is None else (prefixes[0], prefixes[3])
        head_tile, tiles = _HEAD_TILE, kv_heads * triton.cdiv(group, _HEAD_TILE)
        if members is not None:
            head_tile = max(_HEAD_TILE, triton.next_power_of_2(members.shape[1] * group))
            tiles, units = kv_heads, min(units, _UNITS)
        # Programs without work are cheap but not free, and the bound may lie far above the contexts.
        programs = _SINGLE_PROGRAMS if single else _PROGRAMS
        lanes = min(chunks, max(_LANES, programs // (units * tiles)))
        # With an FP8 cache programs wait for their own warps more than for memory: one warp waits for none.
        narrow = fp8 and dim <= 128 and head_tile == _HEAD_TILE and not few
        many = narrow and not invariant and members is None and units * tiles >= _MANY_PROGRAMS
        _decode_chunk_kernel[(tiles, units, lanes)](
            q,
            as_words(k_cache),
            as_words(v_cache),
            k_scale,
            v_scale,
            block_tables,
            lengths,
            partial,
            logs,
            out,
            members,
            used_units,
            skips,
            scale * math.log2(math.e),
            q.stride(0),
            q.stride(1),
            block_tables.stride(0),
            chunks,
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            DIM=dim,
            PAGE=page,
            CHUNK=chunk,
            PADDING=PADDING,
            HEAD_TILE=head_tile,
            BLOCK_N=max(16, block_n // 4) if many else block_n,
            FP8=fp8,
            CONVERTS=fp8 and converts_fp8(q.device),
            EARLY=early,
            INTERPRET=INTERPRET,
            launch_pdl=early,
            num_warps=1 if many else 2 if narrow else 4,
            num_stages=4 if many else 3,
        )

    if shared is None:
        launch(sequences, context_lens, None, None)
    else:
        _, lens, skips, _ = shared
        launch(len(lens), lens, shared, None)
        launch(sequences, context_lens, None, skips)
    if several:
        many = chunk >= CHUNK or shared is not None
        merge_chunks(partial, logs, context_lens, out, chunk, _MERGED_HEADS if many else 1)
    return out


def decode_gather_reference(
    block_tables: torch.Tensor, context_lens: torch.Tensor, longest: int, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each of S sequences finds its positions up to `longest`: (slots [S * longest], bias [S, 1, 1,
    longest]).

    The bias is 0 on a context and -inf past it, where the slot is one of the sequence's own: other cells may
    hold NaN, and 0 * NaN is NaN. Equal for all layers of a step.
    """
    positions = torch.arange(longest, device=context_lens.device)
    slots = block_tables[:, positions // page].long() * page + positions % page
    seen = positions < context_lens[:, None]
    slots = slots.where(seen, slots[:, :1].clamp(min=0))
    bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)
    return slots.flatten(), bias[:, None, None, :]


def decode_attend_reference(
    q: torch.Tensor, cache: KVCache, slots: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of q [S, q_heads, head_dim] over the cells that `decode_gather_reference` names, in
    float32."""
    sequences, q_heads, head_dim = q.shape
    kv_heads = cache.k.shape[2]
    k, v = (
        dequantized(as_words(cells).flatten(0, 1).index_select(0, slots).view(cells.dtype), factor)
        .unflatten(0, (sequences, -1))
        .transpose(1, 2)
        for cells, factor in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )  # [S, kv_heads, longest, head_dim]
    # A group's query heads stand where a sequence's queries would, so that K and V need not be repeated.
    queries = q.float().view(sequences, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=scale)
    return out.reshape(sequences, q_heads, head_dim).to(q.dtype)


def paged_decode_attention_reference(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    shared: Shared | None = None,
) -> torch.Tensor:
    """`paged_decode_attention` in plain torch, over contexts padded to the longest one, `shared` or not."""
    longest = min(max_context_len, int(context_lens.max())) if len(q) else 0
    if longest == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    slots, bias = decode_gather_reference(block_tables, context_lens, longest, cache.k.shape[1])
    out = decode_attend_reference(q, cache, slots, bias, scale)
    return out.masked_fill((context_lens == 0)[:, None, None], 0.0)


def paged_decode_attention(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    shared: Shared | None = None,
) -> torch.Tensor:
    """Attend from each sequence's newest token to its whole context, which holds that token already.

    q: [S, q_heads, head_dim], last dimension contiguous; with an FP8 cache it becomes float16. Cells of the
    cache past a context may hold anything. block_tables: [S, W] int32, of which blocks past a context are not
    read. context_lens: [S] int32, each at most `max_context_len`; a row of length 0 reads nothing and gives
    zeros. Returns a new [S, q_heads, head_dim].
    The split over the context is flash-decoding's (Dao et al., 2023), with chunks of fixed length. `shared`
    may name sequences with a common prefix, which is then read once for several of them: with the same result
    bit for bit in units of 16 query heads, else but for rounding.
    """
    run = paged_decode_attention_triton if use_triton(q) else paged_decode_attention_reference
    return run(q, cache, block_tables, context_lens, max_context_len, scale, shared)
