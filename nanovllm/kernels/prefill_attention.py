"""Causal attention of many new tokens per sequence over its paged context, cached prefix included.

Writes no cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nanovllm.kernels.compat import INTERPRET, TensorDescriptor, capability, jit, shared_memory, tl
from nanovllm.kernels.paged import (
    FP8,
    LOG2_E,
    PLAIN,
    Heads,
    KVCache,
    Variant,
    as_words,
    attend_range,
    before_window,
    finish_softmax,
    load_pages,
    start_softmax,
    window_start,
    with_sinks,
)

# Launch choices, measured on H200s: for prompts of 20 to 28,000 tokens, and after cached prefixes
# (docs/log/2026-11-22-what-users-do.md and 2026-11-23-prefixes.md).
_GROUPED_HEADS = 4  # programs of one tile that run in parallel, so that they read few KV heads


class Tiles(NamedTuple):
    """The tile sizes of one launch."""

    rows: int  # queries of a program, of each of its heads
    columns: int  # keys that it reads at once
    warps: int
    stages: int  # the maximum; limited by shared memory
    described: bool = False  # read caches through tensor descriptors, with the tensor memory accelerator
    registers: int | None = None  # maximum for a thread

    def heads(self, group: int) -> int:
        """The query heads of a program, of the `group` that share a KV head: all, so that few new tokens fill
        its rows, but one with descriptors, whose prompts are long."""
        return 1 if self.described else group

    def bytes(self, dim: int, q_size: int, cell_size: int, stages: int) -> int:
        """The shared memory that a program needs, in bytes."""
        return self.rows * dim * q_size + 2 * stages * self.columns * dim * cell_size


# For heads of more than 128 elements of 16 bits: 739 against 820 us for 8,192 tokens of 8/4 heads of 256 on
# an H100; with a window of 1,024 the smaller ones take 328 us, and these 372.
_LARGE, _LARGE_IN_WINDOW = Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2)
# For heads of more than 256 elements (Gemma 4): keys and values of a tile take up to 64 KiB.
_WIDEST, _WIDEST_IN_FEW_BYTES = Tiles(64, 32, 8, 2), Tiles(32, 16, 4, 2)
# For heads of 65 to 128 elements of 16 bits. LONG has one program per multiprocessor. They round differently.
SHORT = Tiles(64, 32, 4, 3, registers=128)
WIDE = Tiles(64, 64, 4, 3)
LONG = Tiles(128, 128, 8, 3, described=True)
_LONG_CONTEXT = 512  # positions of the longest context; beyond it WIDE is faster (1,000: 10 %; 4,000: 22 %)
_LONG_PROMPT = 2048  # average new tokens of a sequence from which LONG pays (8,192: 11 %)


def _tiles(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    sequences: int,
    max_context_len: int,
    invariant: bool,
    window: int | None = None,
) -> Tiles:
    """The tiles for q [T, q_heads, head_dim] of `sequences` sequences.

    With `invariant` they are the same in any batch.
    """
    tokens, _, head_dim = q.shape
    fp8, page = k_cache.dtype == FP8, k_cache.shape[1]
    if q.element_size() == 4:  # no tensor cores at full precision
        return Tiles(32 if head_dim <= 128 else 16, 16, 4, 3 if head_dim <= 256 else 2)
    if head_dim > 256:
        fits = _WIDEST.bytes(512, 2, 2, 1) + 2048 <= shared_memory(q.device)
        return _WIDEST if fits else _WIDEST_IN_FEW_BYTES
    if head_dim > 128 and fp8:
        return Tiles(64, 64, 4, 2)
    if head_dim > 128:
        fits = _LARGE.bytes(256, 2, 2, 2) + 2048 <= shared_memory(q.device)
        return _LARGE if fits and window is None else _LARGE_IN_WINDOW
    if fp8:
        return Tiles(64, 64, 4, 3, registers=168 if head_dim > 64 else None)
    if head_dim <= 64:
        return Tiles(64, 64, 4, 3, registers=128)
    if invariant:
        return WIDE
    others = WIDE if max_context_len > _LONG_CONTEXT else SHORT
    fits = head_dim == 128 and page % LONG.columns == 0 and not INTERPRET and capability(q.device)[0] == 9
    if tokens < _LONG_PROMPT * sequences or not fits:
        return others
    return LONG if LONG.bytes(128, 2, 2, LONG.stages) + 2048 <= shared_memory(q.device) else others


@jit("tables_ptr", "starts_ptr", "contexts_ptr", "table_stride")
def _prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_log2: float,
    q_stride_t: int,
    q_stride_h: int,
    table_stride: int,
    GROUPED_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr,
    sinks_ptr: tl.tensor = None,
    WINDOW: tl.constexpr = 0,
    SOFTCAP: tl.constexpr = 0.0,
) -> None:
    """One program per (tile of rows, sequence, PACKED query heads of a KV head).

    The rows are the queries of these heads, token by token. Some heads run tile by tile, then the next ones.
    The last tile reads the most keys, so it starts first; else the device would wait for it at the end. Key
    tiles start at multiples of BLOCK_N in every chunk, so a query's bits do not depend on how its prompt was
    split. With a WINDOW the first one is that of the first query; tiles before a query's own window change
    nothing.
    """
    Q_HEADS: tl.constexpr = HEADS.q_heads
    HEAD_DIM: tl.constexpr = HEADS.head_dim
    DIM: tl.constexpr = HEADS.dim
    groups: tl.constexpr = Q_HEADS // (GROUPED_HEADS * PACKED)
    sequence = (tl.program_id(2) // groups).to(tl.int64)
    first_head = (tl.program_id(2) % groups * GROUPED_HEADS + tl.program_id(0)) * PACKED
    kv_head = first_head // (HEADS.q_heads // HEADS.kv_heads)
    first_token = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - first_token
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    if first_row >= queries * PACKED:
        return
    context = tl.load(contexts_ptr + sequence)
    rows = first_row + tl.arange(0, BLOCK_M)
    last = context - queries + rows // PACKED  # the last position that each row sees: its own
    head = first_head + rows % PACKED
    dims = tl.arange(0, DIM)
    mask = (rows < queries * PACKED)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = first_token.to(tl.int64) + rows // PACKED
    q_ptrs = q_ptr + (tokens * q_stride_t + head * q_stride_h)[:, None] + dims[None, :]
    q, state = start_softmax(tl.load(q_ptrs, mask=mask, other=0.0), HEADS)
    if k_scale_ptr is not None:
        scale_log2 *= tl.load(k_scale_ptr + kv_head)
    if sinks_ptr is not None:
        state = with_sinks(state, tl.load(sinks_ptr + head).to(tl.float32))

    table_ptr = tables_ptr + sequence * table_stride
    first_last = context - queries + first_row // PACKED
    past_last = context - queries + (first_row + BLOCK_M - 1) // PACKED + 1
    end = tl.minimum(context, past_last)
    whole = tl.maximum(first_last + 1, 0) // BLOCK_N * BLOCK_N  # all rows see all positions before this
    cache = (k_ptr, v_ptr, table_ptr)
    inside = 0  # from here to `whole` all rows see all positions
    if WINDOW:
        start = window_start(first_last + 1, WINDOW, BLOCK_N)
        inside = window_start(past_last + BLOCK_N - 1, WINDOW, BLOCK_N)
        inside = tl.minimum(inside, whole)
        pages = load_pages(table_ptr, start, end, HEADS.page, BLOCK_N)
        state, pages = attend_range(
            before_window(state),
            q,
            cache,
            kv_head,
            pages,
            (start, inside, end),
            last,
            scale_log2,
            HEADS,
            BLOCK_N,
            True,
            DESCRIBED,
            WINDOW,
            SOFTCAP,
        )
    else:
        pages = load_pages(table_ptr, 0, end, HEADS.page, BLOCK_N)
    bounds = (inside, whole, end)
    state, pages = attend_range(
        state,
        q,
        cache,
        kv_head,
        pages,
        bounds,
        last,
        scale_log2,
        HEADS,
        BLOCK_N,
        False,
        DESCRIBED,
        0,
        SOFTCAP,
    )
    bounds = (whole, end, end)
    state, pages = attend_range(
        state,
        q,
        cache,
        kv_head,
        pages,
        bounds,
        last,
        scale_log2,
        HEADS,
        BLOCK_N,
        True,
        DESCRIBED,
        WINDOW,
        SOFTCAP,
    )
    attended = finish_softmax(state, context, v_scale_ptr, kv_head, HEADS)[0]
    out_ptrs = out_ptr + ((tokens * Q_HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(out_ptrs, attended.to(out_ptr.dtype.element_ty), mask=mask)


def paged_prefill_attention_triton(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    invariant: bool = False,
    tiles: Tiles | None = None,
    variant: Variant = PLAIN,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's new tokens over its context, which ends with these tokens.

    q: [T, q_heads, head_dim], the new tokens of all sequences, last dimension contiguous. Cache cells
    past a context may hold anything. block_tables: [S, W] int32. cu_seqlens_q: [S + 1] int32, prefix sum
    of the new tokens of each sequence, at most `max_seqlen_q` each. context_lens: [S] int32, cached and
    new tokens. New token i of n has position context_len - n + i. A sequence of context length 0 gives
    zeros. Returns a new [T, q_heads, head_dim], or `out`, contiguous, which may be q: a program reads its
    queries before it writes. Rows of no sequence hold anything. With `invariant` a token's bits do not
    depend on how its prompt is split, or on other sequences. tiles: replaces the automatic choice. Keys
    before every window are not read. The tiling is that of FlashAttention-2 (Dao, 2023).
    """
    heads, (k, v, k_scale, v_scale) = Heads.of(q, cache), cache
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if len(q) == 0:
        return out
    assert block_tables.stride(1) == 1
    longest = block_tables.shape[1] * heads.page  # an upper bound
    longest = longest if variant.window is None else min(longest, variant.window)
    tiles = tiles or _tiles(q, k, len(context_lens), longest, invariant, variant.window)
    rest = shared_memory(q.device) - tiles.bytes(heads.dim, q.element_size(), k.element_size(), 0)
    stage = tiles.bytes(heads.dim, 0, k.element_size(), 1)
    k, v = as_words(k), as_words(v)
    if tiles.described:
        assert heads.dim == heads.head_dim and heads.page % tiles.columns == 0
        row, block = heads.kv_heads * heads.dim, [tiles.columns, heads.dim]
        k, v = (TensorDescriptor(x, [len(x) * heads.page, row], [row, 1], block) for x in (k, v))
    packed = tiles.heads(heads.group)
    programs = heads.q_heads // packed
    grouped = math.gcd(_GROUPED_HEADS, programs)
    blocks = -(-max_seqlen_q * packed // tiles.rows)
    grid = (grouped, blocks, len(context_lens) * (programs // grouped))
    _prefill_kernel[grid](
        q,
        k,
        v,
        k_scale,
        v_scale,
        block_tables,
        cu_seqlens_q,
        context_lens,
        out,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        GROUPED_HEADS=grouped,
        PACKED=packed,
        HEADS=heads,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        DESCRIBED=tiles.described,
        num_warps=tiles.warps,
        num_stages=max(1, min(tiles.stages, rest // stage)),
        maxnreg=tiles.registers,
        **variant.options(),
    )
    return out
