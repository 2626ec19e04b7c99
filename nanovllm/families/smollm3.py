"""SmolLM3: Llama with layers that have no rotary embedding, every fourth by default."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.formats.config_json.values import check_windows, layer_kinds, window_length
from nanovllm.models.config import FULL, HFConfig, ModelConfig, ModelFamily


def _rotated(hf: HFConfig) -> list[bool]:
    """Whether each layer has a rotary embedding."""
    count, every = hf.integer("num_hidden_layers"), hf.integer("no_rope_layer_interval")
    stated = hf.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in range(count)]
    if not isinstance(stated, list) or len(stated) < count:
        raise ValueError(f"config.json: no_rope_layers must have 0 or 1 for each layer, not {stated!r}")
    return [bool(each) for each in stated[:count]]


class SmolLM3Family(ModelFamily):
    """The layers without rope."""

    def read(self, hf: HFConfig) -> ModelConfig:
        check_windows(hf)
        config = super().read(hf)
        specs = [config.spec(layer) for layer in range(config.num_layers)]
        rotated = _rotated(hf)
        specs = [
            spec if rope else replace(spec, rope=None) for spec, rope in zip(specs, rotated, strict=True)
        ]
        return replace(config, attention=tuple(specs))


SMOLLM3 = SmolLM3Family(
    defaults={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2000000.0,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    kinds=lambda hf: (
        layer_kinds(hf, lambda layer: not _rotated(hf)[layer])
        if hf.boolean("use_sliding_window") and hf.get("sliding_window") and window_length(hf)
        else (FULL,)
    ),
    reads=("no_rope_layers", "no_rope_layer_interval"),
)
