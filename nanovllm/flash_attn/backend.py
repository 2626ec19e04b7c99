"""The attention backend of the package flash-attn 2, which is imported only on use.

It reads the core's paged cache in the model's dtype, never an FP8 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import ModuleType

import torch

from nanovllm.attention.backends import AttentionBackend
from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.device import Device
from nanovllm.kernels.paged import KVCache


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
            for starts, ends in ((None, None), (bounds, bounds * length)):
                meta = AttentionMetadata(context - 1, context, table, length, starts, ends, 1)
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
        attend: Callable[..., torch.Tensor]
        if meta.cu_seqlens_q is None:
            attend = partial(package.flash_attn_with_kvcache, q[:, None], cache_seqlens=meta.context_lens)
        else:
            attend = partial(
                package.flash_attn_varlen_func,
                q,
                cu_seqlens_q=meta.cu_seqlens_q,
                cu_seqlens_k=meta.cu_seqlens_k,
                max_seqlen_q=meta.max_seqlen_q,
                max_seqlen_k=meta.max_seqlen_k,
            )
        # Older packages do not know these two.
        if spec.window is not None:
            attend = partial(attend, window_size=(spec.window - 1, 0))  # tokens before it and after it
        if spec.softcap is not None:
            attend = partial(attend, softcap=spec.softcap)
        out = attend(
            cache.k,
            cache.v,
            softmax_scale=spec.scale,
            causal=True,
            block_table=meta.block_tables,
        )
        return out[:, 0] if meta.cu_seqlens_q is None else out
