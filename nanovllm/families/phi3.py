"""Phi-3, Phi-3.5 and Phi-4: Llama with packed projections in the files, longrope and partial rotation."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.attention.rotary import RopeConfig
from nanovllm.formats.config_json.values import window_length
from nanovllm.formats.packed_parts import PartNames
from nanovllm.models.config import FULL, SLIDING, HFConfig, ModelConfig, ModelFamily


class Phi3Family(ModelFamily):
    """Rope types by their older names, and what the packed tensors hold."""

    def rope(self, hf: HFConfig, kind: str) -> RopeConfig:
        sets = hf.raw["rope_parameters"]
        if sets[kind]["rope_type"] in ("su", "yarn"):
            sets = {**sets, kind: sets[kind] | {"rope_type": "longrope"}}
        return super().rope(HFConfig({**hf.raw, "rope_parameters": sets}, hf.defaults), kind)

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        spec, size = config.spec(0), config.intermediate_size
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        packed = {
            "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
            "gate_up_proj": {"gate_proj": size, "up_proj": size},
        }
        return replace(config, names=PartNames(packed))


PHI3 = Phi3Family(
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "eos_token_id": 32000,
    },
    kinds=lambda hf: (FULL if hf.get("sliding_window") is None or window_length(hf) is None else SLIDING,),
    rotary_share=1.0,
)
