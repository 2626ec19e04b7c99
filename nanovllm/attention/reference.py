"""Paged attention in plain torch: the CPU path, and the oracle that the other backends are tested against.

Never tuned for a GPU: it gathers every sequence's keys and values into a dense tensor first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.device import Device
from nanovllm.kernels.store_kvcache import store_kvcache_reference


class ReferenceBackend(AttentionBackend):
    name = "reference"
    block_size_multiple = 1
    default_block_size = 16

    @classmethod
    def unavailable(cls, device: Device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        store_kvcache_reference(k, v, k_cache, v_cache, meta.slot_mapping)
        if meta.is_decode:
            return _decode(q, k_cache, v_cache, meta, scale)
        return _prefill(q, k_cache, v_cache, meta, scale)


def _decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata, scale: float
) -> torch.Tensor:
    """One query a sequence: all sequences at once, padded to the longest context."""
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    positions = torch.arange(meta.max_seqlen_k, device=q.device)
    tables = meta.block_tables.clamp(min=0).long()
    slots = tables[:, positions // block_size] * block_size + positions % block_size  # [S, L]
    valid = positions < meta.context_lens[:, None]  # [S, L]
    slots = slots.where(valid, slots[:, :1])  # a cell that is ours: others may hold NaN, and 0 * NaN is NaN
    k = k_cache.flatten(0, 1)[slots].transpose(1, 2)  # [S, Hkv, L, D]
    v = v_cache.flatten(0, 1)[slots].transpose(1, 2)
    # The query heads of one KV head stand where a sequence of queries would, so K/V are not repeated.
    out = F.scaled_dot_product_attention(
        q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim),
        k,
        v,
        attn_mask=valid[:, None, None, :],
        scale=scale,
    )
    out = out.reshape(num_seqs, num_heads, head_dim)
    return out.masked_fill((meta.context_lens == 0)[:, None, None], 0)


def _prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata, scale: float
) -> torch.Tensor:
    """One sequence at a time; query i sits at position `context_len - query_len + i`."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.zeros_like(q)
    bounds = meta.cu_seqlens_q.tolist()
    for seq, context_len in enumerate(meta.context_lens.tolist()):
        start, end = bounds[seq], bounds[seq + 1]
        query_len = end - start
        if query_len == 0 or context_len == 0:
            continue
        table = meta.block_tables[seq, : -(-context_len // block_size)].long()
        k = k_cache[table].flatten(0, 1)[:context_len].transpose(0, 1)  # [Hkv, L, D]
        v = v_cache[table].flatten(0, 1)[:context_len].transpose(0, 1)
        groups = q.shape[1] // num_kv_heads
        if query_len == context_len:
            mask, is_causal = None, query_len > 1
        else:
            positions = torch.arange(context_len - query_len, context_len, device=q.device)
            mask, is_causal = torch.arange(context_len, device=q.device) <= positions[:, None], False
        attended = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            k.repeat_interleave(groups, dim=0)[None],
            v.repeat_interleave(groups, dim=0)[None],
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
        )
        out[start:end] = attended[0].transpose(0, 1)
    return out
