"""Gemma 2 and Gemma 3 (text): norms around each block with weights 1 + w, scaled embeddings, windows.

Of a Gemma 3 that reads images only the decoder is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from nanovllm.families.blocks import TwoBlocks, decoder_prefixes
from nanovllm.formats.config_json.values import layer_kinds, number
from nanovllm.kernels.activation import Activation
from nanovllm.models.config import HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, GatedMLP, layer_norm
from nanovllm.quantization.shards import FileNames


class GemmaLayer(TwoBlocks):
    """As `DecoderLayer`, with a norm after each block too."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__(
            {
                "input_layernorm": layer_norm(config, build.tp),
                "self_attn": Attention(config, index, build),
                "post_attention_layernorm": layer_norm(config, build.tp),
            },
            {
                "pre_feedforward_layernorm": layer_norm(config, build.tp),
                "mlp": GatedMLP(config, build),
                "post_feedforward_layernorm": layer_norm(config, build.tp),
            },
        )


class GemmaFamily(ModelFamily):
    """Softcaps, the scale of scores, and where config.json has the keys of the decoder."""

    def text_config(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        text = raw.get("text_config")
        if text is None:
            return raw
        if not isinstance(text, dict):
            raise ValueError(f"config.json: text_config must be an object, not {text!r}")
        own = {key: value for key, value in raw.items() if not key.endswith("_config") or "quant" in key}
        found = own | {key: value for key, value in text.items() if value is not None or key not in own}
        ends = [each["eos_token_id"] for each in (own, text) if each.get("eos_token_id") is not None]
        if len(ends) > 1:  # each may lack some of the other's
            found["eos_token_id"] = [*chain(*(each if isinstance(each, list) else [each] for each in ends))]
        return found

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        scale = number(hf, "query_pre_attn_scalar", 256) ** -0.5
        softcap, logit_softcap = (
            number(hf, key) if hf.get(key) else None
            for key in ("attn_logit_softcapping", "final_logit_softcapping")
        )
        return replace(
            config,
            attention=tuple(replace(spec, scale=scale, softcap=softcap) for spec in config.attention),
            max_position_embeddings=hf.integer("max_position_embeddings"),  # with the scaling applied
            norm_offset=1.0,
            embedding_multiplier=config.hidden_size**0.5,
            logit_softcap=logit_softcap,
            names=FileNames(prefixes=decoder_prefixes(("vision_tower.", "multi_modal_projector."))),
        )


_SHARED: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": Activation.GELU_TANH.value,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "eos_token_id": 1,
}
_READS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
GEMMA2 = GemmaFamily(
    defaults={
        **_SHARED,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    kinds=lambda hf: layer_kinds(hf, lambda layer: layer % 2 == 0),
    layer=GemmaLayer,
    reads=_READS,
)
GEMMA3 = GemmaFamily(
    defaults={
        **_SHARED,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    kinds=lambda hf: layer_kinds(hf, lambda layer: (layer + 1) % hf.integer("sliding_window_pattern") != 0),
    ropes="local",
    layer=GemmaLayer,
    reads=_READS,
)
