"""gpt-oss: attention with sinks, windows in every other layer, and experts with biases and a clamped SwiGLU.

Its checkpoints hold the experts of a layer as one tensor, in MXFP4 or in floats; here each part of an expert
gets a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.families.qwen3_moe import MoEFamily
from nanovllm.formats.config_json.values import layer_kinds
from nanovllm.formats.mxfp4.method import Mxfp4Config
from nanovllm.kernels.activation import Activation
from nanovllm.models.config import HFConfig, ModelConfig
from nanovllm.moe.layers import ExpertNames, MoESpec, rows_of_expert
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import FileNames, WeightSource

_FIXED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "hidden_act": "silu"}  # the kernels' constants
# What a checkpoint's tensor of all experts becomes, and its dimensions.
_PARAMS = {"": ("weight", 3), "_blocks": ("blocks", 4), "_scales": ("scales", 3), "_bias": ("bias", 2)}


class GptOssNames(ExpertNames):
    """Gate and up are every other row of one tensor; weights in floats are transposed."""

    def parts(self, name: str, tensor: WeightSource) -> Iterable[tuple[str, WeightSource]]:
        module, _, last = name.rpartition(".")
        suffix = last.removeprefix("gate_up_proj").removeprefix("down_proj")
        param, dims = _PARAMS.get(suffix, ("", 0))
        shape = tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape()
        fits = len(shape) == dims and shape[0] <= self.spec.num_experts
        if not module.endswith(".experts") or not fits or suffix == last:
            return [(name, tensor)]
        is_weight = param == "weight"
        size = shape[2 if is_weight else 1]
        parts = {"down_proj": range(size)}
        if last.startswith("gate_up_proj"):
            parts = {"gate_proj": range(0, size, 2), "up_proj": range(1, size, 2)}
        return [
            (f"{module}.{index}.{part}.{param}", rows_of_expert(tensor, index, rows, transposed=is_weight))
            for index in range(shape[0])
            for part, rows in parts.items()
        ]


@dataclass(frozen=True)
class _GptOss(MoEFamily):
    def read_moe(self, hf: HFConfig) -> MoESpec:
        return MoESpec(
            num_experts=hf.integer("num_experts"),
            top_k=hf.integer("num_experts_per_tok"),
            width=hf.integer("intermediate_size"),
            activation=Activation.CLAMPED,
            bias=True,
            router="router",
        )

    def expert_names(self, moe: MoESpec) -> FileNames:
        return GptOssNames(spec=moe)

    def read(self, hf: HFConfig) -> ModelConfig:
        for key, supported in _FIXED.items():
            if (stated := hf.get(key, supported)) != supported:
                raise ValueError(
                    f"config.json: {key} {stated!r} is not supported; supported: {supported!r}, as in gpt-oss"
                )
        config = super().read(hf)
        attention = tuple(replace(spec, sinks=True) for spec in config.attention)
        dtype = config.dtype if hf.get("dtype") else "bfloat16"  # original checkpoints do not say theirs
        return replace(config, attention=attention, dtype=dtype)

    def model_config(
        self,
        architecture: str,
        raw: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        quantization: str | None = None,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> ModelConfig:
        config = super().model_config(architecture, raw, generation, quantization, overrides)
        if type(config.quant) not in (QuantConfig, Mxfp4Config):
            method = quantization or {**raw, **overrides}["quantization_config"]["quant_method"]
            raise ValueError(
                f"quantization {method!r} is not supported in {architecture}, whose experts have biases and "
                "a SwiGLU of their own; use its MXFP4, bfloat16 or float16 checkpoint, without quantization"
            )
        return config


GPT_OSS = _GptOss(
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "num_experts": 128,
        "rope_theta": 150000.0,
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"truncate": False, "original_max_position_embeddings": 4096},
        },
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    kinds=lambda hf: layer_kinds(hf, lambda layer: layer % 2 == 0),
)
