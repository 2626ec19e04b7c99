"""The scales of an FP8 cache: K/V are divided by a scale, one for each layer and KV head.

Takes those that the files hold, or computes them once at a start, and after an update of the weights.
Attention backends multiply by a scale as they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from nanovllm.batch import StepKind
from nanovllm.formats.fp8.stated import stated_scales
from nanovllm.kernels.paged import KVCache
from nanovllm.models.decoder import Attention
from nanovllm.runner.memory import CALIBRATION_TOKENS, CacheLayout, attach
from nanovllm.runner.model_runner import ModelRunner


@torch.inference_mode()
def calibrate(runner: ModelRunner) -> None:
    """Set the scales of `runner`'s cache: those of the files, if its weights are theirs; else from the K/V of
    a fixed random prompt.

    The scales are the same for every start with one `max_model_len`, and number of ranks. The content of the
    KV cache is lost.
    """
    layers, stated = runner.model.attention_layers, _stated(runner)
    caching = [layer for layer in layers if layer.spec.kv_from is None]
    if any(layer not in stated for layer in caching):
        _calibrate(runner)
    for layer, (k_scale, v_scale) in stated.items():
        _set(layer, k_scale, v_scale)
    for layer in layers:
        if stated and layer.spec.kv_from is not None:
            source = layers[layer.spec.kv_from].cache
            assert source.k_scale is not None and source.v_scale is not None, (
                "an earlier layer has its scales"
            )
            _set(layer, source.k_scale, source.v_scale)


def _stated(runner: ModelRunner) -> dict[Attention, tuple[torch.Tensor, torch.Tensor]]:
    """The scales of attention layers that the files hold; none, if the weights are not those of the files."""
    is_new = getattr(runner, "has_new_weights", False) or runner.config.load_format != "auto"
    if is_new or not runner.model_config.quant.cache_scales:
        return {}
    layers = {path: layer for path, layer in runner.model.named_modules() if isinstance(layer, Attention)}
    return {layers[path]: scales for path, scales in stated_scales(runner).items() if path in layers}


def _calibrate(runner: ModelRunner) -> None:
    """Set the scales from the K/V of a prompt."""
    num_tokens = min(CALIBRATION_TOKENS, runner.max_model_len)
    layers, kept = runner.model.attention_layers, runner.kv_cache
    layout, plain = runner.layout, CacheLayout.plain([layer.spec for layer in layers])
    runner.layout = replace(plain, groups=layout.groups[-1:])  # one group, by the policy of the model
    shape = runner.layout.shape(-(-num_tokens // runner.block_size), runner.block_size)
    runner.kv_cache = _scratch_in(kept, shape, runner.dtype)  # zeros: unwritten positions must not count
    caches = [layer.cache for layer in layers]
    for layer in layers:
        layer.cache = KVCache(layer.cache.k, layer.cache.v)  # without scales
    attach(layers, runner.kv_cache, runner.layout)
    has_states = bool(kept.shape[2])  # as it has blocks
    for state_layer in () if has_states else runner.model.state_layers:
        state_layer.allocate_states(1)
    rng = np.random.default_rng(0)
    token_ids = rng.integers(runner.model_config.vocab_size, size=num_tokens, dtype=np.int32)
    for start in range(0, num_tokens, runner.config.max_num_batched_tokens):
        chunk = token_ids[start : start + runner.config.max_num_batched_tokens]
        batch = runner.equal_batch(StepKind.PREFILL, 1, len(chunk), start + len(chunk))
        runner.run(replace(batch, token_ids=chunk))
    for state_layer in () if has_states else runner.model.state_layers:
        state_layer.allocate_states(0)
    contents = [layer.cache[:2] for layer in layers]
    for layer, cache, group in zip(layers, caches, layout.group_of, strict=True):
        layer.cache, layer.group = cache, group
    _set_scales(layers, contents, runner.cache_dtype)
    runner.kv_cache, runner.layout = kept, layout


def _scratch_in(kv_cache: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Contiguous zeros of `shape` and `dtype`, in the memory of `kv_cache` if that is large enough."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes > kv_cache.nbytes:
        return torch.zeros(shape, dtype=dtype, device=kv_cache.device)
    return kv_cache.flatten().view(torch.uint8)[:num_bytes].zero_().view(dtype).view(shape)


def _set_scales(
    layers: Sequence[Attention], contents: Sequence[tuple[torch.Tensor, ...]], dtype: torch.dtype
) -> None:
    """Set each layer's scales for a cache of `dtype`, per KV head, from `contents`, each layer's keys
    and values.

    The largest value maps to a quarter of the largest value of `dtype`; later values beyond the range are
    clamped. Existing scales keep their addresses, which CUDA graphs hold.
    """
    for layer, cells in zip(layers, contents, strict=True):
        source = layer.spec.kv_from
        if source is not None:
            k_scale, v_scale = layers[source].cache[2:]
        else:
            largest = (each.float().abs().amax(dim=(0, 1, 3)) for each in cells)
            k_scale, v_scale = ((each / (torch.finfo(dtype).max / 4)).clamp(min=1e-6) for each in largest)
        assert k_scale is not None and v_scale is not None, "an earlier layer has its scales"
        _set(layer, k_scale, v_scale)


def _set(layer: Attention, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
    """Set a layer's scales, in place if it has some: graphs hold their addresses."""
    if layer.cache.k_scale is None or layer.cache.v_scale is None:
        layer.cache = layer.cache._replace(k_scale=k_scale, v_scale=v_scale)
    else:
        layer.cache.k_scale.copy_(k_scale)
        layer.cache.v_scale.copy_(v_scale)
