"""Our own paged attention kernels: any GPU that Triton supports, no extra package.

Without a GPU they run only in Triton's interpreter (TRITON_INTERPRET=1), for tests on a CPU.
"""

from __future__ import annotations

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.device import Device
from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.compat import HAS_TRITON, INTERPRET
from nanovllm.kernels.decode_attention import Shared, SharedUnit, paged_decode_attention_triton, shared_unit
from nanovllm.kernels.prefill_attention import paged_prefill_attention_triton


class TritonBackend(AttentionBackend):
    name = "triton"
    block_size_multiple = 16
    default_block_size = 256

    @classmethod
    def unavailable(
        cls, device: Device, dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype
    ) -> str | None:
        if not device.is_cuda and not INTERPRET:
            return f"it needs a CUDA device (or TRITON_INTERPRET=1), and the device is {device.torch}"
        if not HAS_TRITON:
            return "the package triton is not installed (pip install triton)"
        if head_dim % 8 or head_dim > 256:
            return f"it supports head_dim up to 256 in steps of 8, and head_dim is {head_dim}"
        return None

    def shared_unit(
        self, group: int, head_dim: int, cache_dtype: torch.dtype, device: torch.device
    ) -> SharedUnit | None:
        return shared_unit(group, head_dim, cache_dtype, device, self.deterministic)

    def forward(self, q: torch.Tensor, cache: KVCache, meta: AttentionMetadata, scale: float) -> torch.Tensor:
        if meta.prefill is None:
            shared = meta.shared
            return paged_decode_attention_triton(
                q,
                cache,
                meta.block_tables,
                meta.context_lens,
                meta.max_seqlen_k,
                scale,
                None if shared is None else Shared(**vars(shared)),
                invariant=self.deterministic,
            )
        return paged_prefill_attention_triton(
            q,
            cache,
            meta.block_tables,
            meta.prefill.cu_seqlens_q,
            meta.context_lens,
            meta.prefill.max_seqlen_q,
            scale,
            invariant=self.deterministic,
        )
