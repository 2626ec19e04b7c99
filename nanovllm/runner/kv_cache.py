"""The memory of the KV cache, one tensor of which every attention layer has its part, and its scales for FP8.

Knows no sequence; the prefix cache and the owners of blocks are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanovllm.layers.attention import Attention


def allocate(
    layers: Sequence[Attention], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Give every layer its part of one new cache [2, layers, num_blocks, block_size, KV heads, head_dim].

    The layers let go of the old one first; so must the caller.
    """
    nothing = torch.empty(0, dtype=dtype, device=device)
    for layer in layers:
        layer.cache = layer.cache._replace(k=nothing, v=nothing)
    shape = (2, len(layers), num_blocks, block_size, layers[0].num_kv_heads, layers[0].head_dim)
    kv_cache = torch.empty(shape, dtype=dtype, device=device)
    for layer, k, v in zip(layers, *kv_cache, strict=True):
        layer.cache = layer.cache._replace(k=k, v=v)
    return kv_cache


def set_scales(layers: Sequence[Attention], kv_cache: torch.Tensor, dtype: torch.dtype) -> None:
    """Set each layer's scales for a cache of `dtype`, per KV head, from what `kv_cache` holds.

    The largest values seen map to a quarter of what `dtype` can hold; larger ones still are clamped there.
    """
    largest = kv_cache.float().abs().amax(dim=(2, 3, 5))  # [2, layers, KV heads]
    scales = (largest / (torch.finfo(dtype).max / 4)).clamp(min=1e-6)
    for layer, k_scale, v_scale in zip(layers, *scales, strict=True):
        layer.cache = layer.cache._replace(k_scale=k_scale, v_scale=v_scale)
