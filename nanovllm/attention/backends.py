"""The attention backends, and the choice of an engine's backend.

Triton runs on any GPU that it supports, without an extra package; without a GPU only in its interpreter
(TRITON_INTERPRET=1), for tests. The reference is plain torch: the CPU path, and the oracle of tests.
Others are doors, which `doors.BACKENDS` names.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from nanovllm import doors
from nanovllm.attention.base import (
    FEATURES,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
)
from nanovllm.device import Device
from nanovllm.doors import Table
from nanovllm.kernels.attention_reference import (
    Gathered,
    decode_attend_reference,
    decode_gather_reference,
    paged_prefill_attention_reference,
)
from nanovllm.kernels.compat import HAS_TRITON, INTERPRET
from nanovllm.kernels.decode_attention import (
    Shared,
    SharedUnit,
    paged_decode_attention_triton,
    shared_unit,
)
from nanovllm.kernels.paged import PLAIN, KVCache, Variant
from nanovllm.kernels.prefill_attention import paged_prefill_attention_triton

logger = logging.getLogger("nanovllm")


def _variant(spec: AttentionSpec, sinks: torch.Tensor | None) -> Variant:
    """What attention does beyond a causal softmax; PLAIN itself if nothing."""
    if spec.window is None and spec.softcap is None and sinks is None:
        return PLAIN
    return Variant(spec.window, spec.softcap, sinks)


class TritonBackend(AttentionBackend):
    name = "triton"
    block_size_multiple = 16
    default_block_size = 128
    head_dims = range(8, 513, 8)
    features = frozenset(FEATURES)
    window_tile = 128  # the most keys of a tile

    @classmethod
    def unavailable(cls, device: Device, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
        if not device.is_cuda and not INTERPRET:
            return f"it needs a CUDA device (or TRITON_INTERPRET=1), and the device is {device.torch}"
        if not HAS_TRITON:
            return "the package triton is not installed (pip install triton)"
        return None

    def shared_unit(
        self, spec: AttentionSpec, cache_dtype: torch.dtype, device: torch.device
    ) -> SharedUnit | None:
        if spec.window is not None:  # a window soon leaves a shared prefix
            return None
        group = spec.num_heads // spec.num_kv_heads
        return shared_unit(group, spec.head_dim, cache_dtype, device, self.deterministic)

    def forward(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if meta.prefill is not None:
            return self._prefill(q, cache, meta, spec, sinks)
        shared = meta.shared if spec.window is None else None
        return paged_decode_attention_triton(
            q,
            cache,
            meta.block_tables,
            meta.context_lens,
            meta.max_seqlen_k,
            spec.scale,
            None if shared is None else Shared(**vars(shared)),
            invariant=self.deterministic,
            variant=_variant(spec, sinks),
        )

    def replace(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self._prefill(q, cache, meta, spec, sinks, q)

    def _prefill(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert meta.prefill is not None
        return paged_prefill_attention_triton(
            q,
            cache,
            meta.block_tables,
            meta.prefill.cu_seqlens_q,
            meta.context_lens,
            meta.prefill.max_seqlen_q,
            spec.scale,
            invariant=self.deterministic,
            variant=_variant(spec, sinks),
            out=out,
        )


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
        variant = _variant(spec, sinks)
        if meta.prefill is None:
            if self._lens is not meta.context_lens:
                self._lens, self._gathered = meta.context_lens, {}
            gathered = self._gathered.get(spec.window)
            if gathered is None:  # once per step, not per layer
                gathered = self._gathered[spec.window] = decode_gather_reference(
                    meta.block_tables, meta.context_lens, meta.max_seqlen_k, cache.k.shape[1], spec.window
                )
            return decode_attend_reference(q, cache, gathered, spec.scale, variant)
        return paged_prefill_attention_reference(
            q,
            cache,
            meta.block_tables,
            meta.prefill.cu_seqlens_q,
            meta.context_lens,
            meta.prefill.max_seqlen_q,
            spec.scale,
            variant,
        )


BACKENDS: Table[type[AttentionBackend]] = Table(doors.BACKENDS)


def select(
    name: str,
    device: Device,
    dtype: torch.dtype,
    specs: Sequence[AttentionSpec],
    cache_dtype: torch.dtype,
    deterministic: bool = False,
) -> AttentionBackend:
    """Return the backend called `name`, or for "auto" the first that is available and computes all layers.

    With `deterministic`, "auto" is "triton", whose bits do not depend on the rest of the batch. Raises
    ValueError with the reason if the requested backend cannot run here, or if the GPU does not support FP8
    (all backends use the same kernel to store an FP8 cache).
    """
    if cache_dtype != dtype and device.is_cuda and device.capability < (8, 9):
        raise ValueError(
            "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or newer (Ada, Hopper), and "
            f"{device.name} has {'.'.join(map(str, device.capability))}; use kv_cache_dtype='auto'"
        )
    asked = f"attention_backend={name!r}"
    if deterministic and name == "auto":
        name, asked = TritonBackend.name, "deterministic=True needs attention_backend='triton', which"
    reasons: dict[str, str] = {}
    for backend in BACKENDS.values():
        # Triton's interpreter is only for tests: "auto" never selects it.
        if name not in ("auto", backend.name) or (
            name == "auto" and not device.is_cuda and backend.name == "triton"
        ):
            continue
        reason = backend.unavailable(device, dtype, cache_dtype)
        if reason is None and (reason := backend.unsupported(specs)):
            here = [
                each for each in BACKENDS.values() if each.unavailable(device, dtype, cache_dtype) is None
            ]
            able = [each.name for each in here if each.unsupported(specs) is None]
            reason += f"; supported by {able}"
        if reason is None:
            logger.info("attention backend: %s%s", backend.name, f" ({reasons})" if reasons else "")
            return backend(deterministic)
        if name != "auto":
            raise ValueError(f"{asked} cannot run here: {reason}")
        reasons[backend.name] = reason
    raise ValueError(f"attention_backend={name!r}: no such backend; there are {[*BACKENDS]} and 'auto'")


def resolve_block_size(asked: int | None, backend: AttentionBackend) -> int:
    """Return the KV cache block size: the backend's default, or the requested one if it supports that."""
    if asked is None:
        return backend.default_block_size
    if asked % backend.block_size_multiple:
        raise ValueError(
            f"kvcache_block_size={asked} must be a multiple of {backend.block_size_multiple} "
            f"for the attention backend {backend.name!r}"
        )
    return asked
