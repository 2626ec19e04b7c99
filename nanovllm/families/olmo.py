"""OLMo 2 and OLMo 3: norms after the blocks and none before them, and over all query and key heads."""

from __future__ import annotations

from nanovllm.families.blocks import TwoBlocks
from nanovllm.families.llama import LLAMA
from nanovllm.families.norms import NoNorm
from nanovllm.formats.config_json.values import layer_kinds
from nanovllm.models.config import ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, GatedMLP, layer_norm


class NormedAfterLayer(TwoBlocks):
    """As `DecoderLayer`, with norms only after the blocks."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        before = {"before": NoNorm(build.tp)}
        attention, mlp = Attention(config, index, build), GatedMLP(config, build)
        super().__init__(
            before | {"self_attn": attention, "post_attention_layernorm": layer_norm(config, build.tp)},
            before | {"mlp": mlp, "post_feedforward_layernorm": layer_norm(config, build.tp)},
        )


_DEFAULTS = {**LLAMA.defaults, "vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
OLMO2 = ModelFamily(
    defaults=_DEFAULTS,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="all",
    layer=NormedAfterLayer,
)
OLMO3 = ModelFamily(
    defaults={**_DEFAULTS, "rope_theta": 500000.0},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="all",
    kinds=lambda hf: layer_kinds(hf, lambda layer: (layer + 1) % 4 != 0),
    ropes="unscaled",
    layer=NormedAfterLayer,
)
