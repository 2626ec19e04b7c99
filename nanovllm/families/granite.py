"""Granite 3 and 4, dense: Llama with a multiplier of embeddings, of each block, of scores and of logits.

Granite 4's files call themselves hybrid. Only those whose layers all have attention and no experts are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanovllm.families.llama import LLAMA
from nanovllm.formats.config_json.values import layer_kinds, number
from nanovllm.layers.stream import AnyStream, Step
from nanovllm.models.config import FULL, HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, GatedMLP, layer_norm
from nanovllm.quantization.base import Normed, Product
from nanovllm.quantization.names import FileNames


class GraniteFamily(ModelFamily):
    """The multipliers."""

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        return replace(
            config,
            attention=(replace(config.spec(0), scale=number(hf, "attention_multiplier")),),
            embedding_multiplier=number(hf, "embedding_multiplier"),
            residual_multiplier=number(hf, "residual_multiplier"),
            logit_multiplier=1.0 / number(hf, "logits_scaling"),
        )


class _SharedMLP(GatedMLP):
    """A `GatedMLP` by the names of the hybrid's files."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self.output_linear = self.down_proj
        del self.down_proj

    def forward(self, x: Normed, step: Step) -> Product:
        product: Product = self.output_linear(self.gate_up_proj(x, self.activation))
        return product


class GraniteHybridLayer(nn.Module):
    """As `DecoderLayer`, with another name of the MLP."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__()
        self.input_layernorm = layer_norm(config, build.tp)
        self.self_attn = Attention(config, index, build)
        self.post_attention_layernorm = layer_norm(config, build.tp)
        self.shared_mlp = _SharedMLP(config, build)

    def forward(self, x: AnyStream, step: Step, keep: torch.Tensor | None = None) -> AnyStream:
        """keep [n]: only these rows are needed after attention."""
        x = x.add(self.input_layernorm, self.self_attn, step, keep)
        return x.add(self.post_attention_layernorm, self.shared_mlp, step)


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
        return replace(config, attention=(spec,), names=FileNames(packed))


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
