"""The one decoder that all families share, driven by ModelConfig, and its weights' names in checkpoints.

Modules are named as in transformers, so that a parameter's path is its checkpoint name but for packed layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.distributed.copied_rows import PendingSum
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.matmul import is_aligned
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.weights import ShardId, WeightLayer, WeightShard
from nanovllm.models.config import ModelConfig

# Packed layers: what each of their shards is called in a checkpoint.
PACKED: dict[str, dict[ShardId, str]] = {
    "qkv_proj": {"q": "q_proj", "k": "k_proj", "v": "v_proj"},
    "gate_up_proj": {0: "gate_proj", 1: "up_proj"},
}


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The layer that takes one checkpoint tensor, and as which of its shards."""

    layer: WeightLayer
    shard: WeightShard


class DecoderAttention(nn.Module):
    """Self-attention of one layer with this rank's heads, up to what o_proj takes."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TPGroup,
        backend: AttentionBackend,
        rotary: RotaryEmbedding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        hidden_size, head_dim = config.hidden_size, config.head_dim
        heads = (config.num_heads, config.num_kv_heads)
        self.qkv_proj = QKVParallelLinear(
            hidden_size, head_dim, *heads, tp, config.qkv_bias, dtype=dtype, device=device
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * head_dim,
            hidden_size,
            tp,
            config.o_bias,
            reduce_results=False,
            dtype=dtype,
            device=device,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype=dtype, device=device)
        self.eps = config.rms_norm_eps
        self.rotary = rotary
        self.attn = Attention(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, backend)

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor | PendingSum,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        meta: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the attention of norm(x + residual), [T, own heads * head_dim]; x + residual)."""
        qkv, residual, stream = self.qkv_proj.after_norm(norm, x, residual)
        q, k, v = qkv.split(self.qkv_proj.output_sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.attn.head_dim)) for part in (q, k, v))  # [T, heads, head_dim]
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        cache = self.attn
        q = self.rotary(
            positions,
            q,
            k,
            v,
            cache.k_cache,
            cache.v_cache,
            meta.slot_mapping,
            q_weight,
            k_weight,
            self.eps,
            cache.k_scale,
            cache.v_scale,
            stream,
        )
        return self.attn(q, meta).flatten(1), residual


class DecoderMLP(nn.Module):
    """The SwiGLU feed-forward part of one layer, up to what down_proj takes."""

    def __init__(self, config: ModelConfig, tp: TPGroup, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden_size, size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [size, size], tp, config.mlp_bias, dtype=dtype, device=device
        )
        self.down_proj = RowParallelLinear(
            size, hidden_size, tp, config.mlp_bias, reduce_results=False, dtype=dtype, device=device
        )

    def forward(
        self, norm: RMSNorm, x: torch.Tensor | PendingSum, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the gated activations for norm(x + residual), [T, own size]; x + residual)."""
        gated, residual, _ = self.gate_up_proj.after_norm(norm, x, residual, silu=True)
        return gated, residual


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm that also sums over the ranks and adds the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TPGroup,
        backend: AttentionBackend,
        rotary: RotaryEmbedding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps, tp, dtype=dtype, device=device)
        self.self_attn = DecoderAttention(config, tp, backend, rotary, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, tp, dtype=dtype, device=device)
        self.mlp = DecoderMLP(config, tp, dtype=dtype, device=device)

    def forward(
        self,
        positions: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: AttentionMetadata,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x is this rank's part of what the last layer adds to `residual`, the sum up to it; [T, hidden].

        Without a residual x is the whole sum. With `rows` they alone are returned, all having been attended.
        """
        attended, residual = self.self_attn(self.input_layernorm, x, residual, positions, meta)
        return self.after_attention(attended, residual, rows)

    def after_attention(
        self, attended: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rest of `forward`, from what the heads attended to on."""
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        x, total = self.self_attn.o_proj.add_to(residual, attended)
        gated, residual = self.mlp(self.post_attention_layernorm, x, total)
        return self.mlp.down_proj.add_to(residual, gated)


class DecoderModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TPGroup,
        backend: AttentionBackend,
        rotary: RotaryEmbedding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, tp, reduce_results=False, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, tp, backend, rotary, dtype=dtype, device=device)
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, tp, dtype=dtype, device=device)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        if meta.halves is not None:
            return self._forward_halves(input_ids, positions, meta.halves, meta.wanted_rows)
        x, residual = self.embed_tokens(input_ids), None
        last = self.layers[-1]
        for layer in self.layers:
            x, residual = layer(positions, x, residual, meta, meta.wanted_rows if layer is last else None)
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return hidden

    def _forward_halves(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        halves: tuple[AttentionMetadata, AttentionMetadata],
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `forward`, with the sums over the ranks of one half of the tokens behind the other's products.

        Two micro-batches in turn, as in DeepSeek-V3's prefill and SGLang's two-batch overlap. What the second
        half reads of the first one's K/V is stored by then, layer by layer.
        """

        def advance(x: torch.Tensor | PendingSum) -> None:
            if isinstance(x, PendingSum):
                x.advance()

        lens = [len(meta.slot_mapping) for meta in halves]
        places = list(zip(positions.split(lens), halves, strict=True))
        xs: list[torch.Tensor | PendingSum] = [self.embed_tokens(ids) for ids in input_ids.split(lens)]
        last = self.layers[-1]
        for layer, following in pairwise(self.layers):
            assert isinstance(layer, DecoderLayer) and isinstance(following, DecoderLayer)
            for half, (at, meta) in enumerate(places):
                attended, residual = layer.self_attn(layer.input_layernorm, xs[half], None, at, meta)
                advance(xs[1 - half])
                xs[half] = layer.post_attention_layernorm.start(layer.self_attn.o_proj(attended), residual)
            for half in range(2):
                gated, residual = layer.mlp(layer.post_attention_layernorm, xs[half], None)
                advance(xs[1 - half])
                part = layer.mlp.down_proj(gated)
                xs[half] = following.input_layernorm.start(part, residual, whole=following is last)
        assert isinstance(last, DecoderLayer)
        parts = []
        for half, (at, meta) in enumerate(places):
            parts.append(last.self_attn(last.input_layernorm, xs[half], None, at, meta))
            advance(xs[1 - half])
        attended, residual = (torch.cat(both) for both in zip(*parts, strict=True))
        hidden: torch.Tensor = self.norm(*last.after_attention(attended, residual, rows))[0]
        return hidden


class DecoderForCausalLM(nn.Module):
    """A causal language model, or one rank's part of it. The loader must fill its weights before use.

    With `deterministic`, what a token gets does not depend on what else is in the step, to the last bit, as
    far as `backend` keeps that. Raises ValueError when the model cannot be split over the group's ranks, or
    not be deterministic for its weights' sizes.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TPGroup,
        backend: AttentionBackend,
        max_model_len: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        config.check_tensor_parallel_size(tp.size)
        self.config = config
        rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len + 1, device)
        self.model = DecoderModel(config, tp, backend, rotary, dtype=dtype, device=device)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, tp, tied_to, dtype=dtype, device=device
        )
        for path, layer in self.named_modules():
            if isinstance(layer, WeightLayer):
                layer.deterministic = deterministic
                weight = layer.get_parameter("weight")
                if deterministic and weight.dim() == 2 and not is_aligned(weight):
                    raise ValueError(
                        f"deterministic=True needs weights whose rows are multiples of 16 bytes; those of "
                        f"{path} are {weight.shape[1]} numbers of {dtype}"
                    )
        self.attention_layers: list[Attention] = [m for m in self.modules() if isinstance(m, Attention)]

    def fuse_norms(self) -> None:
        """Spare the layers' norms: weights go into the products after them, which are divided afterwards.

        And the products before them add to the residual stream themselves. The same but for rounding; for one
        rank. Not for float16, which can hold a normalised row's product where it cannot hold the row's own.
        """
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            attention, mlp = layer.self_attn, layer.mlp
            for norm, linear in (
                (layer.input_layernorm, attention.qkv_proj),
                (layer.post_attention_layernorm, mlp.gate_up_proj),
            ):
                if linear.bias is None:
                    linear.take_norm(norm)
            for output in (attention.o_proj, mlp.down_proj):
                output.adds = output.bias is None

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        """input_ids [T], positions [T] -> hidden states [T, hidden_size] after the final norm; of the
        metadata's wanted rows only, where it names any."""
        hidden: torch.Tensor = self.model(input_ids, positions, meta)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden [n, hidden_size] -> logits [n, vocab_size] on rank 0, None on the others."""
        logits: torch.Tensor | None = self.lm_head(hidden)
        return logits

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return every tensor that a checkpoint of this model must hold, by its name there."""
        slots = {}
        for path, layer in self.named_modules():
            if not isinstance(layer, WeightLayer):
                continue
            parent, _, last = path.rpartition(".")
            for shard in layer.weight_shards():
                module = last if shard.shard_id is None else PACKED[last][shard.shard_id]
                slots[".".join(filter(None, (parent, module, shard.param)))] = WeightSlot(layer, shard)
        return slots
