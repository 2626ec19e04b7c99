"""Causal attention of many new tokens per sequence over its paged context, cached prefix included.

Writes no cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.compat import (
    INTERPRET,
    TensorDescriptor,
    capability,
    jit,
    shared_memory,
    tl,
    triton,
    use_triton,
)
from nanovllm.kernels.paged import FP8, as_words, attend_range, converts_fp8, dequantized, load_pages


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
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    CONVERTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    INTERPRET: tl.constexpr,
) -> None:
    """One program per (tile of queries, sequence, query head).

    A group of heads goes tile by tile, then the next group. The last tile has the most to read: it goes
    first, so that it is not what the device waits for at the end. Key tiles start at position 0 whatever the
    chunk: a query's bits do not depend on how its prompt was cut.
    """
    STEP: tl.constexpr = 2 if FP8 else 1  # elements of a head in one of the cache
    groups: tl.constexpr = Q_HEADS // GROUPED_HEADS
    sequence = (tl.program_id(2) // groups).to(tl.int64)
    head = tl.program_id(2) % groups * GROUPED_HEADS + tl.program_id(0)
    kv_head = head // (Q_HEADS // KV_HEADS)
    first_token = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - first_token
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    if first_row >= queries:
        return
    context = tl.load(contexts_ptr + sequence)
    rows = first_row + tl.arange(0, BLOCK_M)
    last = context - queries + rows  # the newest position each row sees: its own
    dims = tl.arange(0, DIM)
    mask = (rows < queries)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = first_token.to(tl.int64) + rows
    q_ptrs = q_ptr + tokens[:, None] * q_stride_t + head * q_stride_h + dims[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    q_odd = q
    if FP8:
        q, q_odd = tl.split(tl.reshape(q.to(tl.float16), (BLOCK_M, DIM // 2, 2)))
    if k_scale_ptr is not None:
        scale_log2 *= tl.load(k_scale_ptr + kv_head)

    acc = tl.zeros((BLOCK_M, DIM // STEP), tl.float32)
    acc_odd = tl.zeros((BLOCK_M, DIM // STEP), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    column = kv_head * (HEAD_DIM // STEP)
    k_head_ptr = k_ptr
    v_head_ptr = v_ptr
    if not DESCRIBED:
        k_head_ptr += column
        v_head_ptr += column
    table_ptr = tables_ptr + sequence * table_stride
    first_last = context - queries + first_row
    end = tl.minimum(context, first_last + BLOCK_M)
    whole = (
        tl.maximum(first_last + 1, 0) // BLOCK_N * BLOCK_N
    )  # every row of the tile sees all positions before this
    pages = load_pages(table_ptr, 0, end, PAGE, BLOCK_N)
    acc, acc_odd, total, top, pages = attend_range(
        acc,
        acc_odd,
        total,
        top,
        q,
        q_odd,
        k_head_ptr,
        v_head_ptr,
        column,
        table_ptr,
        pages,
        0,
        whole,
        end,
        last,
        scale_log2,
        False,
        KV_HEADS * HEAD_DIM // STEP,
        HEAD_DIM // STEP,
        DIM // STEP,
        PAGE,
        BLOCK_N,
        FP8,
        CONVERTS,
        DESCRIBED,
        INTERPRET,
    )
    acc, acc_odd, total, top, pages = attend_range(
        acc,
        acc_odd,
        total,
        top,
        q,
        q_odd,
        k_head_ptr,
        v_head_ptr,
        column,
        table_ptr,
        pages,
        whole,
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
        DESCRIBED,
        INTERPRET,
    )

    total = tl.where(context > 0, total, 1.0)
    v_scale = 1.0
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + kv_head)
    if FP8:
        acc = tl.interleave(acc, acc_odd)
    out_ptrs = out_ptr + (tokens[:, None] * Q_HEADS + head) * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, (acc / total[:, None] * v_scale).to(out_ptr.dtype.element_ty), mask=mask)


_GROUPED_HEADS = 4  # query heads whose programs go side by side, through the keys of few KV heads


class Tiles(NamedTuple):
    """How one launch is cut up. Measured on H200s, prompts of 20 to 28,000 tokens."""

    rows: int  # queries of a program
    columns: int  # keys that it reads at a time
    warps: int
    stages: int  # at most: as many as there is shared memory for
    described: bool = False  # caches are read through tensor descriptors, by the tensor memory accelerator
    registers: int | None = None  # of a thread, at most

    def bytes(self, dim: int, q_size: int, cell_size: int, stages: int) -> int:
        """The shared memory that a program needs."""
        return self.rows * dim * q_size + 2 * stages * self.columns * dim * cell_size


# Heads of 65 to 128 in 16 bits: for short prompts, and for long ones, where a program has a multiprocessor to
# itself. They round differently.
SHORT = Tiles(64, 32, 4, 3)
LONG = Tiles(128, 128, 8, 3, described=True)
_LONG_PROMPT = 1024  # new tokens of a sequence, on average, from which that pays


def _tiles(q: torch.Tensor, k_cache: torch.Tensor, sequences: int, invariant: bool) -> Tiles:
    """The tiles for q [T, q_heads, head_dim] of so many sequences; with `invariant` T does not count."""
    tokens, _, head_dim = q.shape
    fp8, page = k_cache.dtype == FP8, k_cache.shape[1]
    if q.element_size() == 4:  # no tensor cores at full precision
        return Tiles(32 if head_dim <= 128 else 16, 16, 4, 3)
    if head_dim > 128:
        return Tiles(64, 64 if fp8 else 32, 4, 2)
    if fp8:
        return Tiles(64, 64, 4, 3, registers=168 if head_dim > 64 else None)
    if head_dim <= 64 or invariant:
        return Tiles(64, 64, 4, 3, registers=None if head_dim > 64 else 128)
    fits = head_dim == 128 and page % LONG.columns == 0 and not INTERPRET and capability(q.device)[0] == 9
    if tokens < _LONG_PROMPT * sequences or not fits:
        return SHORT
    return LONG if LONG.bytes(128, 2, 2, LONG.stages) + 2048 <= shared_memory(q.device) else SHORT


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
) -> torch.Tensor:
    """`paged_prefill_attention` by Triton. `tiles`: those to use, instead of those that suit the inputs."""
    k_cache, v_cache, k_scale, v_scale = cache
    tokens, q_heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert q.stride(2) == 1 and block_tables.stride(1) == 1
    fp8 = k_cache.dtype == FP8
    dim = max(32 if fp8 else 16, triton.next_power_of_2(head_dim))
    if tiles is None:
        tiles = _tiles(q, k_cache, len(context_lens), invariant)
    rest = shared_memory(q.device) - tiles.bytes(dim, q.element_size(), k_cache.element_size(), 0)
    stage = tiles.bytes(dim, 0, k_cache.element_size(), 1)
    k, v = as_words(k_cache), as_words(v_cache)
    if tiles.described:
        assert dim == head_dim and page % tiles.columns == 0
        block = [tiles.columns, dim]
        k, v = (
            TensorDescriptor(cache, [cache.shape[0] * page, kv_heads * dim], [kv_heads * dim, 1], block)
            for cache in (k, v)
        )
    grouped = math.gcd(_GROUPED_HEADS, q_heads)
    grid = (grouped, triton.cdiv(max_seqlen_q, tiles.rows), len(context_lens) * (q_heads // grouped))
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
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        GROUPED_HEADS=grouped,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        PAGE=page,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        FP8=fp8,
        CONVERTS=fp8 and converts_fp8(q.device),
        DESCRIBED=tiles.described,
        INTERPRET=INTERPRET,
        num_warps=tiles.warps,
        num_stages=max(1, min(tiles.stages, rest // stage)),
        maxnreg=tiles.registers,
    )
    return out


def paged_prefill_attention_reference(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    invariant: bool = False,
) -> torch.Tensor:
    """`paged_prefill_attention` in plain torch, in float32, one sequence at a time."""
    page, kv_heads = cache.k.shape[1:3]
    group = q.shape[1] // kv_heads
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    bounds = cu_seqlens_q.tolist()
    for row, context in enumerate(context_lens.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        if begin == end or context == 0:
            continue
        table = block_tables[row, : -(-context // page)].long()
        k, v = (
            dequantized(as_words(cells)[table].view(cells.dtype).flatten(0, 1)[:context], factor)
            .transpose(0, 1)
            .repeat_interleave(group, dim=0)
            for cells, factor in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
        )  # [q_heads, context, head_dim]
        queries = q[begin:end].float().transpose(0, 1)
        seen = None
        if end - begin < context:
            positions = torch.arange(context, device=q.device)
            seen = positions <= positions[context - (end - begin) :, None]  # [queries, context]
        attended = F.scaled_dot_product_attention(
            queries[None], k[None], v[None], attn_mask=seen, is_causal=seen is None, scale=scale
        )[0]
        out[begin:end] = attended.transpose(0, 1)
    return out


def paged_prefill_attention(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    invariant: bool = False,
) -> torch.Tensor:
    """Causal attention of each sequence's new tokens over its context, which ends in those tokens already.

    q: [T, q_heads, head_dim], the sequences' new tokens one after another, last dimension contiguous. Cells
    of the cache past a context may hold anything. block_tables: [S, W] int32. cu_seqlens_q:
    [S + 1] int32 prefix sum of the new tokens per sequence, at most `max_seqlen_q` each. context_lens: [S]
    int32, cached and new tokens; new token i of n sits at position context_len - n + i; a sequence of context
    length 0 gives zeros. Returns a new [T, q_heads, head_dim]. With `invariant` a token's bits do not depend
    on how its prompt is cut, nor on other sequences. The tiling is FlashAttention-2's (Dao, 2023).
    """
    run = paged_prefill_attention_triton if use_triton(q) else paged_prefill_attention_reference
    return run(q, cache, block_tables, cu_seqlens_q, context_lens, max_seqlen_q, scale, invariant)
