"""The one decoder that all families share, configured by ModelConfig, and its weights' checkpoint names.

Modules are named as in transformers, so a parameter's path is its checkpoint name, except in packed layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend, StepMetadata
from nanovllm.distributed.group import TPGroup
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import QKVParallelLinear, RowParallelLinear
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.stream import AnyStream, RMSNorm, Step, begin
from nanovllm.models.config import ModelConfig
from nanovllm.quantization.base import Normed, Product


class Build(NamedTuple):
    """What a layer needs besides the config."""

    tp: TPGroup
    backend: AttentionBackend
    rotary: RotaryEmbedding


class DecoderAttention(nn.Module):
    """Self-attention of one layer with this rank's heads."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        tp = build.tp
        hidden_size, head_dim, self.eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        heads = (config.num_heads, config.num_kv_heads)
        self.qkv_proj = QKVParallelLinear(hidden_size, head_dim, *heads, tp, config.qkv_bias)
        self.o_proj = RowParallelLinear(config.num_heads * head_dim, hidden_size, tp, config.o_bias)
        self.q_norm = RMSNorm(head_dim, self.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, self.eps) if config.qk_norm else None
        self.rotary = build.rotary
        self.attn = Attention(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, build.backend)

    def forward(self, x: Normed, step: Step) -> Product:
        """x [T, hidden_size] -> a term of the stream, of the same shape."""
        q, k, v = self.qkv_proj.split_heads(self.qkv_proj(x))
        rotation = self.rotary(step.positions, self.q_norm, self.k_norm, self.eps)
        product: Product = self.o_proj(self.attn(q, k, v, rotation, step.meta).flatten(1))
        return product


class DecoderLayer(nn.Module):
    """Attention, then an MLP; each has a norm before it, and adds to the residual stream."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        tp = build.tp
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps, tp)
        self.self_attn = DecoderAttention(config, build)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, tp)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size, tp, config.mlp_bias)

    def forward(self, x: AnyStream, step: Step, keep: torch.Tensor | None = None) -> AnyStream:
        """keep [n]: only these rows are needed after attention."""
        x = x.add(self.input_layernorm, self.self_attn, step, keep)
        return x.add(self.post_attention_layernorm, self.mlp, step)


class DecoderModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        tp, tied = build.tp, config.tie_word_embeddings
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp, tied)
        self.layers = nn.ModuleList(DecoderLayer(config, build) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, tp)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, meta: StepMetadata) -> torch.Tensor:
        step = Step.of(positions, meta)
        x: AnyStream = begin(self.embed_tokens(input_ids), step)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer(x, step, meta.wanted_rows if index == last else None)
        hidden: torch.Tensor = self.norm(x).tensor()
        return hidden


class DecoderForCausalLM(nn.Module):
    """A causal language model, or one rank's part of it, declared: `allocate` gives it memory, and
    `load_weights` fills its weights. Raises ValueError if it cannot be split over the group's ranks."""

    def __init__(
        self, config: ModelConfig, tp: TPGroup, backend: AttentionBackend, max_model_len: int
    ) -> None:
        super().__init__()
        config.check_tensor_parallel_size(tp.size)
        self.config = config
        rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len + 1)
        self.model = DecoderModel(config, Build(tp, backend, rotary))
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, tied_to)
        self.attention_layers: list[Attention] = [m for m in self.modules() if isinstance(m, Attention)]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, meta: StepMetadata) -> torch.Tensor:
        """input_ids [T], positions [T] -> hidden states [T, hidden_size] after the final norm; only of the
        metadata's `wanted_rows`, if it has them."""
        hidden: torch.Tensor = self.model(input_ids, positions, meta)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> logits [n, ceil(vocab_size / ranks)] of this rank's vocabulary part."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits
