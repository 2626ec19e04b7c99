"""Fp8ExpertsMethod: the weights of experts in FP8 (E4M3), dequantised to the model's dtype as they are loaded."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.routing import Routing
from nanovllm.quantization.base import ExpertsMethod, ExpertWeights, Normed, WeightOptions, WeightShard
from nanovllm.quantization.experts import UnquantizedExpertsMethod
from nanovllm.quantization.fp8_loading import Fp8Method, Part, Stored


class Fp8ExpertsMethod(Fp8Method, ExpertsMethod):
    """The products of dequantised weights."""

    def __init__(self, stored: Stored, products: bool = False, input_scales: bool = False) -> None:
        """As `Fp8LinearMethod`."""
        self.stored, self.products, self.input_scales = stored, products, input_scales

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        self.device = options.device
        self.dense = UnquantizedExpertsMethod()
        shards = self.dense.create(layer, gate_up, down, options)
        self.parts = {}
        for shard in shards:
            target = self.dense.down if shard.dim else self.dense.gate_up
            assert shard.index is not None
            self.parts[shard.module] = Part(shard, self.stored, target[shard.index])
        return self.needed(shards, self.input_scales)

    def apply(self, x: Normed, routing: Routing) -> torch.Tensor:
        return self.dense.apply(x, routing)
