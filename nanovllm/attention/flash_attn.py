"""The `flash-attn` package (FlashAttention-2) over our paged cache; its blocks are multiples of 256 tokens.

Imports the package only on use, so that everything else works without it.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from nanovllm.device import Device
from nanovllm.kernels.cache import KVCache


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
        if meta.prefill is None:
            out = package.flash_attn_with_kvcache(
                q[:, None],
                cache.k,
                cache.v,
                cache_seqlens=meta.context_lens,
                block_table=meta.block_tables,
                softmax_scale=spec.scale,
                causal=True,
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
        )
