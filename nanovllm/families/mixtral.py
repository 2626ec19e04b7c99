"""Mixtral: Mistral with experts in every layer, under names of their own."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.families.mistral import MISTRAL
from nanovllm.families.qwen3_moe import MoEFamily
from nanovllm.models.config import FULL, SLIDING, HFConfig
from nanovllm.moe.layers import MoESpec


@dataclass(frozen=True)
class _Mixtral(MoEFamily):
    def read_moe(self, hf: HFConfig) -> MoESpec:
        return MoESpec(
            num_experts=hf.integer("num_experts"),
            top_k=hf.integer("num_experts_per_tok"),
            width=hf.integer("intermediate_size"),
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        )


MIXTRAL = _Mixtral(
    defaults={
        **MISTRAL.defaults,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_experts": 8,
    },
    kinds=lambda hf: (FULL if hf.get("sliding_window") is None else SLIDING,),
)
