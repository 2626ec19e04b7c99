"""The twins of the attention kernels in plain torch: decode and prefill over a paged cache, in float32.

They are the CPU's attention and what tests compare the kernels with. Launches nothing, writes no cache.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nanovllm.kernels.paged import PLAIN, KVCache, Variant, as_words, dequantized

# Cells that the reference gathers at once. More do not fit into a CPU's cache: 165 sequences of 600 tokens
# took 1.7 times as long.
GATHERED_CELLS = 2**14
Gathered = tuple[torch.Tensor, torch.Tensor]


def decode_gather_reference(
    block_tables: torch.Tensor, context_lens: torch.Tensor, longest: int, page: int, window: int | None = None
) -> Gathered:
    """Return (slots [S * longest], bias [S, 1, 1, longest]): the cache slots of S sequences' positions up to
    `longest`, and an attention bias, the same for all layers of a step. With a shorter window, only its
    positions.

    The bias is 0 within a context and -inf past it. There the slot is one of the sequence's own: other cells
    may hold NaN, and 0 * NaN is NaN.
    """
    positions = torch.arange(min(longest, window or longest), device=context_lens.device)
    if window is not None and window < longest:
        positions = context_lens[:, None] - window + positions
        seen, positions = positions >= 0, positions.clamp(min=0)
        slots = block_tables.gather(1, positions // page).long().clamp(min=0) * page + positions % page
    else:
        slots = block_tables[:, positions // page].long() * page + positions % page
        seen = positions < context_lens[:, None]
        slots = slots.where(seen, slots[:, :1].clamp(min=0))
    bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)
    return slots.flatten(), bias[:, None, None, :]


def decode_attend_reference(
    q: torch.Tensor, cache: KVCache, gathered: Gathered, scale: float, variant: Variant = PLAIN
) -> torch.Tensor:
    """Attention of q [S, q_heads, head_dim] over the slots of `decode_gather_reference`, in float32."""
    cache.check()
    slots, bias = gathered
    if len(slots) <= GATHERED_CELLS:
        return _attend_gathered(q, cache, gathered, scale, variant)
    few = max(1, GATHERED_CELLS // bias.shape[-1])
    parts = zip(q.split(few), slots.split(few * bias.shape[-1]), bias.split(few), strict=True)
    return torch.cat(
        [_attend_gathered(part, cache, (cells, mask), scale, variant) for part, cells, mask in parts]
    )


def _attend_gathered(
    q: torch.Tensor, cache: KVCache, gathered: Gathered, scale: float, variant: Variant
) -> torch.Tensor:
    """`decode_attend_reference` for sequences that are gathered at once."""
    slots, bias = gathered
    sequences, q_heads, head_dim = q.shape
    kv_heads = cache.k.shape[2]
    k, v = (
        dequantized(as_words(cells).flatten(0, 1).index_select(0, slots).view(cells.dtype), factor)
        .unflatten(0, (sequences, -1))
        .transpose(1, 2)
        for cells, factor in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )  # [S, kv_heads, longest, head_dim]
    # A group's query heads take the place of a sequence's queries, so K and V need not be repeated.
    queries = q.float().view(sequences, kv_heads, -1, head_dim)
    if variant.is_softmax:
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=scale)
    else:
        out = attend_reference(queries, k, v, bias, scale, variant)
    return out.reshape(sequences, q_heads, head_dim).to(q.dtype)


def paged_decode_attention_reference(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """`paged_decode_attention_triton` in plain torch, over contexts padded to the longest; also variants."""
    longest = min(max_context_len, int(context_lens.max())) if len(q) else 0
    if longest == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    gathered = decode_gather_reference(block_tables, context_lens, longest, cache.k.shape[1], variant.window)
    out = decode_attend_reference(q, cache, gathered, scale, variant)
    return out.masked_fill((context_lens == 0)[:, None, None], 0.0)


def paged_prefill_attention_reference(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """`paged_prefill_attention_triton` in plain torch, in float32, one sequence at a time; also variants."""
    cache.check()
    page, kv_heads = cache.k.shape[1:3]
    group = q.shape[1] // kv_heads
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    bounds = cu_seqlens_q.tolist()
    for row, context in enumerate(context_lens.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        if begin == end or context == 0:
            continue
        # Blocks before the first query's window may belong to others; all below counts from `first` on.
        first = max(0, context - (end - begin) + 1 - (variant.window or context)) // page * page
        table = block_tables[row, first // page : -(-context // page)].long()
        skipped = (
            0 if variant.window is None else max(0, context - (end - begin) + 1 - variant.window) - first
        )
        context -= first + skipped
        k, v = (
            dequantized(
                as_words(cells)[table].view(cells.dtype).flatten(0, 1)[skipped : skipped + context], factor
            )
            .transpose(0, 1)
            .repeat_interleave(group, dim=0)
            for cells, factor in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
        )  # [q_heads, context, head_dim]
        queries = q[begin:end].float().transpose(0, 1)
        seen = None
        if end - begin < context or variant is not PLAIN:
            positions = torch.arange(context, device=q.device)
            own = positions[context - (end - begin) :, None]
            seen = positions <= own  # [queries, context]
            if variant.window is not None:
                seen &= positions > own - variant.window
        attended = attend(queries, k, v, seen, scale, variant)
        if not attended.sum().isfinite():  # torch's mask is -inf, and NaN - inf is NaN
            spoilt = ~k.isfinite().all(2)  # [q_heads, context]
            attended = attend(queries, k.masked_fill(spoilt[:, :, None], 0), v, seen, scale, variant)
            sees = (
                torch.ones(context, context, dtype=torch.bool, device=q.device).tril()
                if seen is None
                else seen
            )
            attended.masked_fill_((spoilt[:, None] & sees).any(2, keepdim=True), float("nan"))
        out[begin:end] = attended.transpose(0, 1)
    return out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """Attention of q [heads, n, dim] over k and v [heads, context, dim]. seen [n, context]; None: causal."""
    if seen is not None and not variant.is_softmax:
        mask = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, -math.inf)
        return attend_reference(q, k, v, mask, scale, variant)
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=seen, is_causal=seen is None, scale=scale
    )[0]


def attend_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    variant: Variant,
) -> torch.Tensor:
    """Attention of q [..., heads, n, dim] over k and v [..., heads, context, dim], where torch has no
    operation for it. mask: added to the scores [..., heads, n, context].

    In decode `heads` are KV heads, and a group's query heads take the place of the n queries.
    """
    scores = q @ k.transpose(-1, -2) * scale
    if variant.softcap is not None:
        scores = variant.softcap * (scores / variant.softcap).tanh()
    scores = scores + mask
    if variant.sinks is not None:
        sinks = variant.sinks.float().view(q.shape[-3], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return scores.softmax(-1)[..., : k.shape[-2]] @ v
