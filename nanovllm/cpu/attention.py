"""The attention backend of CPUs with kernels of ours: decode and prefill over the paged cache in place."""

from __future__ import annotations

import torch

from nanovllm.attention.backends import FEATURES, AttentionBackend
from nanovllm.attention.base import AttentionMetadata, variant
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.cpu import isa
from nanovllm.device import Device
from nanovllm.kernels.compat import cpu_kernel
from nanovllm.kernels.paged import KVCache


class CPUBackend(AttentionBackend):
    """In decode it only launches kernels, so that a step can be recorded."""

    name = "cpu"
    block_size_multiple = 1
    default_block_size = 64
    head_dims = range(8, 513, 8)
    features = frozenset(FEATURES)
    heads_first = True

    @classmethod
    def unavailable(cls, device: Device, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
        if device.is_cuda:
            return f"it needs a CPU, and the device is {device.torch}"
        if not isa.has_kernels():
            return isa.HINT
        if cache_dtype != dtype:
            return f"it does not support a KV cache of {cache_dtype}"
        return None

    def forward(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        beyond = variant(spec, sinks)
        tables, lens = meta.block_tables, meta.context_lens
        done: torch.Tensor
        if meta.cu_seqlens_q is None:
            attend = cpu_kernel("decode_attention.paged_decode_attention")
            done = attend(q, cache, tables, lens, meta.max_seqlen_k, spec.scale, beyond)
            return done
        attend, starts = cpu_kernel("prefill_attention.paged_prefill_attention"), meta.cu_seqlens_q
        done = attend(q, cache, tables, starts, lens, meta.max_seqlen_q, spec.scale, beyond)
        return done
