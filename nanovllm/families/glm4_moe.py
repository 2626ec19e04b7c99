"""GLM-4.5 and MiniMax M2: a sigmoid and a learned correction choose experts; heads are rotated in part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanovllm.families.qwen3_moe import MoEFamily
from nanovllm.formats.config_json.values import check_fixed, first_layers, number
from nanovllm.models.config import HFConfig, ModelConfig
from nanovllm.moe.layers import ExpertNames, MoESpec
from nanovllm.moe.sigmoid import SigmoidSpec
from nanovllm.quantization.shards import FileNames, WeightSource


class Glm4MoeFamily(MoEFamily):
    """The first layers have an MLP; a shared expert has no gate; queries and keys may have a norm.

    Layers for speculation, after the last one, are left out.
    """

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        norm: Literal["head"] | None = "head" if hf.boolean("use_qk_norm") else None
        assert isinstance(config.names, ExpertNames)
        extra = {f"model.layers.{config.num_layers}.": None, "mtp.": None}
        return replace(
            config,
            attention=tuple(replace(spec, qk_norm=norm) for spec in config.attention),
            names=replace(config.names, prefixes=extra),
        )

    def read_moe(self, hf: HFConfig) -> MoESpec:
        width = hf.integer("moe_intermediate_size")
        return SigmoidSpec(
            num_experts=hf.integer("n_routed_experts"),
            top_k=hf.integer("num_experts_per_tok"),
            width=width,
            normalised=hf.boolean("norm_topk_prob"),
            shared_width=width * hf.integer("n_shared_experts") if hf.get("n_shared_experts") else None,
            dense=first_layers(hf, "first_k_dense_replace"),
            shared="shared_experts",
            shared_gate=False,
            factor=number(hf, "routed_scaling_factor"),
            groups=hf.integer("n_group"),
            top_groups=hf.integer("topk_group"),
        )


@dataclass(frozen=True)
class _BlockNames(ExpertNames):
    """The correction stands beside the router in files."""

    def parts(self, name: str, tensor: WeightSource) -> Iterable[tuple[str, WeightSource]]:
        own = f".{self.spec.block}."
        for found, part in super().parts(name, tensor):
            yield found.replace(f"{own}e_score", f"{own}{self.spec.router}.e_score"), part


class MiniMaxM2Family(MoEFamily):
    """Experts in every layer by Mixtral's names, and a norm over all query and all key heads."""

    def own_names(self, raw: dict[str, Any]) -> Mapping[str, Any]:
        rotary, head_dim = raw.get("rotary_dim"), raw.get("head_dim", self.defaults["head_dim"])
        if isinstance(rotary, int) and isinstance(head_dim, int):
            ropes = raw["rope_parameters"].items()
            share = {"partial_rotary_factor": rotary / head_dim}
            raw = {**raw, "rope_parameters": {kind: {**share, **settings} for kind, settings in ropes}}
        return raw

    def read_moe(self, hf: HFConfig) -> MoESpec:
        check_fixed(hf, {"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True})
        return SigmoidSpec(
            num_experts=hf.integer("num_experts"),
            top_k=hf.integer("num_experts_per_tok"),
            width=hf.integer("intermediate_size"),
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        )

    def expert_names(self, moe: MoESpec) -> FileNames:
        return _BlockNames(prefixes={"mtp.": None}, last=moe.projections[-1], spec=moe)


GLM4_MOE = Glm4MoeFamily(
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    qkv_bias="attention_bias",
    rotary_share=0.5,
    reads=("n_routed_experts", "use_qk_norm"),
)
MINIMAX_M2 = MiniMaxM2Family(
    defaults={
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "eos_token_id": 200020,
    },
    qk_norm="all",
    rotary_share=1.0,
    reads=("num_experts", "use_qk_norm"),
)
