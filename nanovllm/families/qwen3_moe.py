"""Qwen3-MoE: Qwen3 with experts in most layers; and the layer and the reader of all such families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nanovllm.families.qwen2 import windows
from nanovllm.layers.stream import AnyStream, Step
from nanovllm.models.config import HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, GatedMLP, layer_norm
from nanovllm.moe.layers import ExpertNames, MoE, MoESpec
from nanovllm.quantization.shards import FileNames


class MoELayer(nn.Module):
    """Attention, then experts, or in some layers an MLP; each adds to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__()
        spec, hidden_size, tp = config.moe, config.hidden_size, build.tp
        assert isinstance(spec, MoESpec)
        self.block = spec.block
        self.input_layernorm = layer_norm(config, tp)
        self.self_attn = Attention(config, index, build)
        self.post_attention_layernorm = layer_norm(config, tp)
        if spec.has_experts(index):
            shared = spec.shared_width and GatedMLP(
                replace(config, intermediate_size=spec.shared_width), build
            )
            self.add_module(self.block, MoE(hidden_size, spec, tp, shared or None))
        else:
            self.add_module(self.block, GatedMLP(config, build))

    def forward(self, x: AnyStream, step: Step, keep: torch.Tensor | None = None) -> AnyStream:
        """keep [n]: only these rows are needed after attention; but a record has the experts of all."""
        block = self.get_submodule(self.block)
        if isinstance(block, MoE) and block.record is not None:
            x = x.add(self.input_layernorm, self.self_attn, step)
            return x.add(self.post_attention_layernorm, block, step, keep)
        x = x.add(self.input_layernorm, self.self_attn, step, keep)
        return x.add(self.post_attention_layernorm, block, step)


@dataclass(frozen=True)
class MoEFamily(ModelFamily):
    """A family of mixtures of experts with Qwen's keys of config.json."""

    layer: Callable[..., Any] | None = MoELayer
    reads: tuple[str, ...] = ("num_experts",)

    def read(self, hf: HFConfig) -> ModelConfig:
        config, moe = super().read(hf), self.read_moe(hf)
        moe.check_size(config.hidden_size)
        return replace(config, moe=moe, names=self.expert_names(moe))

    def expert_names(self, moe: MoESpec) -> FileNames:
        """What files call the experts' tensors."""
        return ExpertNames(last=moe.projections[-1], spec=moe)

    def read_moe(self, hf: HFConfig) -> MoESpec:
        """ValueError for what is malformed."""
        dense = hf.get("mlp_only_layers", [])
        if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
            raise ValueError(f"config.json: mlp_only_layers must be a list of layers, not {dense!r}")
        shared = hf.get("shared_expert_intermediate_size")
        return MoESpec(
            num_experts=hf.integer("num_experts"),
            top_k=hf.integer("num_experts_per_tok"),
            width=hf.integer("moe_intermediate_size"),
            normalised=hf.boolean("norm_topk_prob"),
            shared_width=None if shared is None else hf.integer("shared_expert_intermediate_size"),
            step=hf.integer("decoder_sparse_step", 1),
            dense=frozenset(dense),
        )


QWEN3_MOE = MoEFamily(
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    kinds=lambda hf: windows(hf, lambda layer: True),
)
