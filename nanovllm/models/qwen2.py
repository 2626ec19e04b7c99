"""Qwen2 and Qwen2.5: biases on query, key and value; a sliding window only if the config enables it."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.models.config import ModelFamily
from nanovllm.models.hf_config import FULL, HFConfig, layer_kinds, window_length

QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}


def qwen_kinds(hf: HFConfig) -> Sequence[str]:
    """Layers with a window, if the config enables it: those that it names, or all after the first ones."""
    if not hf.boolean("use_sliding_window") or window_length(hf) is None:
        return (FULL,)
    first = hf.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ValueError(f"config.json: max_window_layers must be an integer, not {first!r}")
    return layer_kinds(hf, lambda layer: layer >= first)


QWEN2 = ModelFamily(defaults=QWEN_DEFAULTS, qkv_bias=True, kinds=qwen_kinds)
