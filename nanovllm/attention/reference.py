"""Paged attention in plain torch: the CPU path, and the oracle that the other backends are tested against.

Runs the kernels' own twins, which gather keys and values into dense tensors: right anywhere, fast on a CPU
only.
"""

from __future__ import annotations

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.device import Device
from nanovllm.kernels.decode_attention import decode_attend_reference, decode_gather_reference
from nanovllm.kernels.prefill_attention import paged_prefill_attention_reference


class ReferenceBackend(AttentionBackend):
    name = "reference"
    block_size_multiple = 1
    default_block_size = 16
    supports_cuda_graph = False  # it reads lengths on the host

    def __init__(self) -> None:
        self._gather: tuple[AttentionMetadata, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def unavailable(
        cls, device: Device, dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype
    ) -> str | None:
        return None

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if meta.is_decode:
            if self._gather is None or self._gather[0] is not meta:  # once a step, not once a layer
                found = decode_gather_reference(
                    meta.block_tables, meta.context_lens, meta.max_seqlen_k, k_cache.shape[1]
                )
                self._gather = (meta, *found)
            return decode_attend_reference(
                q, k_cache, v_cache, self._gather[1], self._gather[2], scale, k_scale, v_scale
            )
        return paged_prefill_attention_reference(
            q,
            k_cache,
            v_cache,
            meta.block_tables,
            meta.cu_seqlens_q,
            meta.context_lens,
            meta.max_seqlen_q,
            scale,
            k_scale,
            v_scale,
        )
