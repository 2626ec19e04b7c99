"""Tiny models in each FP8 format, and what their tensors mean, by arithmetic of our own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensors import F32

from nanovllm import SamplingParams
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.formats.fp8.kernels.values import FP8
from nanovllm.layers.weights import allocate
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import load_weights
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.shards import WeightOptions
from tools.write_fp8 import SCALES

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
OPTIONS = WeightOptions(F32, CPU)
KINDS = tuple(SCALES)
# Blocks of 128 that these sizes do not fill, in rows and columns.
SIZES: dict[str, Any] = {"hidden_size": 144, "intermediate_size": 208, "head_dim": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
DOWN = "model.layers.1.mlp.down_proj"
EXPERT = "model.layers.1.mlp.experts.3.down_proj"


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def dequantised(tensors: Tensors) -> Tensors:
    """The weights that an FP8 checkpoint means, by arithmetic of our own."""
    found = {}
    for name, tensor in tensors.items():
        if "scale" in name:
            continue
        if tensor.dtype == FP8:
            scale = tensors.get(f"{name}_scale")
            if scale is None:
                blocks = tensors[f"{name}_scale_inv"]
                scale = blocks.kron(torch.ones(128, 128))[: tensor.shape[0], : tensor.shape[1]]
            tensor = tensor.float() * scale
        found[name] = tensor
    return found


def on_gpus(config: ModelConfig) -> ModelConfig:
    """The config as on a GPU that multiplies FP8 values."""
    return replace(config, quant=config.quant.on((9, 0)))


def build(
    folder: Path, tp: TPGroup | None = None, products: bool = True, quantization: str | None = None
) -> DecoderForCausalLM:
    config = load_model_config(folder, quantization=quantization)
    config = on_gpus(config) if products else config
    model = DecoderForCausalLM(config, tp or TPGroup(), ReferenceBackend(), 32)
    allocate(model, OPTIONS, config.quant)
    return model


def loaded(folder: Path, **options: Any) -> DecoderForCausalLM:
    model = build(folder, **options)
    load_weights(model, folder)
    return model
