"""Qwen2 and Qwen2.5: biases on query, key and value; a sliding window only if the config enables it."""

from __future__ import annotations

from nanovllm.models.config import HFConfig, ModelFamily, window_length

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


def qwen_window(hf: HFConfig) -> int | None:
    """The sliding window, if the config enables it and a layer uses it."""
    if not hf.boolean("use_sliding_window") or (window := window_length(hf)) is None:
        return None
    layer_types = hf.get("layer_types")
    if layer_types is None:
        first = hf.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ValueError(f"config.json: max_window_layers must be an integer, not {first!r}")
        used = hf.integer("num_hidden_layers") > first
    else:
        used = "sliding_attention" in layer_types
    return window if used else None


QWEN2 = ModelFamily(defaults=QWEN_DEFAULTS, qkv_bias=True, sliding_window=qwen_window)
