"""Gemma 4 (text): layers with and without a window have other heads and other ropes, and values have a norm.

The layers without a window may take their values from the keys' projection. In the small models the last
layers read keys and values of earlier ones, and each layer gets an input of its own for each token. Of a
model that reads images or sound only the decoder is read. `gemma4_experts.py` has the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nanovllm.attention.rotary import AttentionSpec, RopeConfig
from nanovllm.families.blocks import decoder_prefixes
from nanovllm.families.gemma import GemmaFamily
from nanovllm.families.gemma4_experts import Gemma4Spec, MLPBesideExperts
from nanovllm.families.kernels.joined_norms import added_norm
from nanovllm.families.norms import NoNorm
from nanovllm.formats.config_json.values import layer_kinds, number, rope_config
from nanovllm.kernels.activation import Activation
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from nanovllm.layers.stream import AnyStream, RMSNorm, Step, Stream
from nanovllm.layers.weights import WeightLayer
from nanovllm.models.config import FULL, SLIDING, HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, GatedMLP, layer_norm
from nanovllm.moe.layers import ExpertNames
from nanovllm.moe.replicated import ReplicatedLinear
from nanovllm.quantization.base import Normed, Product
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import FileNames, WeightOptions, WeightShard

# Where files have the decoder; those of a decoder alone have it at the top.
_IN_WHOLE = ("model.language_model.", "model.", "language_model.model.", "")


class _AfterNorm(RMSNorm):
    """The norm after a block. That of the last one then multiplies the stream by the layer's scalar."""

    scalar: tuple[torch.Tensor, ...] = ()  # of one element; in a tuple, so that it is no parameter of this
    whole = False  # the block's term is no part of a sum over the ranks

    def added(self, term: torch.Tensor, total: torch.Tensor) -> Stream:
        if self.scalar and (self.whole or self.tp.size == 1):
            return Stream(added_norm(term, total, self.weight, self.scalar[0], self.eps), summed=True)
        normed = self(Stream(term, summed=self.whole)).tensor()
        if not self.scalar:
            return Stream(normed, total, summed=True)
        return Stream((total + normed) * self.scalar[0], summed=True)


@dataclass(frozen=True)
class LayerInputs:
    """How layers get inputs of their own; makes the module that computes them."""

    size: int  # elements of a layer's input for a token
    vocab_size: int

    def __call__(self, config: ModelConfig, build: Build) -> nn.Module:
        return _LayerInputs(config, build, self)


class _LayerInputs(nn.Module):
    """The inputs of all layers, from a token's id and from its embedding."""

    def __init__(self, config: ModelConfig, build: Build, sizes: LayerInputs) -> None:
        super().__init__()
        total = config.num_layers * sizes.size
        self._tp, self._shape = build.tp, (config.num_layers, sizes.size)
        self._scales = sizes.size**0.5, config.hidden_size**-0.5, 2.0**-0.5
        self.embed_tokens_per_layer = VocabParallelEmbedding(sizes.vocab_size, total, build.tp)
        self.per_layer_model_projection = ReplicatedLinear(config.hidden_size, total)
        self.per_layer_projection_norm = RMSNorm(sizes.size, config.rms_norm_eps)

    def forward(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """token_ids [T], embedded [T, hidden_size], this rank's part of a sum -> [T, layers, size]."""
        own, projected, both = self._scales
        if self._tp.size > 1:
            embedded = self._tp.all_reduce(embedded.clone())
        of_id = self._tp.all_reduce(self.embed_tokens_per_layer(token_ids))
        of_id = of_id * torch.tensor(own, dtype=of_id.dtype).item()  # rounded as the embedding is
        context = (self.per_layer_model_projection(embedded) * projected).unflatten(-1, self._shape)
        norm = self.per_layer_projection_norm
        context = rms_norm(context, norm.weight, norm.eps)
        return (context + of_id.unflatten(-1, self._shape)) * both


@dataclass(frozen=True)
class Layers:
    """How all layers are made."""

    input_size: int = 0  # of each layer's own input; 0: there is none
    wide: bool = False  # layers without keys and values of their own have an MLP of twice the size

    def __call__(self, config: ModelConfig, index: int, build: Build) -> nn.Module:
        if self.wide and config.spec(index).kv_from is not None:
            config = replace(config, intermediate_size=2 * config.intermediate_size)
        return Gemma4Layer(config, index, build, self.input_size)


class Gemma4Layer(WeightLayer):
    """As `GemmaLayer`, with experts beside the MLP, if there are any, and a third block that adds the layer's
    own input, if it has one; a scalar multiplies the result."""

    layer_scalar: torch.Tensor  # [1]

    def __init__(self, config: ModelConfig, index: int, build: Build, input_size: int) -> None:
        super().__init__()
        self.index, self._input_size, tp = index, input_size, build.tp
        self.input_layernorm = layer_norm(config, tp)
        self.self_attn = Attention(config, index, build)
        self.post_attention_layernorm = layer_norm(config, tp)
        self.pre_feedforward_layernorm = layer_norm(config, tp)
        beside = None if config.moe is None else MLPBesideExperts(config, build)
        for name, module in () if beside is None else beside.named_children():  # by the files' names
            self.add_module(name, module)
        if beside is None:
            self.mlp = GatedMLP(config, build)
        self._block = [beside or self.mlp]  # in a list, so that it has no name
        self.post_feedforward_layernorm = last = _AfterNorm(config.hidden_size, config.rms_norm_eps, tp)
        last.whole = beside is not None
        if input_size:
            self.before = NoNorm(tp)
            gate = {"per_layer_input_gate": input_size}
            self.per_layer_input_gate = MergedColumnParallelLinear(config.hidden_size, gate, tp)
            self.per_layer_projection = RowParallelLinear(input_size, config.hidden_size, tp)
            self.post_per_layer_input_norm = _AfterNorm(config.hidden_size, config.rms_norm_eps, tp)
            self._activation, own = config.activation, input_size // tp.size
            self._columns = slice(tp.rank * own, tp.rank * own + own)
        self.declare((1,), [WeightShard.whole("layer_scalar", (1,), dummy=1.0)])

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, quant)
        last = self.post_per_layer_input_norm if self._input_size else self.post_feedforward_layernorm
        last.scalar = (self.layer_scalar,)

    @property
    def block(self) -> MLPBesideExperts | GatedMLP:
        """The second block."""
        return self._block[0]

    def forward(self, x: AnyStream, step: Step, keep: torch.Tensor | None = None) -> AnyStream:
        """keep [n]: only these rows are needed after attention; but a record has the experts of all."""
        recorded = isinstance(self.block, MLPBesideExperts) and self.block.record is not None
        first, second = (None, keep) if recorded else (keep, None)
        x = x.add(self.input_layernorm, self.self_attn, step, first, self.post_attention_layernorm)
        after = self.post_feedforward_layernorm
        x = x.add(self.pre_feedforward_layernorm, self.block, step, second, after)
        if not self._input_size:
            return x
        if keep is not None and step.layer_inputs is not None:
            step = step._replace(layer_inputs=step.layer_inputs[keep])
        return x.add(self.before, self._own_input, step, None, self.post_per_layer_input_norm)

    def _own_input(self, x: Normed, step: Step) -> Product:
        """x [T, hidden_size] -> a term of the stream, of the same shape."""
        assert step.layer_inputs is not None
        gate = self.per_layer_input_gate(x)
        both = torch.cat([gate, step.layer_inputs[:, self.index, self._columns]], dim=-1)
        product: Product = self.per_layer_projection(self._activation.and_mul(both))
        return product


class Gemma4Family(ModelFamily):
    """The heads and ropes of both kinds of layers, and what the small models have besides."""

    text_config = GemmaFamily.text_config  # type: ignore[assignment]

    def rope(self, hf: HFConfig, kind: str) -> RopeConfig:
        params, positions = hf.raw["rope_parameters"][kind], hf.integer("max_position_embeddings")
        share = 1.0 if params["rope_type"] == "proportional" else None
        return rope_config(params, positions, share, False)

    def read(self, hf: HFConfig) -> ModelConfig:
        if hf.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise ValueError(
                f"config.json: use_bidirectional_attention {hf.get('use_bidirectional_attention')!r} is not "
                "supported; supported: 'vision', which changes nothing for texts, and null"
            )
        config = super().read(hf)
        specs = _with_sources(hf, _specs(hf, config))
        key, vocab_size = "hidden_size_per_layer_input", hf.integer("vocab_size_per_layer_input")
        size = hf.integer(key) if hf.get(key) else 0
        if size and vocab_size < config.vocab_size:
            raise ValueError(
                f"config.json: vocab_size_per_layer_input {vocab_size} must be at least vocab_size "
                f"{config.vocab_size}"
            )
        softcap = "final_logit_softcapping"
        moe = Gemma4Spec.of(hf, config) if hf.boolean("enable_moe_block") else None
        prefixes = _prefixes(specs)
        return replace(
            config,
            moe=moe,
            attention=tuple(specs),
            embedding_multiplier=config.hidden_size**0.5,
            logit_softcap=number(hf, softcap) if hf.get(softcap) else None,
            layer=Layers(size, hf.boolean("use_double_wide_mlp")),
            layer_inputs=LayerInputs(size, vocab_size) if size else None,
            names=FileNames(prefixes=prefixes) if moe is None else ExpertNames(prefixes=prefixes, spec=moe),
        )


def _kinds(hf: HFConfig) -> list[str]:
    """The last layer has no window, whatever config.json says."""
    return [*layer_kinds(hf, lambda layer: (layer + 1) % 6 != 0)[:-1], FULL]


def _specs(hf: HFConfig, config: ModelConfig) -> list[AttentionSpec]:
    """The attention of each layer, with keys and values of its own."""
    shared, sizes = hf.boolean("attention_k_eq_v"), _sizes(hf)
    specs = []
    for layer, kind in enumerate(_kinds(hf)):
        spec, read = config.spec(layer), HFConfig(sizes.get(layer, {}), {})
        heads = read.integer("num_key_value_heads", spec.num_kv_heads)
        head_dim = read.integer("head_dim", spec.head_dim)
        if spec.num_heads % heads or head_dim % 2 or head_dim < 4:
            raise ValueError(
                f"config.json: layer {layer} has {heads} KV heads for {spec.num_heads} query heads, and a "
                f"head_dim of {head_dim}; the first must divide them, the second be even and at least 4"
            )
        spec = replace(spec, num_kv_heads=heads, head_dim=head_dim, scale=1.0)
        specs.append(replace(spec, v_from_k=shared and kind == FULL, v_norm=True))
    return specs


def _sizes(hf: HFConfig) -> dict[int, dict[str, Any]]:
    """By layer, what its attention has instead of the common head_dim and num_key_value_heads."""
    stated, names = hf.get("per_layer_config"), {"head_dim", "num_key_value_heads"}
    if stated is None:
        wide = {"head_dim": hf.integer("global_head_dim")}
        if hf.boolean("attention_k_eq_v") and hf.get("num_global_key_value_heads") is not None:
            wide["num_key_value_heads"] = hf.integer("num_global_key_value_heads")
        return {layer: wide for layer, kind in enumerate(_kinds(hf)) if kind == FULL}
    fits = isinstance(stated, dict) and all(
        str(layer).isdecimal() and isinstance(own, dict) and own.keys() <= names
        for layer, own in stated.items()
    )
    if not fits:
        raise ValueError(
            "config.json: per_layer_config must give head_dim and num_key_value_heads, and nothing else, of "
            f"layers by their numbers, not {stated!r}"
        )
    return {int(layer): own for layer, own in stated.items()}


def _with_sources(hf: HFConfig, specs: list[AttentionSpec]) -> list[AttentionSpec]:
    """The last `num_kv_shared_layers` layers read keys and values of the last layer before them that has the
    same kind."""
    kinds, key = _kinds(hf), "num_kv_shared_layers"
    count = hf.integer(key) if hf.get(key) else 0
    first = len(specs) - count
    sources = {kind: layer for layer, kind in enumerate(kinds[: max(0, first)])}
    if missing := {*kinds} - sources.keys():
        raise ValueError(
            f"config.json: num_kv_shared_layers {count} leaves no {' and no '.join(sorted(missing))} layer "
            "with keys and values of its own"
        )
    return [
        spec if layer < first else replace(spec, kv_from=sources[kinds[layer]], v_from_k=False)
        for layer, spec in enumerate(specs)
    ]


def _prefixes(specs: list[AttentionSpec]) -> Mapping[str, str | None]:
    """Names in files: what is not of the decoder is left out, as are keys and values that no layer reads."""
    unread = [
        f"{whole}layers.{layer}.self_attn.{name}."
        for whole in _IN_WHOLE
        for layer, spec in enumerate(specs)
        if spec.kv_from is not None
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    inputs = ("embed_tokens_per_layer.", "per_layer_model_projection.", "per_layer_projection_norm.")
    others = ("vision_tower.", "vision_embedder.", "embed_vision.", "audio_tower.", "embed_audio.")
    return {
        **dict.fromkeys(unread, None),
        **{whole + name: f"model.layer_inputs.{name}" for whole in _IN_WHOLE for name in inputs},
        **decoder_prefixes(others),
    }


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "hidden_activation": Activation.GELU_TANH.value,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "eos_token_id": 1,
}


def _family(**changes: Any) -> Gemma4Family:
    """changes: what differs from the defaults."""
    return Gemma4Family(
        defaults=_DEFAULTS | changes,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        kinds=_kinds,
        ropes="each",
        reads=("final_logit_softcapping", "use_bidirectional_attention", "num_experts"),
    )


GEMMA4 = _family()
GEMMA4_UNIFIED = _family(max_position_embeddings=262144, sliding_window=1024, hidden_size_per_layer_input=0)
