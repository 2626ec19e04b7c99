"""OLMo Hybrid: OLMo 3's attention in a quarter of the layers, Gated DeltaNet in the others.

Layers with attention have norms after their blocks, the others before them. The released models have no rope,
and a beta from 0 to 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from nanovllm.families.olmo import NormedAfterLayer
from nanovllm.families.qwen3_next import LINEAR
from nanovllm.formats.config_json.values import layer_kinds
from nanovllm.layers.stream import AnyStream, Step
from nanovllm.models.config import FULL, HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Build, GatedMLP, layer_norm
from nanovllm.quantization.shards import FileNames
from nanovllm.states.layers import GatedDeltaNet, PackedStep
from nanovllm.states.spec import StateSpec

_NORM_EPS = 1e-5  # of the gated norm, whatever config.json says
_NO_ROPE = "rope_theta_is_null"
# Of modules of Gated DeltaNet, and of norms: the names in files, and ours.
_MODULES = {
    **{"q_proj": "in_proj_q", "k_proj": "in_proj_k", "v_proj": "in_proj_v", "g_proj": "in_proj_z"},
    **{"b_proj": "in_proj_b", "a_proj": "in_proj_a", "o_proj": "out_proj", "o_norm": "norm"},
    **{"q_conv1d": "conv_q", "k_conv1d": "conv_k", "v_conv1d": "conv_v"},
}
_NORMS = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
_IN_FILES = {own: name for name, own in _MODULES.items()}
_MIXER = "linear_attn"


class OlmoHybridNames(FileNames):
    """The names of Gated DeltaNet's modules. Its convolution is one tensor, or three."""

    def named(self, full_name: str) -> str | None:
        name = super().named(full_name)
        return None if name is None else _renamed(name, _MODULES, _NORMS)

    def of(self, path: str) -> tuple[str, ...]:
        names = super().of(path)
        return tuple(dict.fromkeys((*names, *(_renamed(name, _IN_FILES, {}) for name in names))))


def _renamed(name: str, modules: Mapping[str, str], others: Mapping[str, str]) -> str:
    """modules: by the names of modules of a mixer, others: of all other modules."""
    parts = name.split(".")
    tables = [modules if before == _MIXER else others for before in ["", *parts]]
    return ".".join(table.get(part, part) for part, table in zip(parts, tables, strict=False))


@dataclass(frozen=True)
class Layers:
    """How the layers of one model are made; they share what is computed once for a step."""

    most_beta: float
    packed: PackedStep = field(default_factory=PackedStep, compare=False)

    def __call__(self, config: ModelConfig, index: int, build: Build) -> nn.Module:
        state = config.spec(index).state
        if state is None:
            return NormedAfterLayer(config, index, build)
        return LinearLayer(config, state, build, self)

    def __reduce__(self) -> tuple[type[Layers], tuple[float]]:
        return Layers, (self.most_beta,)  # each rank has its own


class LinearLayer(nn.Module):
    """Gated DeltaNet, then an MLP; each has a norm before it."""

    def __init__(self, config: ModelConfig, state: StateSpec, build: Build, layers: Layers) -> None:
        super().__init__()
        normed = replace(config, rms_norm_eps=_NORM_EPS)
        self.input_layernorm = layer_norm(config, build.tp)
        self.linear_attn = GatedDeltaNet(normed, state, build.tp, layers.packed)
        self.linear_attn.heads = self.linear_attn.heads._replace(most_beta=layers.most_beta)
        self.post_attention_layernorm = layer_norm(config, build.tp)
        self.mlp = GatedMLP(config, build)

    def forward(self, x: AnyStream, step: Step, keep: torch.Tensor | None = None) -> AnyStream:
        """keep [n]: only these rows are needed after the first block."""
        x = x.add(self.input_layernorm, self.linear_attn, step, keep)
        return x.add(self.post_attention_layernorm, self.mlp, step)


def _kinds(hf: HFConfig) -> list[str]:
    """Without layer_types every fourth layer has attention, or else the last one."""
    count, stated = hf.integer("num_hidden_layers"), hf.raw.get(LINEAR)
    kinds: list[str] = stated or [FULL if layer % 4 == 3 else LINEAR for layer in range(count)]
    return kinds if stated or FULL in kinds else [*kinds[:-1], FULL]


class OlmoHybridFamily(ModelFamily):
    """Sizes of states that follow from others, and no rope where rope_theta is null."""

    def text_config(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        stated = [raw.get(key) for key in ("rope_parameters", "rope_scaling")]
        thetas = [each["rope_theta"] for each in (*stated, raw) if each and "rope_theta" in each]
        return {**raw, _NO_ROPE: thetas[0] is None} if thetas else raw

    def own_names(self, raw: dict[str, Any]) -> Mapping[str, Any]:
        kinds = raw.get("layer_types")
        if isinstance(kinds, list):
            raw = {**raw, "layer_types": [FULL if kind == LINEAR else kind for kind in kinds], LINEAR: kinds}
        return raw

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        if hf.get("hidden_act") != "silu":
            raise ValueError(
                f"config.json: hidden_act {hf.get('hidden_act')!r} is not supported; it must be 'silu'"
            )
        k_heads = hf.integer("linear_num_key_heads", config.num_heads)
        k_dim = hf.integer("linear_key_head_dim", int(0.75 * config.hidden_size / k_heads))
        state = StateSpec(
            k_heads,
            hf.integer("linear_num_value_heads", config.num_heads),
            k_dim,
            hf.integer("linear_value_head_dim", 2 * k_dim),
            hf.integer("linear_conv_kernel_dim"),
        )
        spec, kinds = config.spec(0), _kinds(hf)
        spec = replace(spec, rope=None) if hf.raw.get(_NO_ROPE) else spec
        if FULL not in kinds:
            raise ValueError("config.json: layer_types names no full_attention layer, and one is needed")
        parts = {"conv_q": state.keys, "conv_k": state.keys, "conv_v": state.values}
        return replace(
            config,
            attention=tuple(spec if kind == FULL else replace(spec, state=state) for kind in kinds),
            layer=Layers(2.0 if hf.boolean("linear_allow_neg_eigval") else 1.0),
            names=OlmoHybridNames({"conv1d": parts}),
        )


OLMO_HYBRID = OlmoHybridFamily(
    defaults={
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "hidden_act": "silu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 100257,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="all",
    kinds=lambda hf: layer_kinds(hf, lambda layer: False),
)
