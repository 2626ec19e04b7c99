"""AttentionBackend: the interface; Triton's; and the choice of an engine's backend.

Triton runs on any GPU that it supports, without an extra package; without a GPU only in its interpreter
(TRITON_INTERPRET=1), for tests. `doors.BACKENDS` names all.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from nanovllm import doors
from nanovllm.attention.base import AttentionMetadata, variant
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.device import Device
from nanovllm.doors import Table
from nanovllm.kernels.compat import HAS_TRITON, INTERPRET
from nanovllm.kernels.decode_attention import Shared, SharedUnit, paged_decode_attention_triton, shared_unit
from nanovllm.kernels.kinds import Kinds
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.prefill_attention import paged_prefill_attention_triton

logger = logging.getLogger("nanovllm")


FEATURES = ("window", "softcap", "sinks", "kv_from")  # fields of AttentionSpec that a backend may not support


def cache_dtype(option: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache by the option `kv_cache_dtype`, in a model of `dtype`."""
    return Kinds("kv_cache_dtype", {"auto": dtype, "fp8": torch.float8_e4m3fn})[option]


class AttentionBackend(ABC):
    """Attends over the paged cache, which already holds this step's keys and values.

    Cells without a live token may hold NaN. With `deterministic` the bits of a row do not depend on other
    rows. What a backend can do stands in its class: these constants, and `unavailable`.
    """

    name: ClassVar[str]
    block_size_multiple: ClassVar[int]
    default_block_size: ClassVar[int]
    supports_cuda_graph: ClassVar[bool] = True  # a decode step only launches kernels
    head_dims: ClassVar[range] = range(8, 257, 8)
    features: ClassVar[frozenset[str]] = frozenset()  # the fields among FEATURES that it computes
    heads_first: ClassVar[bool] = False  # a block's memory is [KV heads, block_size, head_dim]
    window_tile: ClassVar[int] = 1  # reading begins at a multiple of this, at or before a window's start

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    @classmethod
    @abstractmethod
    def unavailable(cls, device: Device, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
        """Return the reason why this backend cannot run here, or None if it can."""

    @classmethod
    def unsupported(cls, specs: Sequence[AttentionSpec]) -> str | None:
        """Return what this backend cannot compute, with the layer; None if it can compute all layers."""
        for layer, spec in enumerate(specs):
            for name in FEATURES:
                value = getattr(spec, name)
                if value is not None and value is not False and name not in cls.features:
                    return f"layer {layer} has {name}={value}, which it does not support"
            if spec.head_dim not in cls.head_dims:
                most, step = cls.head_dims[-1], cls.head_dims.step
                return (
                    f"it supports head_dim up to {most} in steps of {step}, and head_dim is {spec.head_dim} "
                    f"in layer {layer}"
                )
        return None

    def shared_unit(
        self, spec: AttentionSpec, cache_dtype: torch.dtype, device: torch.device
    ) -> SharedUnit | None:
        """How to group sequences with shared prefixes; None: not supported."""
        return None

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the causal attention of q [T, num_heads, head_dim] as a new tensor of the same shape.

        The cache already holds the keys and values of the step's tokens. sinks: [num_heads] of q's dtype, if
        the spec has them.
        """

    def replace(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """As `forward` in a prefill step, but the result overwrites q, which is contiguous."""
        q.copy_(self.forward(q, cache, meta, spec, sinks))


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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """out: where the result of a prefill step goes; None: into a new tensor."""
        if meta.cu_seqlens_q is not None:
            return paged_prefill_attention_triton(
                q,
                cache,
                meta.block_tables,
                meta.cu_seqlens_q,
                meta.context_lens,
                meta.max_seqlen_q,
                spec.scale,
                invariant=self.deterministic,
                variant=variant(spec, sinks),
                out=out,
            )
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
            variant=variant(spec, sinks),
        )

    def replace(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> None:
        assert meta.cu_seqlens_q is not None
        self.forward(q, cache, meta, spec, sinks, q)


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
