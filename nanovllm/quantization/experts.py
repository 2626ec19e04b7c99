"""UnquantizedExpertsMethod: the weights of experts in the model's dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from nanovllm.kernels.compat import INTERPRET, use_triton
from nanovllm.kernels.expert_gemv import expert_gemv, use_expert_gemv
from nanovllm.kernels.expert_tiles import ExpertMLP
from nanovllm.kernels.grouped_matmul import choose_experts, experts_reference, experts_triton
from nanovllm.kernels.routing import Routing
from nanovllm.quantization.base import (
    ROW_BYTES,
    ExpertsMethod,
    ExpertWeights,
    Normed,
    WeightOptions,
    WeightShard,
    WeightSource,
)


class UnquantizedExpertsMethod(ExpertsMethod):
    """Two parameters, `gate_up` [E, 2P, H] and `down` [E, H, P]. The width P of an expert is padded with
    zeros to whole ROW_BYTES; for a GPU, H must be whole ones, which the engine checks."""

    gate_up: torch.Tensor
    down: torch.Tensor
    deterministic: bool

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        self.deterministic = options.deterministic
        experts, hidden, width = down.shape
        step = ROW_BYTES // options.dtype.itemsize
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

    def apply(self, x: Normed, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
        rows = x.tensor()
        weights = self.gate_up, self.down
        if not (use_triton(rows) or (self.deterministic and INTERPRET)):
            return experts_reference(rows, *weights, routing.chosen(), mlp)
        if not self.deterministic and use_expert_gemv(rows):
            return expert_gemv(rows, *weights, routing.chosen(), mlp)
        choice = choose_experts(routing.num_pairs, len(self.down), rows.dtype, rows.device)
        return experts_triton(rows, *weights, routing.tiles(choice.rows), choice, mlp)
