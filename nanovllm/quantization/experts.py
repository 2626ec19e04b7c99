"""UnquantizedExpertsMethod: the weights of experts in the model's dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from nanovllm.kernels.grouped_matmul import experts_reference
from nanovllm.kernels.routing import Routing
from nanovllm.quantization.base import (
    ExpertsMethod,
    ExpertWeights,
    Normed,
    WeightOptions,
    WeightShard,
    WeightSource,
)

_ALIGNMENT = 16  # bytes of which a row is a multiple, as tensor descriptors need it


class UnquantizedExpertsMethod(ExpertsMethod):
    """Two parameters, `gate_up` [E, 2P, H] and `down` [E, H, P]. The width P of an expert is padded with
    zeros to whole 16 bytes."""

    gate_up: torch.Tensor
    down: torch.Tensor
    deterministic: bool

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        self.deterministic = options.deterministic
        experts, hidden, width = down.shape
        step = _ALIGNMENT // options.dtype.itemsize
        padded = -(-width // step) * step
        make = torch.empty if padded == width else torch.zeros
        for name, shape in (("gate_up", (experts, 2 * padded, hidden)), ("down", (experts, hidden, padded))):
            data = make(shape, dtype=options.dtype, device=options.device)
            layer.register_parameter(name, nn.Parameter(data, requires_grad=False))
            setattr(self, name, layer.get_parameter(name))
        rows = [replace(each, offset=each.offset // width * padded) for each in gate_up.shards]
        return rows + down.shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        shard.copy(source, self.down if shard.dim else self.gate_up)  # ranks split down by its inputs

    def apply(self, x: Normed, routing: Routing) -> torch.Tensor:
        return experts_reference(x.tensor(), self.gate_up, self.down, routing.chosen())
