"""ReplicatedLinear: a product that every rank computes whole, such as a router's. Sums nothing."""

from __future__ import annotations

import torch

from nanovllm.layers.weights import LinearLayer
from nanovllm.quantization.shards import WeightShard


class ReplicatedLinear(LinearLayer):
    """x [..., input_size] -> [..., output_size], complete on every rank."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        shape = (output_size, input_size)
        own_bias = [WeightShard.whole("bias", shape[:1])] if bias else None
        super().__init__(shape, [WeightShard.whole("weight", shape)], own_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(x, self.bias)
