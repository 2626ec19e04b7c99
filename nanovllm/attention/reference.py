"""Paged attention in plain torch: the CPU path, and the reference for tests of the other backends.

Runs the kernels' reference functions, which gather keys and values into dense tensors. They work on every
device, but are fast only on a CPU.
"""

from __future__ import annotations

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.device import Device
from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.decode_attention import decode_attend_reference, decode_gather_reference
from nanovllm.kernels.prefill_attention import paged_prefill_attention_reference


class ReferenceBackend(AttentionBackend):
    name = "reference"
    block_size_multiple = 1
    default_block_size = 16
    supports_cuda_graph = False  # it reads lengths on the host

    def __init__(self, deterministic: bool = False) -> None:
        super().__init__(deterministic)
        self._gather: tuple[AttentionMetadata, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def unavailable(
        cls, device: Device, dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype
    ) -> str | None:
        return None

    def forward(self, q: torch.Tensor, cache: KVCache, meta: AttentionMetadata, scale: float) -> torch.Tensor:
        if meta.prefill is None:
            if self._gather is None or self._gather[0] is not meta:  # once per step, not per layer
                found = decode_gather_reference(
                    meta.block_tables, meta.context_lens, meta.max_seqlen_k, cache.k.shape[1]
                )
                self._gather = (meta, *found)
            return decode_attend_reference(q, cache, *self._gather[1:], scale)
        return paged_prefill_attention_reference(
            q,
            cache,
            meta.block_tables,
            meta.prefill.cu_seqlens_q,
            meta.context_lens,
            meta.prefill.max_seqlen_q,
            scale,
        )
