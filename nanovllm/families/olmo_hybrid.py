"""OLMo Hybrid: OLMo 3's attention in a quarter of the layers, Gated DeltaNet in the others.

Layers with attention have norms after their blocks, the others before them. The released models have no rope,
and a beta from 0 to 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.families.blocks import LayersOf, RenamedModules, TwoBlocks
from nanovllm.families.olmo import NormedAfterLayer
from nanovllm.families.qwen3_next import LINEAR, Hybrid
from nanovllm.formats.config_json.values import check_fixed, layer_kinds
from nanovllm.models.config import FULL, HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Build, GatedMLP, layer_norm
from nanovllm.states.layers import GatedDeltaNet
from nanovllm.states.spec import StateSpec

_NORM_EPS = 1e-5  # of the gated norm, whatever config.json says
_NO_ROPE = "rope_theta_is_null"
# The names in files, and ours, of modules of Gated DeltaNet, and of norms.
_MODULES = {
    "linear_attn": {
        **{"q_proj": "in_proj_q", "k_proj": "in_proj_k", "v_proj": "in_proj_v", "g_proj": "in_proj_z"},
        **{"b_proj": "in_proj_b", "a_proj": "in_proj_a", "o_proj": "out_proj", "o_norm": "norm"},
        **{"q_conv1d": "conv_q", "k_conv1d": "conv_k", "v_conv1d": "conv_v"},
    },
    "": {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
}


def _layer(config: ModelConfig, index: int, build: Build, layers: LayersOf) -> NormedAfterLayer | LinearLayer:
    state = config.spec(index).state
    if state is None:
        return NormedAfterLayer(config, index, build)
    return LinearLayer(config, state, build, layers)


class LinearLayer(TwoBlocks):
    """Gated DeltaNet, then an MLP; each has a norm before it."""

    def __init__(self, config: ModelConfig, state: StateSpec, build: Build, layers: LayersOf) -> None:
        """The setting of `layers` is the largest beta."""
        linear = GatedDeltaNet(replace(config, rms_norm_eps=_NORM_EPS), state, build.tp, layers.packed)
        linear.heads = linear.heads._replace(most_beta=layers.setting)
        super().__init__(
            {"input_layernorm": layer_norm(config, build.tp), "linear_attn": linear},
            {"post_attention_layernorm": layer_norm(config, build.tp), "mlp": GatedMLP(config, build)},
        )


def _kinds(hf: HFConfig) -> list[str]:
    """Without layer_types every fourth layer has attention, or else the last one."""
    count, stated = hf.integer("num_hidden_layers"), hf.raw.get(LINEAR)
    kinds: list[str] = stated or [FULL if layer % 4 == 3 else LINEAR for layer in range(count)]
    return kinds if stated or FULL in kinds else [*kinds[:-1], FULL]


class OlmoHybridFamily(ModelFamily):
    """Sizes of states that follow from others, and no rope where rope_theta is null."""

    def text_config(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        stated = [raw.get(key) for key in ("rope_parameters", "rope_scaling")]
        objects = [each for each in (*stated, raw) if isinstance(each, Mapping)]
        thetas = [each["rope_theta"] for each in objects if "rope_theta" in each]
        return {**raw, _NO_ROPE: thetas[0] is None} if thetas else raw

    own_names = Hybrid.own_names  # type: ignore[assignment]

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        check_fixed(hf, {"hidden_act": "silu"})
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
            layer=LayersOf(_layer, 2.0 if hf.boolean("linear_allow_neg_eigval") else 1.0),
            # The convolution is one tensor, or three.
            names=RenamedModules({"conv1d": parts}, modules=_MODULES),
        )


OLMO_HYBRID = OlmoHybridFamily(
    defaults={
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
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
