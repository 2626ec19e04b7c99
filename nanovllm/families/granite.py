"""Granite 3 and 4, dense: Llama with a multiplier of embeddings, of each block, of scores and of logits.

Granite 4's files call themselves hybrid. Only those whose layers all have attention and no experts are read.
Granite swash has windows and sinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.attention.rotary import AttentionSpec
from nanovllm.families.blocks import TwoBlocks
from nanovllm.families.llama import LLAMA
from nanovllm.formats.config_json.values import layer_kinds, number
from nanovllm.formats.packed_parts import PartNames
from nanovllm.layers.stream import Step
from nanovllm.models.config import FULL, HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, GatedMLP, layer_norm
from nanovllm.quantization.base import Normed, Product


class GraniteFamily(ModelFamily):
    """The multipliers."""

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        return replace(
            config,
            attention=tuple(
                replace(spec, scale=number(hf, "attention_multiplier")) for spec in config.attention
            ),
            embedding_multiplier=number(hf, "embedding_multiplier"),
            residual_multiplier=number(hf, "residual_multiplier"),
            logit_multiplier=1.0 / number(hf, "logits_scaling"),
        )


class GraniteSWAFamily(GraniteFamily):
    """Granite swash: sinks, a window in three of four layers, and each layer's theta of rope; 0: no rope."""

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        specs = [replace(config.spec(layer), sinks=True) for layer in range(config.num_layers)]
        thetas = hf.get("layer_rope_theta")
        if thetas is not None:
            fits = isinstance(thetas, list) and len(thetas) == len(specs)
            if not fits or not all(type(theta) in (int, float) and theta >= 0 for theta in thetas):
                raise ValueError(
                    f"config.json: layer_rope_theta must be a number for each of {len(specs)} layers, not "
                    f"{thetas!r}"
                )
            specs = [_with_theta(spec, float(theta)) for spec, theta in zip(specs, thetas, strict=True)]
        return replace(config, attention=tuple(specs))


def _with_theta(spec: AttentionSpec, theta: float) -> AttentionSpec:
    assert spec.rope is not None
    return replace(spec, rope=replace(spec.rope, theta=theta) if theta else None)


class _SharedMLP(GatedMLP):
    """A `GatedMLP` by the names of the hybrid's files."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self.output_linear = self.down_proj
        del self.down_proj

    def forward(self, x: Normed, step: Step) -> Product:
        product: Product = self.output_linear(self.gate_up_proj(x, self.activation))
        return product


class GraniteHybridLayer(TwoBlocks):
    """As `DecoderLayer`, with another name of the MLP."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        norms = layer_norm(config, build.tp), layer_norm(config, build.tp)
        super().__init__(
            {"input_layernorm": norms[0], "self_attn": Attention(config, index, build)},
            {"post_attention_layernorm": norms[1], "shared_mlp": _SharedMLP(config, build)},
        )


class GraniteHybridFamily(GraniteFamily):
    """The names of kinds of layers and of sizes, and rope only if the config asks for it."""

    def own_names(self, raw: dict[str, Any]) -> Mapping[str, Any]:
        kinds = raw.get("layer_types")
        if not isinstance(kinds, list):
            raise ValueError("config.json: layer_types must be a list: without it all layers are Mamba's")
        named = [FULL if kind == "attention" else kind for kind in kinds]
        return {**raw, "layer_types": named, "intermediate_size": raw.get("shared_intermediate_size", 1024)}

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        size, rope = config.intermediate_size, config.spec(0).rope
        kind = hf.get("position_embedding_type", "nope")
        if kind not in ("rope", "nope"):
            raise ValueError(
                f"config.json: position_embedding_type {kind!r} is not supported; supported: 'rope'"
            )
        spec = replace(config.spec(0), rope=rope if kind == "rope" else None)
        packed = {"input_linear": {"gate_proj": size, "up_proj": size}}
        return replace(config, attention=(spec,), names=PartNames(packed))


_READS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
GRANITE = GraniteFamily(
    defaults=LLAMA.defaults,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    reads=_READS,
)
GRANITE_HYBRID = GraniteHybridFamily(
    defaults={**LLAMA.defaults, "num_local_experts": 8},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    kinds=lambda hf: layer_kinds(hf, lambda layer: False),
    layer=GraniteHybridLayer,
    reads=_READS,
)
GRANITE_SWA = GraniteSWAFamily(
    defaults={
        **LLAMA.defaults,
        "vocab_size": 100352,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 100257,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    kinds=lambda hf: layer_kinds(hf, lambda layer: layer % 4 != 0),
    reads=_READS,
)
