"""The memory of the KV cache, one tensor that all attention layers share, and its scales for FP8.

Knows no sequence; the scheduler owns the prefix cache and the block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from nanovllm.layers.attention import Attention


def cache_shape(layers: Sequence[Attention], num_blocks: int, block_size: int) -> tuple[int, ...]:
    """[2, layers, num_blocks, block_size, KV heads, head_dim]: keys, then values."""
    return 2, len(layers), num_blocks, block_size, layers[0].num_kv_heads, layers[0].head_dim


def attach(layers: Sequence[Attention], kv_cache: torch.Tensor) -> None:
    """Give every layer its part of a cache of `cache_shape`, instead of its current one."""
    for layer, k, v in zip(layers, *kv_cache, strict=True):
        layer.cache = layer.cache._replace(k=k, v=v)


def scratch_in(kv_cache: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Contiguous zeros of `shape` and `dtype`, in the memory of `kv_cache` if that is large enough."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes > kv_cache.nbytes:
        return torch.zeros(shape, dtype=dtype, device=kv_cache.device)
    return kv_cache.flatten().view(torch.uint8)[:num_bytes].zero_().view(dtype).view(shape)


def set_scales(layers: Sequence[Attention], kv_cache: torch.Tensor, dtype: torch.dtype) -> None:
    """Set each layer's scales for a cache of `dtype`, per KV head, from the content of `kv_cache`.

    The largest value maps to a quarter of the largest value of `dtype`; later values beyond the range are
    clamped. Existing scales keep their addresses, which CUDA graphs hold.
    """
    largest = kv_cache.float().abs().amax(dim=(2, 3, 5))  # [2, layers, KV heads]
    scales = (largest / (torch.finfo(dtype).max / 4)).clamp(min=1e-6)
    for layer, k_scale, v_scale in zip(layers, *scales, strict=True):
        if layer.cache.k_scale is None or layer.cache.v_scale is None:
            layer.cache = layer.cache._replace(k_scale=k_scale, v_scale=v_scale)
        else:
            layer.cache.k_scale.copy_(k_scale)
            layer.cache.v_scale.copy_(v_scale)
