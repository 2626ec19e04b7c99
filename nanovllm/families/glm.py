"""GLM-4 dense: half of each head is rotated, in neighbouring pairs; Glm4 has norms after the blocks too."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.families.blocks import TwoBlocks
from nanovllm.formats.packed_parts import PartNames
from nanovllm.models.config import HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, GatedMLP, layer_norm


class Glm4Layer(TwoBlocks):
    """As `DecoderLayer`, with a norm after each block too."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__(
            {
                "input_layernorm": layer_norm(config, build.tp),
                "self_attn": Attention(config, index, build),
                "post_self_attn_layernorm": layer_norm(config, build.tp),
            },
            {
                "post_attention_layernorm": layer_norm(config, build.tp),
                "mlp": GatedMLP(config, build),
                "post_mlp_layernorm": layer_norm(config, build.tp),
            },
        )


class GlmFamily(ModelFamily):
    """What the packed tensor holds."""

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        size = config.intermediate_size
        return replace(config, names=PartNames({"gate_up_proj": {"gate_proj": size, "up_proj": size}}))


GLM = GlmFamily(
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
    qkv_bias="attention_bias",
    rotary_share=0.5,
    interleaved=True,
)
GLM4 = replace(GLM, layer=Glm4Layer)
