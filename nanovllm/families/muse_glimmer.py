"""Muse Glimmer (text): embeddings with a norm, attention with a gate and norms without weights, norms around
each block, and no rope in the layers without a window.

Of the model, which reads images, only the decoder is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nanovllm.families.blocks import LayersOf, TwoBlocks, decoder_prefixes
from nanovllm.families.gemma import GemmaFamily
from nanovllm.formats.config_json.values import fraction, layer_kinds, number
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.layers.stream import RMSNorm
from nanovllm.models.config import HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, GatedMLP
from nanovllm.quantization.base import Normed
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import FileNames, PackedRows, WeightOptions, WeightSource

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class _NormedRows:
    """The rows of a file's embedding in float32, each divided by its root mean square."""

    def __init__(self, source: Any, eps: float) -> None:
        self._source, self._eps = source, eps

    def get_shape(self) -> list[int]:
        shape: list[int] = self._source.get_shape()
        return shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """index: of rows; all columns."""
        return _normed(self._source[index], self._eps)


def _normed(rows: torch.Tensor, eps: float) -> torch.Tensor:
    wide = rows.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()


@dataclass(frozen=True)
class MuseNames(FileNames):
    """An embedding is stored with its norm applied: a row's norm does not depend on the text."""

    eps: float = field(kw_only=True)
    tied: bool = field(kw_only=True)  # the embedding is the LM head too, without the norm

    def tensors(
        self, full_name: str, tensor: WeightSource, packed_rows: PackedRows
    ) -> Iterator[tuple[str, WeightSource]]:
        for name, each in super().tensors(full_name, tensor, packed_rows):
            if name != _EMBEDDING:
                yield name, each
                continue
            if self.tied:
                yield _HEAD, each
            if isinstance(each, torch.Tensor):
                yield name, _normed(each, self.eps)
            else:
                yield name, _NormedRows(each, self.eps)


class _HeadNorm(RMSNorm):
    """Of a query or a key, without a weight."""

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        self.options = options
        self.weight = torch.ones(self._declared[0][0], dtype=options.dtype, device=options.device)


class MuseAttention(Attention):
    """With a gate of each element of its result."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__(config, index, build)
        spec = config.spec(index)
        self.q_norm, self.k_norm = (_HeadNorm(spec.head_dim, config.rms_norm_eps) for _ in range(2))
        size = {"gate_proj": spec.num_heads * spec.head_dim}
        self.gate_proj = MergedColumnParallelLinear(config.hidden_size, size, build.tp)

    def gated(self, attended: torch.Tensor, x: Normed) -> torch.Tensor:
        return attended * torch.sigmoid(self.gate_proj(x))


class MuseLayer(TwoBlocks):
    """Norms before and after each block, with weights 1 + w, which the final norm has not."""

    def __init__(self, config: ModelConfig, index: int, build: Build, layers: LayersOf) -> None:
        """The setting of `layers` is epsilon of the norms after the blocks."""

        def norm(eps: float) -> RMSNorm:
            return RMSNorm(config.hidden_size, eps, build.tp, offset=1.0)

        super().__init__(
            {
                "input_layernorm": norm(config.rms_norm_eps),
                "self_attn": MuseAttention(config, index, build),
                "post_attention_layernorm": norm(layers.setting),
            },
            {
                "pre_feedforward_layernorm": norm(config.rms_norm_eps),
                "mlp": GatedMLP(config, build),
                "post_feedforward_layernorm": norm(layers.setting),
            },
        )


class MuseFamily(ModelFamily):
    """Factors of queries and logits, and which layers have a rope."""

    text_config = GemmaFamily.text_config  # type: ignore[assignment]

    def read(self, hf: HFConfig) -> ModelConfig:
        config, factor, softcap = super().read(hf), number(hf, "qk_scale_factor"), "final_logit_softcapping"
        specs = []
        for layer, theta in enumerate(_thetas(hf, config)):
            spec = config.spec(layer)
            spec = replace(spec, scale=factor * spec.head_dim**-0.5, gate="element")
            specs.append(spec if theta else replace(spec, rope=None))
        tied = config.tie_word_embeddings
        prefixes = decoder_prefixes(("vision_tower.", "vision_adapter.", "vision_projection."))
        return replace(
            config,
            attention=tuple(specs),
            tie_word_embeddings=False,
            logit_multiplier=number(hf, "output_multiplier"),
            logit_softcap=number(hf, softcap) if hf.get(softcap) else None,
            layer=LayersOf(MuseLayer, fraction(hf, "post_norm_eps")),
            names=MuseNames(prefixes=prefixes, eps=config.rms_norm_eps, tied=tied),
        )


def _thetas(hf: HFConfig, config: ModelConfig) -> list[float]:
    """By layer theta of its rope, 0: it has none. ValueError unless all others are rope_theta."""
    count, rope = config.num_layers, config.spec(0).rope
    assert rope is not None
    thetas = hf.get("layer_rope_theta")
    if thetas is None:
        return [0.0 if _is_full(layer, count) else rope.theta for layer in range(count)]
    if (
        not isinstance(thetas, list)
        or len(thetas) != count
        or any(each not in (0, rope.theta) for each in thetas)
    ):
        raise ValueError(
            f"config.json: layer_rope_theta must be 0 or rope_theta, {rope.theta}, for each of {count} "
            f"layers, not {thetas!r}"
        )
    return thetas


def _is_full(layer: int, count: int) -> bool:
    """Without layer_types every fourth layer has no window, counted from the last one."""
    return (count - 1 - layer) % 4 == 0


MUSE_GLIMMER = MuseFamily(
    defaults={
        "vocab_size": 202048,
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_activation": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "eos_token_id": 200001,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    kinds=lambda hf: layer_kinds(hf, lambda layer: not _is_full(layer, hf.integer("num_hidden_layers"))),
    reads=("final_logit_softcapping",),
)
