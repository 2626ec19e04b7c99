"""LFM2, dense and with experts: most layers are a gated short convolution, the others have attention.

All norms, projections and MLPs have names of their own in files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from nanovllm.families.blocks import LayersOf, RenamedModules
from nanovllm.families.qwen3_moe import MoEFamily, RoutedLayer, routed
from nanovllm.formats.config_json.reading import MAX_ELEMENTS
from nanovllm.formats.config_json.values import check_fixed, first_layers, layer_kinds, number
from nanovllm.formats.packed_parts import PartNames
from nanovllm.models.config import FULL, HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, layer_norm
from nanovllm.moe.layers import ExpertNames, MoESpec
from nanovllm.moe.sigmoid import SigmoidSpec
from nanovllm.quantization.shards import FileNames, WeightSource
from nanovllm.states.short_conv import PARTS, ConvSpec, ShortConv

CONV = "conv"
_KINDS = "kinds_of_layers"  # of config.json, with those that have no attention
_MLP = "feed_forward"
# Keys of config.json, and what other families call them; where a file has both, the first one counts.
_KEYS = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
# Names of modules in files and ours, by the module that holds them.
_MODULES: dict[str, dict[str, str]] = {
    "self_attn": {"out_proj": "o_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm"},
    _MLP: {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
}
_PREFIXES: dict[str, str | None] = dict.fromkeys(("model.embedding_norm.", "embedding_norm."), "model.norm.")


@dataclass(frozen=True)
class Lfm2Names(RenamedModules, PartNames):
    """Other names of modules; the first product of a convolution is one tensor."""

    modules: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: _MODULES, hash=False, kw_only=True
    )


@dataclass(frozen=True)
class Lfm2ExpertNames(ExpertNames, Lfm2Names):
    """With experts. The correction stands beside the router in files."""

    def parts(self, name: str, tensor: WeightSource) -> Iterable[tuple[str, WeightSource]]:
        own = f"{_MLP}.{self.spec.router}.e_score_correction_bias"
        return super().parts(name.replace(f"{_MLP}.expert_bias", own), tensor)


class Lfm2Layer(RoutedLayer):
    """A short convolution or attention, then an MLP or experts; each adds to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, build: Build, layers: LayersOf) -> None:
        state, tp = config.spec(index).state, build.tp
        mixer: dict[str, nn.Module] = (
            {"self_attn": Attention(config, index, build)}
            if state is None
            else {"conv": ShortConv(config.hidden_size, state, tp, layers.packed)}
        )
        super().__init__(
            {"operator_norm": layer_norm(config, tp), **mixer},
            {"ffn_norm": layer_norm(config, tp), _MLP: routed(config, index, build)},
        )


def _with_keys(raw: Mapping[str, Any], keys: Mapping[str, str]) -> Mapping[str, Any]:
    """config.json with these keys under their common names."""
    stated = {own: raw[key] for key, own in keys.items() if raw.get(key) is not None}
    return {**raw, **stated}


@dataclass(frozen=True)
class Lfm2Family(ModelFamily):
    """Kinds of layers as a list of kinds or of numbers; the width of an MLP follows from others."""

    def text_config(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return _with_keys(raw, {**_KEYS, "block_ff_dim": "intermediate_size"})

    def own_names(self, raw: dict[str, Any]) -> Mapping[str, Any]:
        return _own_kinds(raw)

    def read(self, hf: HFConfig) -> ModelConfig:
        config = _with_states(hf, super().read(hf))
        return replace(config, intermediate_size=_adjusted(hf, config.intermediate_size))


class Lfm2MoEFamily(MoEFamily):
    """The first layers have an MLP; a sigmoid and a learned correction choose experts."""

    def text_config(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return _with_keys(raw, _KEYS)

    def own_names(self, raw: dict[str, Any]) -> Mapping[str, Any]:
        return _own_kinds(raw)

    def read(self, hf: HFConfig) -> ModelConfig:
        return _with_states(hf, super().read(hf))

    def expert_names(self, moe: MoESpec) -> FileNames:
        return Lfm2ExpertNames(last=moe.projections[-1], spec=moe)

    def read_moe(self, hf: HFConfig) -> MoESpec:
        if hf.boolean("use_expert_bias") is not True:
            raise ValueError("config.json: use_expert_bias False is not supported; it must be True")
        return SigmoidSpec(
            num_experts=hf.integer("num_experts"),
            top_k=hf.integer("num_experts_per_tok"),
            width=hf.integer("moe_intermediate_size"),
            normalised=hf.boolean("norm_topk_prob"),
            dense=first_layers(hf, "num_dense_layers"),
            block=_MLP,
            projections=("w1", "w3", "w2"),
            factor=number(hf, "routed_scaling_factor"),
        )


_FIXED = {"hidden_act": "silu", "block_use_swiglu": True, "use_pos_enc": True}  # keys, and what is supported
_SIZES = ("block_dim", "conv_dim", "conv_dim_out")  # further names of hidden_size


def _own_kinds(raw: dict[str, Any]) -> Mapping[str, Any]:
    """With `layer_types` as if all layers had attention, and with what they are under `_KINDS`.

    ValueError for kinds that are not supported, or stated twice.
    """
    kinds, numbers, count = raw.get("layer_types"), raw.get("full_attn_idxs"), raw.get("num_hidden_layers")
    if numbers is not None:
        if not isinstance(numbers, list) or not all(type(each) is int for each in numbers):
            raise ValueError(f"config.json: full_attn_idxs must be a list of layers, not {numbers!r}")
        length = len(kinds) if isinstance(kinds, list) else count
        if not isinstance(length, int):
            raise ValueError("config.json: full_attn_idxs needs num_hidden_layers")
        full = frozenset(numbers)
        named = [FULL if layer in full else CONV for layer in range(length)]
        if kinds is not None and kinds != named:
            raise ValueError(f"config.json: layer_types and full_attn_idxs {numbers} name different layers")
        kinds = named
    if not isinstance(kinds, list):
        return raw
    if other := [kind for kind in kinds if kind not in (FULL, CONV)]:
        raise ValueError(f"config.json: layer_types {other!r} are not supported; supported: {FULL}, {CONV}")
    if FULL not in kinds:
        raise ValueError("config.json: layer_types names no full_attention layer, and one is needed")
    return {**raw, "layer_types": [FULL] * len(kinds), _KINDS: kinds}


def _kinds(hf: HFConfig) -> Sequence[str]:
    """As if all layers had attention."""
    return layer_kinds(hf, lambda layer: False) if hf.get("layer_types") else (FULL,)


def _with_states(hf: HFConfig, config: ModelConfig) -> ModelConfig:
    """The model with its convolutions, and with the names of its files."""
    check_fixed(hf, _FIXED)
    for key in _SIZES:
        if hf.get(key, config.hidden_size) != config.hidden_size:
            raise ValueError(
                f"config.json: {key} {hf.get(key)!r} is not supported; it must be hidden_size "
                f"{config.hidden_size}"
            )
    size, spec = config.hidden_size, config.spec(0)
    state = ConvSpec(size, hf.integer("conv_L_cache"), hf.boolean("conv_bias"))
    kinds = hf.raw.get(_KINDS) or [FULL]
    packed = {"in_proj": dict.fromkeys(PARTS, size)}
    if isinstance(config.names, Lfm2ExpertNames):
        names: FileNames = replace(config.names, packed=packed, prefixes=_PREFIXES)
    else:
        names = Lfm2Names(packed, _PREFIXES)
    return replace(
        config,
        attention=tuple(spec if kind == FULL else replace(spec, state=state) for kind in kinds),
        layer=LayersOf(Lfm2Layer),
        names=names,
    )


def _adjusted(hf: HFConfig, width: int) -> int:
    """The width of an MLP: two thirds of what is stated, rounded up to a multiple."""
    if not hf.boolean("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if hf.get("block_ffn_dim_multiplier") is not None:
        multiple = hf.integer("block_multiple_of")
        width = -(-int(number(hf, "block_ffn_dim_multiplier") * width) // multiple) * multiple
    if not 0 < width < 2**31 or 2 * width * hf.integer("hidden_size") > MAX_ELEMENTS:
        raise ValueError(
            f"config.json: intermediate_size {hf.get('intermediate_size')!r} with block_multiple_of "
            f"{hf.get('block_multiple_of')!r} and block_ffn_dim_multiplier "
            f"{hf.get('block_ffn_dim_multiplier')!r} gives an MLP of width {width}"
        )
    return width


_SHARED: dict[str, Any] = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
}
LFM2 = Lfm2Family(
    defaults={
        **_SHARED,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    qk_norm="head",
    kinds=_kinds,
)
LFM2_MOE = Lfm2MoEFamily(
    defaults={
        **_SHARED,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "num_experts": 32,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    qk_norm="head",
    kinds=_kinds,
)
