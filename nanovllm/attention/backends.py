"""The attention backends, and the choice of an engine's backend.

Triton runs on any GPU that it supports, without an extra package; without a GPU only in its interpreter
(TRITON_INTERPRET=1), for tests. The reference is plain torch: the CPU path, and the oracle of tests. The
package flash-attn is imported only on use.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from nanovllm import doors
from nanovllm.attention.base import (
    FEATURES,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    PrefillRanges,
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
        variant = _variant(spec, sinks)
        if meta.prefill is None:
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
                variant=variant,
            )
        return paged_prefill_attention_triton(
            q,
            cache,
            meta.block_tables,
            meta.prefill.cu_seqlens_q,
            meta.context_lens,
            meta.prefill.max_seqlen_q,
            spec.scale,
            invariant=self.deterministic,
            variant=variant,
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


@lru_cache
def _package() -> ModuleType | ImportError:
    """The imported package, or the error of the import, for example of a wheel built for another torch."""
    try:
        import flash_attn
    except ImportError as error:
        return error.with_traceback(None)  # a traceback would keep its frames alive
    return flash_attn


class FlashAttnBackend(AttentionBackend):
    name = "flash_attn"
    block_size_multiple = 256
    default_block_size = 256
    window_tile = 256
    features = frozenset({"window", "softcap", "kv_from"})  # if the installed package has them

    @classmethod
    def unavailable(cls, device: Device, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
        if not device.is_cuda:
            return f"it needs a CUDA device, and the device is {device.torch}"
        package = _package()
        if isinstance(package, ImportError):
            return f"the package flash-attn cannot be imported ({package}); pip install flash-attn"
        if not package.__version__.startswith("2."):
            return f"it needs flash-attn 2.x, and {package.__version__} is installed"
        if device.capability < (8, 0):
            return "it needs compute capability 8.0 or newer (Ampere)"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it supports float16 and bfloat16, and the dtype is {dtype}"
        if cache_dtype != dtype:
            return f"it does not support a KV cache of {cache_dtype}"
        return None

    @classmethod
    def unsupported(cls, specs: Sequence[AttentionSpec]) -> str | None:
        """Also what the installed package refuses: a build may lack windows, softcaps or wide heads."""
        if reason := super().unsupported(specs):
            return reason
        tried: set[tuple[int, int | None, float | None]] = set()
        for layer, spec in enumerate(specs):
            asked = spec.head_dim, spec.window, spec.softcap
            if asked not in tried:
                tried.add(asked)
                if refusal := cls._refusal(spec):
                    what = {"head_dim": spec.head_dim, "window": spec.window, "softcap": spec.softcap}
                    named = ", ".join(f"{name}={value}" for name, value in what.items() if value is not None)
                    return f"layer {layer} has {named}, and the installed flash-attn says: {refusal}"
        return None

    @classmethod
    def _refusal(cls, spec: AttentionSpec) -> str | None:
        """What the package says to one token of a layer like `spec`, in decode and prefill; None: it runs.

        The context is longer than the window: a window that holds all of it is none for the package. All
        values are 1, so the result must be 1: a build without a kernel may return memory as it is.
        """
        if isinstance(package := _package(), ImportError):
            return str(package)
        try:
            length = (spec.window or 0) + 1
            context = torch.tensor([length], dtype=torch.int32, device="cuda")
            bounds = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
            table = torch.zeros(1, -(-length // cls.block_size_multiple), dtype=torch.int32, device="cuda")
            cells = torch.ones(1, cls.block_size_multiple, 1, spec.head_dim, device="cuda").bfloat16()
            for ranges in (None, PrefillRanges(bounds, bounds * length, 1)):
                meta = AttentionMetadata(context - 1, context, table, length, ranges)
                alone = replace(spec, num_heads=1, num_kv_heads=1, kv_from=None)
                out = cls().forward(cells[0, :1], KVCache(cells, cells), meta, alone)
                if not torch.allclose(out, cells[0, :1], atol=0.02):
                    return "nothing, but returns wrong values"
        except (RuntimeError, TypeError, AssertionError) as error:
            return str(error).partition("\n")[0]
        return None

    def forward(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert cache.k_scale is None and cache.v_scale is None, "flash-attn 2 reads no FP8 cache"
        package = _package()
        assert isinstance(package, ModuleType), "unavailable() returned the reason"
        options: dict[str, Any] = {}  # which older packages do not know
        if spec.window is not None:
            options["window_size"] = spec.window - 1, 0  # tokens before it and after it
        if spec.softcap is not None:
            options["softcap"] = spec.softcap
        if meta.prefill is None:
            out = package.flash_attn_with_kvcache(
                q[:, None],
                cache.k,
                cache.v,
                cache_seqlens=meta.context_lens,
                block_table=meta.block_tables,
                softmax_scale=spec.scale,
                causal=True,
                **options,
            )
            return out[:, 0]
        return package.flash_attn_varlen_func(
            q,
            cache.k,
            cache.v,
            cu_seqlens_q=meta.prefill.cu_seqlens_q,
            cu_seqlens_k=meta.prefill.cu_seqlens_k,
            max_seqlen_q=meta.prefill.max_seqlen_q,
            max_seqlen_k=meta.max_seqlen_k,
            softmax_scale=spec.scale,
            causal=True,
            block_table=meta.block_tables,
            **options,
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
