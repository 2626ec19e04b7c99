"""Attention: one layer's KV cache and the backend that attends over it. Knows no projection, no position, and
writes nothing into the cache: RotaryEmbedding does, in passing."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend, AttentionMetadata


class Attention(nn.Module):
    """Scaled causal attention over a paged cache. The owner sets `k_cache` and `v_cache`, empty at first."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.num_heads = num_heads  # of this rank
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.backend = backend
        self.k_cache = self.v_cache = torch.empty(0)  # [num_blocks, block_size, num_kv_heads, head_dim]
        self.k_scale: torch.Tensor | None = None  # [num_kv_heads] float32, what an FP8 cache was divided by
        self.v_scale: torch.Tensor | None = None

    def forward(self, q: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """q [T, num_heads, head_dim] -> the same shape; this step's keys and values are cached already."""
        return self.backend.forward(
            q, self.k_cache, self.v_cache, meta, self.scale, self.k_scale, self.v_scale
        )
