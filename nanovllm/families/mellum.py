"""Mellum 2: Qwen3-MoE whose layers may have windows with another rope, and may have an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.families.qwen3_moe import QWEN3_MOE, MoEFamily, mlp_layers
from nanovllm.formats.config_json.values import layer_kinds
from nanovllm.moe.layers import ExpertNames, MoESpec
from nanovllm.quantization.shards import FileNames


class MellumFamily(MoEFamily):
    """Which layers have an MLP, as a list of kinds; layers for speculation are left out."""

    def own_names(self, raw: dict[str, Any]) -> Mapping[str, Any]:
        return mlp_layers(raw, {})

    def expert_names(self, moe: MoESpec) -> FileNames:
        return ExpertNames(prefixes={"mtp.": None}, last=moe.projections[-1], spec=moe)


MELLUM = MellumFamily(
    defaults={
        **QWEN3_MOE.defaults,
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "num_experts": 64,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    kinds=lambda hf: layer_kinds(hf, lambda layer: False),
    ropes="each",
)
