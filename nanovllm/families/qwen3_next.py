"""Qwen3-Next and Qwen3.5, dense and with experts: most layers are Gated DeltaNet, and attention has a gate.

Of a model that reads images only the decoder is read; the layers for speculation are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from nanovllm.families.blocks import LayersOf
from nanovllm.families.gemma import GemmaFamily
from nanovllm.families.qwen3_moe import MoEFamily, RoutedLayer, routed
from nanovllm.formats.config_json.values import check_fixed, layer_kinds
from nanovllm.formats.packed_parts import PartNames
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.models.config import FULL, HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, layer_norm
from nanovllm.moe.layers import ExpertNames, MoESpec
from nanovllm.quantization.base import Normed
from nanovllm.quantization.shards import FileNames
from nanovllm.states.kernels.sigmoid_gate import sigmoid_gate
from nanovllm.states.layers import GatedDeltaNet
from nanovllm.states.spec import StateSpec

LINEAR = "linear_attention"
_PREFIXES: dict[str, str | None] = {
    "model.language_model.": "model.",
    **dict.fromkeys(("model.visual.", "visual.", "mtp."), None),
}


class GatedAttention(Attention):
    """With a gate of each element of its result: a part of the files' q_proj."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__(config, index, build)
        spec = config.spec(index)
        size = {"g_proj": spec.num_heads * spec.head_dim}
        self.g_proj = MergedColumnParallelLinear(config.hidden_size, size, build.tp, config.qkv_bias)

    def gated(self, attended: torch.Tensor, x: Normed) -> torch.Tensor:
        return sigmoid_gate(attended, self.g_proj(x))


class HybridLayer(RoutedLayer):
    """Gated DeltaNet or attention with a gate, then an MLP or experts; each adds to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, build: Build, layers: LayersOf) -> None:
        state, tp = config.spec(index).state, build.tp
        mixer: dict[str, nn.Module] = (
            {"self_attn": GatedAttention(config, index, build)}
            if state is None
            else {"linear_attn": GatedDeltaNet(config, state, tp, layers.packed)}
        )
        super().__init__(
            {"input_layernorm": layer_norm(config, tp), **mixer},
            {"post_attention_layernorm": layer_norm(config, tp), "mlp": routed(config, index, build)},
        )


@dataclass(frozen=True)
class HybridExpertNames(ExpertNames, PartNames):
    """Names of files that hold queries beside gates, head by head, and in Qwen3-Next all of a key head's
    projections one after the other; with experts."""


@dataclass(frozen=True)
class Hybrid(ModelFamily):
    """What is read of both kinds, with experts and without."""

    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    qk_norm: Literal["head", "all"] | None = "head"
    kinds: Callable[[HFConfig], Sequence[str]] = lambda hf: layer_kinds(hf, lambda layer: False)
    rotary_share: float | None = 0.25
    by_key_head: bool = False  # how files order the projections of Gated DeltaNet
    text_config = GemmaFamily.text_config  # type: ignore[assignment]

    def own_names(self, raw: dict[str, Any]) -> Mapping[str, Any]:
        kinds = raw.get("layer_types")
        if isinstance(kinds, list):
            raw = {**raw, "layer_types": [FULL if kind == LINEAR else kind for kind in kinds], LINEAR: kinds}
        return raw

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        check_fixed(hf, {"hidden_act": "silu"})  # which the convolution has too
        if hf.get("attn_output_gate", True) is not True:
            raise ValueError(
                f"config.json: attn_output_gate {hf.get('attn_output_gate')!r} is not supported; it must be "
                "true"
            )
        spec = replace(config.spec(0), gate="element")
        state = StateSpec(
            hf.integer("linear_num_key_heads"),
            hf.integer("linear_num_value_heads"),
            hf.integer("linear_key_head_dim"),
            hf.integer("linear_value_head_dim"),
            hf.integer("linear_conv_kernel_dim"),
        )
        kinds, every = hf.raw.get(LINEAR), hf.integer("full_attention_interval")
        if kinds is None:
            kinds = [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(config.num_layers)]
        specs = tuple(spec if kind == FULL else replace(spec, gate=None, state=state) for kind in kinds)
        if all(each.state is not None for each in specs):
            raise ValueError("config.json: layer_types names no full_attention layer, and one is needed")
        return replace(
            config,
            attention=specs,
            norm_offset=1.0,
            layer=LayersOf(HybridLayer),
            names=self._names(config, state),
        )

    def _names(self, config: ModelConfig, state: StateSpec) -> FileNames:
        keys, values, size = state.keys, state.values, config.num_heads * config.head_dim
        qkv = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values}
        packed: dict[str, Mapping[str, int]] = {
            "q_proj": {"q_proj": size, "g_proj": size},
            "conv1d": {"conv_q": keys, "conv_k": keys, "conv_v": values},
        }
        if self.by_key_head:
            packed["in_proj_qkvz"] = {**qkv, "in_proj_z": values}
            packed["in_proj_ba"] = {"in_proj_b": state.v_heads, "in_proj_a": state.v_heads}
        else:
            packed["in_proj_qkv"] = qkv
        moe = config.moe
        heads = {"q_proj": config.num_heads, **dict.fromkeys(("in_proj_qkvz", "in_proj_ba"), state.k_heads)}
        if isinstance(moe, MoESpec):
            last = moe.projections[-1]
            return HybridExpertNames(packed, _PREFIXES, last, spec=moe, by_heads=heads)
        return PartNames(packed, _PREFIXES, by_heads=heads)


class HybridMoEFamily(Hybrid, MoEFamily):
    """Qwen3.5 with experts, whose weights always add up to 1."""

    def read_moe(self, hf: HFConfig) -> MoESpec:
        return replace(super().read_moe(hf), normalised=True)


class QwenNextFamily(Hybrid, MoEFamily):
    """Qwen3-Next."""


_SHARED: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_5 = Hybrid(
    defaults={
        **_SHARED,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
)
QWEN3_5_MOE = HybridMoEFamily(
    defaults={
        **_SHARED,
        "vocab_size": 248320,
        "hidden_size": 2048,
        "intermediate_size": 5632,  # of layers without experts, of which there are none
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "norm_topk_prob": True,
    },
    reads=("num_experts",),
)
QWEN3_NEXT = QwenNextFamily(
    defaults={
        **QWEN3_5_MOE.defaults,
        "vocab_size": 151936,
        "num_hidden_layers": 48,
        "num_experts_per_tok": 10,
        "num_experts": 512,
    },
    reads=("num_experts",),
    by_key_head=True,
)
