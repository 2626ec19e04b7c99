"""Qwen2 and Qwen2.5: biases on query, key and value; a sliding window only if the config enables it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanovllm.formats.config_json.values import check_windows, layer_kinds, window_length
from nanovllm.models.config import FULL, HFConfig, ModelFamily

QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "max_window_layers": 28,
}


def windows(hf: HFConfig, default: Callable[[int], bool]) -> Sequence[str]:
    """The layers' kinds: with a window, if the config enables it, are those that it names, or `default`'s."""
    if not hf.boolean("use_sliding_window") or window_length(hf) is None:
        return (FULL,)
    return layer_kinds(hf, default)


def max_window_layers(hf: HFConfig) -> int:
    """The layer that this key of config.json names."""
    layer = hf.get("max_window_layers", 28)
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise ValueError(f"config.json: max_window_layers must be an integer, not {layer!r}")
    return layer


def qwen_kinds(hf: HFConfig) -> Sequence[str]:
    """All layers after the first ones have the window, if the config enables it."""
    check_windows(hf)
    return windows(hf, lambda layer: layer >= max_window_layers(hf))


QWEN2 = ModelFamily(defaults=QWEN_DEFAULTS, qkv_bias=True, kinds=qwen_kinds)
