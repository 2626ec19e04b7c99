"""Attention of one new token per sequence over its paged context, in chunks of fixed length that are merged.

The chunk length never depends on the batch, so a row's bits are the same alone and in any batch. Writes no
cache.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import INTERPRET, jit, tl, triton, use_triton
from nanovllm.kernels.paged import attend_tile

_CHUNK = 512  # positions per program
_HEAD_TILE = 16  # the fewest rows tl.dot takes; a group of query heads is padded to it
_MERGE_TILE = 16  # chunks merged at a time


@jit("tables_ptr", "contexts_ptr", "table_stride")
def _decode_chunk_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    log_ptr: tl.tensor,
    scale_log2: float,
    q_stride_s: int,
    q_stride_h: int,
    table_stride: int,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
) -> None:
    """One program per (sequence, tile of a KV head's query heads, chunk).

    Writes the chunk's own attention to out [S, Q_HEADS, chunks, HEAD_DIM] and log2 of its softmax sum to
    log [S, Q_HEADS, chunks]. With one chunk `out` is the result itself.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    TILES: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // TILES
    chunk = tl.program_id(2)
    chunks = tl.num_programs(2)
    context = tl.load(contexts_ptr + sequence)
    start = chunk * CHUNK
    if (start >= context) & (chunks > 1):  # a single chunk goes on, to write the zeros of an empty context
        return
    end = tl.minimum(context, start + CHUNK)

    members = (tl.program_id(1) % TILES) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    heads = kv_head * GROUP + members
    dims = tl.arange(0, DIM)
    mask = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + sequence * q_stride_s + heads[:, None] * q_stride_h + dims[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)

    acc = tl.zeros((HEAD_TILE, DIM), tl.float32)
    total = tl.zeros((HEAD_TILE,), tl.float32)
    top = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
    last = tl.zeros((HEAD_TILE,), tl.int32) + (end - 1)
    for position in range(start, end, BLOCK_N):
        acc, total, top = attend_tile(
            acc,
            total,
            top,
            q,
            k_ptr + kv_head * HEAD_DIM,
            v_ptr + kv_head * HEAD_DIM,
            tables_ptr + sequence * table_stride,
            position,
            end,
            last,
            scale_log2,
            True,
            KV_HEADS * HEAD_DIM,
            HEAD_DIM,
            DIM,
            PAGE,
            BLOCK_N,
            INTERPRET,
        )

    total = tl.where(context > 0, total, 1.0)
    row = (sequence * Q_HEADS + heads) * chunks + chunk
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * HEAD_DIM + dims[None, :], out, mask=mask)
    tl.store(log_ptr + row, top + tl.log2(total), mask=members < GROUP)


@jit("contexts_ptr", "chunks")
def _decode_merge_kernel(
    partial_ptr: tl.tensor,
    log_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    chunks: int,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    MERGE_TILE: tl.constexpr,
) -> None:
    """One program per (sequence, query head). A lone chunk keeps its bits: its weight is exactly 1."""
    row = tl.program_id(0).to(tl.int64) * Q_HEADS + tl.program_id(1)
    context = tl.load(contexts_ptr + tl.program_id(0))
    dims = tl.arange(0, DIM)
    acc = tl.zeros((DIM,), tl.float32)
    total = 0.0
    top = float("-inf")
    live = tl.cdiv(context, CHUNK)
    for first in range(0, live, MERGE_TILE):
        members = first + tl.arange(0, MERGE_TILE)
        logs = tl.load(log_ptr + row * chunks + members, mask=members < live, other=float("-inf"))
        cells = (row * chunks + members)[:, None] * HEAD_DIM + dims[None, :]
        mask = (members < live)[:, None] & (dims < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + cells, mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(logs, axis=0))
        weights = tl.exp2(logs - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay + tl.sum(weights[:, None] * partial, axis=0)
        top = new_top
    total = tl.where(context > 0, total, 1.0)
    out = tl.div_rn(acc, total).to(out_ptr.dtype.element_ty)  # exact for a total of 1
    tl.store(out_ptr + row * HEAD_DIM + dims, out, mask=dims < HEAD_DIM)


def _block_n(dim: int, element_size: int) -> int:
    """Positions per tile: up to 32 KiB of keys; less in float32, which does without tensor cores."""
    return min(128, (16384 if element_size == 2 else 4096) // dim)


def paged_decode_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
) -> torch.Tensor:
    """`paged_decode_attention` by Triton. Launches only, so a CUDA graph can capture it."""
    sequences, q_heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if sequences == 0:
        return out
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert q.stride(2) == 1 and block_tables.stride(1) == 1
    dim = max(16, triton.next_power_of_2(head_dim))
    chunks = max(1, triton.cdiv(max_context_len, _CHUNK))
    partial = out if chunks == 1 else q.new_empty((sequences, q_heads, chunks, head_dim), dtype=torch.float32)
    logs = q.new_empty((sequences, q_heads, chunks), dtype=torch.float32)
    group_tiles = triton.cdiv(q_heads // kv_heads, _HEAD_TILE)
    _decode_chunk_kernel[(sequences, kv_heads * group_tiles, chunks)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        partial,
        logs,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        PAGE=page,
        CHUNK=_CHUNK,
        HEAD_TILE=_HEAD_TILE,
        BLOCK_N=_block_n(dim, k_cache.element_size()),
        INTERPRET=INTERPRET,
        num_warps=4,
        num_stages=3,
    )
    if chunks > 1:
        _decode_merge_kernel[(sequences, q_heads)](
            partial,
            logs,
            context_lens,
            out,
            chunks,
            Q_HEADS=q_heads,
            HEAD_DIM=head_dim,
            DIM=dim,
            CHUNK=_CHUNK,
            MERGE_TILE=_MERGE_TILE,
            num_warps=2,
        )
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
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of q [S, q_heads, head_dim] over the cells that `decode_gather_reference` names, in
    float32."""
    sequences, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    k, v = (
        cache.flatten(0, 1).index_select(0, slots).unflatten(0, (sequences, -1)).transpose(1, 2).float()
        for cache in (k_cache, v_cache)
    )  # [S, kv_heads, longest, head_dim]
    # A group's query heads stand where a sequence's queries would, so that K and V need not be repeated.
    queries = q.float().view(sequences, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=scale)
    return out.reshape(sequences, q_heads, head_dim).to(q.dtype)


def paged_decode_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
) -> torch.Tensor:
    """`paged_decode_attention` in plain torch, over contexts padded to the longest one."""
    longest = min(max_context_len, int(context_lens.max())) if len(q) else 0
    if longest == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    slots, bias = decode_gather_reference(block_tables, context_lens, longest, k_cache.shape[1])
    out = decode_attend_reference(q, k_cache, v_cache, slots, bias, scale)
    return out.masked_fill((context_lens == 0)[:, None, None], 0.0)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
) -> torch.Tensor:
    """Attend from each sequence's newest token to its whole context, which holds that token already.

    q: [S, q_heads, head_dim], last dimension contiguous. k_cache, v_cache: contiguous [num_blocks,
    block_size, kv_heads, head_dim] of q's dtype; cells past a context may hold anything. block_tables: [S,
    W] int32, padded with -1. context_lens: [S] int32, each at most `max_context_len`; a row of length 0
    reads nothing and gives zeros. Returns a new [S, q_heads, head_dim]. The split over the context is
    flash-decoding's (Dao et al., 2023), with chunks of fixed length.
    """
    run = paged_decode_attention_triton if use_triton(q) else paged_decode_attention_reference
    return run(q, k_cache, v_cache, block_tables, context_lens, max_context_len, scale)
