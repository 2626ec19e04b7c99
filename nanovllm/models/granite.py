"""Granite 3 and 4, dense: Llama with a multiplier of embeddings, of each block, of scores and of logits."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.models.config import ModelConfig, ModelFamily
from nanovllm.models.hf_config import HFConfig, number
from nanovllm.models.llama import LLAMA


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


GRANITE = GraniteFamily(
    defaults=LLAMA.defaults,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    reads=("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
)
