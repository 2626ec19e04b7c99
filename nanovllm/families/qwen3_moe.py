"""Qwen3-MoE: Qwen3 with experts in most layers; and the layer and the reader of all such families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from nanovllm.families.blocks import TwoBlocks
from nanovllm.families.qwen2 import windows
from nanovllm.kernels.activation import Activation
from nanovllm.models.config import HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, GatedMLP, layer_norm
from nanovllm.moe.layers import ExpertNames, MoE, MoESpec
from nanovllm.quantization.shards import FileNames


class RoutedLayer(TwoBlocks):
    """Whose second block is a mixture of experts, or in some layers an MLP."""

    def records(self, block: nn.Module) -> bool:
        return isinstance(block, MoE) and block.record is not None


class MoELayer(RoutedLayer):
    """Attention, then experts, or in some layers an MLP; each adds to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        assert isinstance(config.moe, MoESpec)
        norms = layer_norm(config, build.tp), layer_norm(config, build.tp)
        super().__init__(
            {"input_layernorm": norms[0], "self_attn": Attention(config, index, build)},
            {"post_attention_layernorm": norms[1], config.moe.block: routed(config, index, build)},
        )


def routed(config: ModelConfig, index: int, build: Build) -> nn.Module:
    """The experts of a layer, or its MLP."""
    spec = config.moe
    if not isinstance(spec, MoESpec) or not spec.has_experts(index):
        return GatedMLP(config, build)
    width = spec.shared_width
    shared = GatedMLP(replace(config, intermediate_size=width), build) if width else None
    return MoE(config.hidden_size, spec, build.tp, shared)


def mlp_layers(raw: dict[str, Any], default: dict[str, Any]) -> Mapping[str, Any]:
    """config.json whose list of kinds says which layers have an MLP. default: what is added without one."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return {**default, **raw}
    if not isinstance(kinds, list) or not all(kind in ("dense", "sparse") for kind in kinds):
        raise ValueError(f"config.json: mlp_layer_types must be 'dense' or 'sparse', not {kinds!r}")
    return {**raw, "mlp_only_layers": [layer for layer, kind in enumerate(kinds) if kind == "dense"]}


@dataclass(frozen=True)
class MoEFamily(ModelFamily):
    """A family of mixtures of experts with Qwen's keys of config.json."""

    layer: Callable[..., Any] | None = MoELayer
    reads: tuple[str, ...] = ("num_experts",)

    def read(self, hf: HFConfig) -> ModelConfig:
        config, moe = super().read(hf), self.read_moe(hf)
        if moe.activation is Activation.SILU:  # no activation of the experts' own
            moe = replace(moe, activation=config.activation)
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
