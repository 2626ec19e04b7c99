"""UnquantizedExpertsMethod: the weights of experts in the model's dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from nanovllm.cpu.kernels.activation import silu_and_mul
from nanovllm.cpu.kernels.matmul import PackedExperts, copy_rows, expert_linear, packed_shape
from nanovllm.cpu.packed import can_pack
from nanovllm.kernels.compat import INTERPRET, use_triton
from nanovllm.moe.kernels.gemv import expert_gemv, use_expert_gemv
from nanovllm.moe.kernels.grouped_matmul import choose_experts, experts_triton
from nanovllm.moe.kernels.reference import experts_in_turn, experts_reference
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import ExpertMLP
from nanovllm.moe.method import ROW_BYTES, ExpertsMethod, ExpertWeights
from nanovllm.quantization.base import Normed
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource


class UnquantizedExpertsMethod(ExpertsMethod):
    """Two parameters, `gate_up` [E, 2P, H] and `down` [E, H, P]. The width P of an expert is padded with
    zeros to whole ROW_BYTES; for a GPU, H must be whole ones, which the engine checks.

    The CPU's kernels read packed weights, and no bit of a row then depends on other rows.
    """

    gate_up: torch.Tensor | PackedExperts
    down: torch.Tensor | PackedExperts
    deterministic: bool

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        self.deterministic = options.deterministic
        experts, hidden, width = down.shape
        step = ROW_BYTES // options.dtype.itemsize
        padded = -(-width // step) * step
        shapes = {"gate_up": (2 * padded, hidden), "down": (hidden, padded)}
        packs = all(can_pack(shape, options) for shape in shapes.values())
        make = torch.empty if padded == width and not packs else torch.zeros
        for name, (n, k) in shapes.items():
            own = packed_shape((n, k), options.dtype) if packs else (n, k)
            data = make((experts, *own), dtype=options.dtype, device=options.device)
            parameter = nn.Parameter(data, requires_grad=False)
            layer.register_parameter(name, parameter)
            setattr(self, name, PackedExperts(parameter, n, k) if packs else parameter)
        rows = [replace(each, offset=each.offset // width * padded) for each in gate_up.shards]
        return rows + down.shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        if shard.length:
            self.fill(shard, source[shard.own])

    def fill(self, shard: WeightShard, values: torch.Tensor, first: int | None = None) -> None:
        """Copy a shard's part of its weight, [n, k], or those of its rows that begin at row `first` of the
        expert's weight; cast to its dtype."""
        assert shard.index is not None
        weights = self.down if shard.dim else self.gate_up  # ranks split down by its inputs
        row, column = (0, shard.offset) if shard.dim else (shard.offset, 0)
        row = row if first is None else first
        if isinstance(weights, PackedExperts):
            copy_rows(weights[shard.index].data, values, row, column)
        else:
            n, k = values.shape
            weights[shard.index, row : row + n, column : column + k].copy_(values)

    def dense(self) -> list[torch.Tensor]:
        """The weights `gate_up` [E, 2P, H] and `down` [E, H, P]."""
        weights = self.gate_up, self.down
        return [each.dense() if isinstance(each, PackedExperts) else each for each in weights]

    def apply(self, x: Normed, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
        rows = x.tensor()
        gate_up, down = self.gate_up, self.down
        if isinstance(gate_up, PackedExperts) or isinstance(down, PackedExperts):
            assert isinstance(gate_up, PackedExperts) and isinstance(down, PackedExperts)
            chosen = routing.chosen()
            return experts_in_turn(rows, gate_up, down, chosen, mlp, expert_linear, silu_and_mul)
        if not (use_triton(rows) or (self.deterministic and INTERPRET)):
            return experts_reference(rows, gate_up, down, routing.chosen(), mlp)
        if not self.deterministic and use_expert_gemv(rows):
            return expert_gemv(rows, gate_up, down, routing.chosen(), mlp)
        choice = choose_experts(routing.num_pairs, len(down), rows.dtype, rows.device)
        return experts_triton(rows, gate_up, down, routing.tiles(choice.rows), choice, mlp)
