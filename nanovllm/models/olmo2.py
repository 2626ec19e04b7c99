"""OLMo 2: no norm before a block, one after it; queries and keys are normalised over all heads."""

from __future__ import annotations

import torch

from nanovllm.layers.stream import AnyStream, NoNorm, RMSNorm, Step
from nanovllm.models.config import ModelConfig, ModelFamily
from nanovllm.models.decoder import Build, DecoderLayer
from nanovllm.models.llama import LLAMA


class Olmo2Layer(DecoderLayer):
    """Attention, then an MLP; the term of each is normalised."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__(config, index, build)
        self.input_layernorm = NoNorm(build.tp)
        self.post_feedforward_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, build.options, build.tp
        )

    def forward(self, x: AnyStream, step: Step, keep: torch.Tensor | None = None) -> AnyStream:
        none = self.input_layernorm
        x = x.add(none, self.self_attn, step, keep, after=self.post_attention_layernorm)
        return x.add(none, self.mlp, step, after=self.post_feedforward_layernorm)


OLMO2 = ModelFamily(
    defaults={**LLAMA.defaults, "vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="all",
    layer=Olmo2Layer,
)
