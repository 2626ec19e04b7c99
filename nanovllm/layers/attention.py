"""Attention: one layer's KV cache, and the backend that attends over it. Knows no projection."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.rotary import Rotation, qk_norm_rope_store


class Attention(nn.Module):
    """Scaled causal attention over a paged cache. `cache` is empty until the owner of its memory sets it."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.num_heads = num_heads  # of this rank
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.backend = backend
        self.cache = KVCache(torch.empty(0), torch.empty(0))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> attended values, of q's shape.

        Rotates q and k by `rotation`, and stores k and v in the step's slots before any token attends.
        """
        q = qk_norm_rope_store(q, k, v, rotation, self.cache, meta.slot_mapping)
        return self.backend.forward(q, self.cache, meta, self.scale)
