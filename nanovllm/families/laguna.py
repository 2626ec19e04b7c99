"""Laguna (XS, S, M): attention with a gate, whose layers have other numbers of heads, ropes and windows; and
experts that a sigmoid and a learned correction choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from nanovllm.families.qwen3_moe import MoEFamily, MoELayer, mlp_layers
from nanovllm.formats.config_json.values import check_fixed, layer_kinds, number
from nanovllm.kernels.kinds import unknown
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.models.config import FULL, SLIDING, HFConfig, ModelConfig
from nanovllm.models.decoder import Attention, Build
from nanovllm.moe.layers import ExpertNames, MoESpec
from nanovllm.moe.sigmoid import SigmoidSpec
from nanovllm.quantization.base import Normed
from nanovllm.quantization.shards import FileNames, WeightSource

# Keys of config.json for what no released model has, and the value that is supported.
_FIXED = {
    "moe_apply_router_weight_on_input": False,
    "moe_router_use_sigmoid": True,
    "swa_attention_sink_enabled": False,
    "norm_topk_prob": True,
}


class LagunaAttention(Attention):
    """With a gate of each head, or of each element, of its result."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__(config, index, build)
        spec = config.spec(index)
        size = spec.num_heads * (spec.head_dim if spec.gate == "element" else 1)
        self.g_proj = MergedColumnParallelLinear(config.hidden_size, {"g_proj": size}, build.tp)

    def gated(self, attended: torch.Tensor, x: Normed) -> torch.Tensor:
        gate = F.softplus(self.g_proj(x).float()).to(attended.dtype)
        if self.spec.gate == "element":
            return attended * gate
        if self.spec.gate == "head":
            return (attended.unflatten(1, (-1, self.spec.head_dim)) * gate[:, :, None]).flatten(1)
        raise unknown("gate of attention", self.spec.gate)


class LagunaLayer(MoELayer):
    """With its attention."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__(config, index, build)
        self.self_attn = LagunaAttention(config, index, build)


@dataclass(frozen=True)
class LagunaNames(ExpertNames):
    """The correction stands beside the experts in files, and the shared expert has two names."""

    def parts(self, name: str, tensor: WeightSource) -> Iterable[tuple[str, WeightSource]]:
        name = name.replace(".mlp.experts.e_score", ".mlp.gate.e_score")
        return super().parts(name.replace(".mlp.shared_experts.", ".mlp.shared_expert."), tensor)


class LagunaFamily(MoEFamily):
    """Which layers have an MLP, as a list of kinds; the heads of each layer, and its gate."""

    def own_names(self, raw: dict[str, Any]) -> Mapping[str, Any]:
        return mlp_layers(raw, {"mlp_only_layers": [0]})

    def read_moe(self, hf: HFConfig) -> MoESpec:
        check_fixed(hf, _FIXED)
        plain, softcap = super().read_moe(hf), "moe_router_logit_softcapping"
        return SigmoidSpec(
            num_experts=plain.num_experts,
            top_k=plain.top_k,
            width=plain.width,
            shared_width=plain.shared_width,
            dense=plain.dense,
            step=plain.step,
            shared_gate=False,
            factor=number(hf, "moe_routed_scaling_factor"),
            softcap=number(hf, softcap) if hf.get(softcap) else 0.0,
        )

    def expert_names(self, moe: MoESpec) -> FileNames:
        return LagunaNames(prefixes={"mtp.": None}, last=moe.projections[-1], spec=moe)

    def read(self, hf: HFConfig) -> ModelConfig:
        config, gate = super().read(hf), _gate(hf)
        count, kv_heads = config.num_layers, config.num_kv_heads
        heads = hf.get("num_attention_heads_per_layer") or [config.num_heads] * count
        fits = isinstance(heads, list) and len(heads) == count
        if not fits or not all(type(each) is int and each > 0 and each % kv_heads == 0 for each in heads):
            raise ValueError(
                f"config.json: num_attention_heads_per_layer must be a multiple of the {kv_heads} KV heads "
                f"for each of {count} layers, not {heads!r}"
            )
        specs = [replace(config.spec(layer), num_heads=each, gate=gate) for layer, each in enumerate(heads)]
        return replace(config, attention=tuple(specs))


def _gate(hf: HFConfig) -> Literal["head", "element"]:
    gating = hf.get("gating")
    if gating is True or gating == "per-head":
        return "head"
    if gating == "per-element":
        return "element"
    raise ValueError(
        f"config.json: gating {gating!r} is not supported; supported: true, 'per-head', 'per-element'"
    )


LAGUNA = LagunaFamily(
    defaults={
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "norm_topk_prob": True,
        "gating": True,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    kinds=lambda hf: layer_kinds(hf, lambda layer: False),
    ropes="each",
    rotary_share=1.0,
    layer=LagunaLayer,
)
