"""ReferenceBackend: attention in plain torch, on every device, and the oracle of tests."""

from __future__ import annotations

import torch

from nanovllm.attention.backends import FEATURES, AttentionBackend
from nanovllm.attention.base import AttentionMetadata, variant
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.device import Device
from nanovllm.kernels.attention_reference import (
    Gathered,
    decode_attend_reference,
    decode_gather_reference,
    paged_prefill_attention_reference,
)
from nanovllm.kernels.paged import KVCache


class ReferenceBackend(AttentionBackend):
    """Gathers keys and values into dense tensors. Works on every device; fast only on a CPU."""

    name = "reference"
    block_size_multiple = 1
    default_block_size = 16
    supports_cuda_graph = False  # it reads lengths on the host
    head_dims = range(1, 2**31)
    features = frozenset(FEATURES)

    def __init__(self, deterministic: bool = False) -> None:
        super().__init__(deterministic)
        self._lens: torch.Tensor | None = None  # of the last step, with what was gathered, by window
        self._gathered: dict[int | None, Gathered] = {}

    @classmethod
    def unavailable(cls, device: Device, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
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
        if meta.cu_seqlens_q is None:
            if self._lens is not meta.context_lens:
                self._lens, self._gathered = meta.context_lens, {}
            gathered = self._gathered.get(spec.window)
            if gathered is None:  # once per step, not per layer
                gathered = self._gathered[spec.window] = decode_gather_reference(
                    meta.block_tables, meta.context_lens, meta.max_seqlen_k, cache.k.shape[1], spec.window
                )
            return decode_attend_reference(q, cache, gathered, spec.scale, beyond)
        return paged_prefill_attention_reference(
            q,
            cache,
            meta.block_tables,
            meta.cu_seqlens_q,
            meta.context_lens,
            meta.max_seqlen_q,
            spec.scale,
            beyond,
        )
