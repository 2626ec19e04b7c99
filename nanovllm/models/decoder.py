"""The one decoder that all families share, configured by ModelConfig, and its weights' checkpoint names.

Modules are named as in transformers, so a parameter's path is its checkpoint name, except in packed layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.attention.backends import AttentionBackend
from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.rotary import RopeConfig, rope_table
from nanovllm.doors import HEADS_NORM, find
from nanovllm.kernels.copy_cells import copy_cells
from nanovllm.kernels.kinds import unknown
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.rotary import Rotation, q_norm_rope_reference, qk_norm_rope_store
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from nanovllm.layers.stream import AnyStream, Group, RMSNorm, Step
from nanovllm.layers.weights import WeightLayer
from nanovllm.models.config import ModelConfig
from nanovllm.quantization.base import Normed, Product
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard


class Build(NamedTuple):
    """What a layer needs besides the config."""

    tp: Group
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


class Attention(WeightLayer):
    """Self-attention of one layer with this rank's heads, as its `AttentionSpec` says.

    `cache`, its part of the KV cache, is empty until the owner of the memory sets it.
    """

    sinks: torch.Tensor | None  # [num_heads]

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__()
        spec, hidden_size, eps = config.spec(index), config.hidden_size, config.rms_norm_eps
        tp, head_dim = build.tp, spec.head_dim
        size = spec.num_heads * head_dim
        self.spec, self.eps, self.backend = spec.of_rank(tp.size), eps, build.backend
        self.rotary = build.rope(spec.rope, head_dim)
        turned = 0 if spec.rope is None else spec.rope.rotary_dim(head_dim) % head_dim
        interleaved = spec.rope is not None and spec.rope.interleaved
        self._turn = partial(Rotation, eps=eps, rotary=turned, interleaved=interleaved, v_norm=spec.v_norm)
        self.group = 0  # its `KVGroup`; the cache's owner sets it
        self.cache = KVCache(torch.empty(0), torch.empty(0))
        if spec.kv_from is None:
            heads, kv, bias = spec.num_heads, spec.num_kv_heads, config.qkv_bias
            self.qkv_proj = QKVParallelLinear(hidden_size, head_dim, heads, kv, tp, bias, not spec.v_from_k)
        else:
            self.q_proj = MergedColumnParallelLinear(hidden_size, {"q_proj": size}, tp, config.qkv_bias)
        multiplier = config.residual_multiplier
        self.o_proj = RowParallelLinear(size, hidden_size, tp, config.o_bias, multiplier)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if spec.qk_norm == "all":
            self.q_norm = find(HEADS_NORM)(spec.num_heads, head_dim, eps, tp)
            if spec.kv_from is None:
                self.k_norm = find(HEADS_NORM)(spec.num_kv_heads, head_dim, eps, tp)
        elif spec.qk_norm == "head":
            self.q_norm = RMSNorm(head_dim, eps, offset=config.norm_offset)
            if spec.kv_from is None:
                self.k_norm = RMSNorm(head_dim, eps, offset=config.norm_offset)
        elif spec.qk_norm is not None:
            raise unknown("q/k norm", spec.qk_norm)
        self.register_parameter("sinks", None)
        if spec.sinks:
            own = self.spec.num_heads
            shard = WeightShard("sinks", None, (spec.num_heads,), 0, tp.rank * own, own, 0)
            self.declare((own,), [shard])

    def project(self, x: Normed, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] -> q, k, v [T, heads, head_dim], before norm and rope."""
        q, k, *values = self.qkv_proj.split_heads(self.qkv_proj(x))
        return q, k, values[0] if values else k

    def forward(self, x: Normed, step: Step) -> Product:
        """x [T, hidden_size] -> a term of the stream, of the same shape.

        Stores keys and values in the step's slots, and copies cached ones, before any token attends.
        """
        spec = self.spec
        meta = step.meta.of_group(self.group)
        q_weight, k_weight = (
            x.weight if isinstance(x, RMSNorm) else None for x in (self.q_norm, self.k_norm)
        )
        if spec.kv_from is None:
            q, k, v = self.project(x, step)
        else:
            q = k = v = self.q_proj(x).unflatten(-1, (-1, spec.head_dim))
        if spec.qk_norm == "all":
            q = self.q_norm(q) if self.q_norm is not None else q
            k = self.k_norm(k) if self.k_norm is not None else k
        rotation = self._turn(step.positions, self.rotary.cos_sin, q_weight, k_weight)
        if spec.kv_from is None:
            q = qk_norm_rope_store(q, k, v, rotation, self.cache, meta.slot_mapping)
            self.copy_cells(meta)
        else:
            q = q_norm_rope_reference(q, rotation)
        attended = self.backend.forward(q, self.cache, meta, spec, self.sinks)
        product: Product = self.o_proj(self.gated(attended.flatten(1), x))
        return product

    def gated(self, attended: torch.Tensor, x: Normed) -> torch.Tensor:
        """What the last product takes of what was attended, [T, heads * head_dim]; a family may change it."""
        return attended

    def copy_cells(self, meta: AttentionMetadata) -> None:
        """Copy cached keys and values of earlier steps, or of this one, for the layers of a group."""
        if meta.copies is not None:
            copy_cells(*self.cache[:2], meta.copies, meta.longest_copy)


class GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)): with SiLU it is SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        tp, hidden_size, size, bias = build.tp, config.hidden_size, config.intermediate_size, config.mlp_bias
        sizes = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, sizes, tp, bias)
        self.down_proj = RowParallelLinear(size, hidden_size, tp, bias, config.residual_multiplier)
        self.activation = config.activation

    def forward(self, x: Normed, step: Step) -> Product:
        """x [T, hidden_size] -> a term of the stream, of the same shape. Tokens are independent."""
        product: Product = self.down_proj(self.gate_up_proj(x, self.activation))
        return product


def layer_norm(config: ModelConfig, tp: Group) -> RMSNorm:
    """A norm of the residual stream, or of what a block adds to it."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, tp, config.norm_offset)


class DecoderLayer(nn.Module):
    """Attention, then an MLP; each has a norm before it, and adds to the residual stream.

    A family with another layer names its own class in `ModelFamily.layer`, with the same arguments.
    """

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__()
        self.input_layernorm = layer_norm(config, build.tp)
        self.self_attn = Attention(config, index, build)
        self.post_attention_layernorm = layer_norm(config, build.tp)
        self.mlp = GatedMLP(config, build)

    def forward(self, x: AnyStream, step: Step, keep: torch.Tensor | None = None) -> AnyStream:
        """keep [n]: only these rows are needed after attention."""
        x = x.add(self.input_layernorm, self.self_attn, step, keep)
        return x.add(self.post_attention_layernorm, self.mlp, step)


class DecoderModel(nn.Module):
    """Embedding, layers and final norm; `DecoderForCausalLM` runs them."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        tp, tied, layer = build.tp, config.ties_head, config.layer or DecoderLayer
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp, tied)
        self.layers = nn.ModuleList(layer(config, index, build) for index in range(config.num_layers))
        self.norm = layer_norm(config, tp)
        self.layer_inputs = None if config.layer_inputs is None else config.layer_inputs(config, build)


class DecoderForCausalLM(nn.Module):
    """A causal language model, or one rank's part of it, declared: `allocate` gives it memory, and
    `load_weights` fills its weights. Raises ValueError if it cannot be split over the group's ranks."""

    def __init__(self, config: ModelConfig, tp: Group, backend: AttentionBackend, max_model_len: int) -> None:
        super().__init__()
        config.check_tensor_parallel_size(tp.size)
        self.config, self.tp = config, tp
        rope = cache(partial(RotaryEmbedding, max_model_len + 1))
        self.model = DecoderModel(config, Build(tp, backend, rope))
        tied_to = self.model.embed_tokens if config.ties_head else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, tied_to)
        self.score = None if config.head is None else config.head.layer(config.hidden_size)
        self.attention_layers: list[Attention] = [m for m in self.modules() if isinstance(m, Attention)]
        self.state_layers: list[Any] = [m for m in self.modules() if hasattr(m, "allocate_states")]

    def forward(self, ids: torch.Tensor, step: Step, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """ids [T] -> hidden states [T, hidden_size] after the final norm; only of the rows `wanted`, if
        given. step: without layer inputs."""
        return self.leave(*self.enter(ids, step), wanted)

    def enter(self, input_ids: torch.Tensor, step: Step) -> tuple[AnyStream, Step]:
        """The first part of `forward`: all layers but the last. Returns the step with its layer inputs."""
        embedded = self.model.embed_tokens(input_ids)
        if self.config.embedding_multiplier != 1.0:  # rounded as the embedding is
            embedded = embedded * torch.tensor(self.config.embedding_multiplier, dtype=embedded.dtype).item()
        if self.model.layer_inputs is not None:
            step = step._replace(layer_inputs=self.model.layer_inputs(input_ids, embedded))
        x = self.tp.begin(embedded, step)
        for layer in self.model.layers[:-1]:
            x = layer(x, step)
        return x, step

    def leave(self, x: AnyStream, step: Step, wanted: torch.Tensor | None) -> torch.Tensor:
        """The second part of `forward`: the last layer, of the rows that are wanted, and the final norm."""
        x = self.model.layers[-1](x, step, wanted)
        hidden: torch.Tensor = self.model.norm(x).tensor()
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> logits [n, ceil(vocab_size / ranks)] of this rank's vocabulary part."""
        logits: torch.Tensor = self.lm_head(hidden)
        multiplier, softcap = self.config.logit_multiplier, self.config.logit_softcap
        if multiplier != 1.0:
            logits.mul_(multiplier)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits
