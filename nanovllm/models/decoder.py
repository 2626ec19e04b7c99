"""The one decoder that all families share, configured by ModelConfig, and its weights' checkpoint names.

Modules are named as in transformers, so a parameter's path is its checkpoint name, except in packed layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend, StepMetadata
from nanovllm.attention.rotary import RopeConfig, rope_table
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.rotary import Rotation, qk_norm_rope_store
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.stream import AnyStream, RMSNorm, Step, begin
from nanovllm.layers.weights import WeightLayer
from nanovllm.models.config import ModelConfig
from nanovllm.quantization.base import Normed, Product, WeightOptions
from nanovllm.quantization.unquantized import QuantConfig


class Build(NamedTuple):
    """What a layer needs besides the config."""

    tp: TPGroup
    backend: AttentionBackend
    rope: Callable[[RopeConfig | None, int], RotaryEmbedding]  # by settings and head_dim


class RotaryEmbedding(WeightLayer):
    """The angles of all positions up to `num_positions`, in one table for the layers with these settings."""

    cos_sin: torch.Tensor  # [num_positions, head_dim]

    def __init__(self, num_positions: int, config: RopeConfig | None, head_dim: int) -> None:
        super().__init__()
        self._table = partial(rope_table, config, head_dim, num_positions)

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        self.cos_sin = self._table().to(options.device)


class Attention(nn.Module):
    """Self-attention of one layer with this rank's heads, over its part of the KV cache.

    `cache` is empty until the owner of its memory sets it.
    """

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__()
        tp, self.eps = build.tp, config.rms_norm_eps
        whole = config.spec(index)
        self.spec = whole.of_rank(tp.size)
        heads = whole.head_dim, whole.num_heads, whole.num_kv_heads
        self.qkv_proj = QKVParallelLinear(config.hidden_size, *heads, tp, config.qkv_bias)
        size = whole.num_heads * whole.head_dim
        self.o_proj = RowParallelLinear(size, config.hidden_size, tp, config.o_bias)
        self.q_norm = RMSNorm(whole.head_dim, self.eps) if whole.qk_norm else None
        self.k_norm = RMSNorm(whole.head_dim, self.eps) if whole.qk_norm else None
        self.rotary = build.rope(whole.rope, whole.head_dim)
        self.backend = build.backend
        self.cache = KVCache(torch.empty(0), torch.empty(0))

    def forward(self, x: Normed, step: Step) -> Product:
        """x [T, hidden_size] -> a term of the stream, of the same shape.

        Stores keys and values in the step's slots before any token attends.
        """
        q, k, v = self.qkv_proj.split_heads(self.qkv_proj(x))
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        rotation = Rotation(step.positions, self.rotary.cos_sin, q_weight, k_weight, self.eps)
        q = qk_norm_rope_store(q, k, v, rotation, self.cache, step.meta.slot_mapping)
        attended = self.backend.forward(q, self.cache, step.meta, self.spec)
        product: Product = self.o_proj(attended.flatten(1))
        return product


class GatedMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), SwiGLU (Shazeer, 2020), with inner size `size`."""

    def __init__(self, hidden_size: int, size: int, tp: TPGroup, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, {"gate_proj": size, "up_proj": size}, tp, bias
        )
        self.down_proj = RowParallelLinear(size, hidden_size, tp, bias)

    def forward(self, x: Normed, step: Step) -> Product:
        """x [T, hidden_size] -> a term of the stream, of the same shape. Tokens are independent."""
        product: Product = self.down_proj(self.gate_up_proj(x, silu=True))
        return product


class DecoderLayer(nn.Module):
    """Attention, then an MLP; each has a norm before it, and adds to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__()
        tp = build.tp
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps, tp)
        self.self_attn = Attention(config, index, build)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, tp)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size, tp, config.mlp_bias)

    def forward(self, x: AnyStream, step: Step, keep: torch.Tensor | None = None) -> AnyStream:
        """keep [n]: only these rows are needed after attention."""
        x = x.add(self.input_layernorm, self.self_attn, step, keep)
        return x.add(self.post_attention_layernorm, self.mlp, step)


class DecoderModel(nn.Module):
    """Embedding, layers and final norm; `DecoderForCausalLM` runs them."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        tp, tied = build.tp, config.tie_word_embeddings
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp, tied)
        self.layers = nn.ModuleList(DecoderLayer(config, index, build) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, tp)


class DecoderForCausalLM(nn.Module):
    """A causal language model, or one rank's part of it, declared: `allocate` gives it memory, and
    `load_weights` fills its weights. Raises ValueError if it cannot be split over the group's ranks."""

    def __init__(
        self, config: ModelConfig, tp: TPGroup, backend: AttentionBackend, max_model_len: int
    ) -> None:
        super().__init__()
        config.check_tensor_parallel_size(tp.size)
        self.config = config
        rope = cache(partial(RotaryEmbedding, max_model_len + 1))
        self.model = DecoderModel(config, Build(tp, backend, rope))
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, tied_to)
        self.attention_layers: list[Attention] = [m for m in self.modules() if isinstance(m, Attention)]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, meta: StepMetadata) -> torch.Tensor:
        """input_ids [T], positions [T] -> hidden states [T, hidden_size] after the final norm; only of the
        metadata's `wanted_rows`, if it has them."""
        step = Step.of(positions, meta)
        x: AnyStream = begin(self.model.embed_tokens(input_ids), step)
        last = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            x = layer(x, step, meta.wanted_rows if index == last else None)
        hidden: torch.Tensor = self.model.norm(x).tensor()
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> logits [n, ceil(vocab_size / ranks)] of this rank's vocabulary part."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits
