"""Int4ExpertsMethod: the weights of experts in 4 bits, from AWQ, GPTQ or compressed-tensors files.

As `Int4LinearMethod`: one layout on a GPU, dequantised weights elsewhere. Opens no file.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from nanovllm.formats.int4.kernels.experts import choose_int4_experts, int4_expert_gemv
from nanovllm.formats.int4.kernels.layout import Int4Experts, Int4Weight
from nanovllm.formats.int4.layouts import Int4Format
from nanovllm.formats.int4.loading import Int4Method, Store, register
from nanovllm.kernels.compat import INTERPRET, use_triton
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.kernels.gemv import use_expert_gemv
from nanovllm.moe.kernels.grouped_matmul import experts_triton
from nanovllm.moe.kernels.reference import experts_reference
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import ExpertMLP
from nanovllm.moe.method import ExpertsMethod, ExpertWeights
from nanovllm.quantization.base import Normed
from nanovllm.quantization.shards import WeightOptions, WeightShard


class PackedExpertsMethod(ExpertsMethod):
    """Products with weights of experts in 4 bits, or with the dequantised ones, if `dense` holds them."""

    dense: UnquantizedExpertsMethod | None = None
    gate_up: Int4Experts
    down: Int4Experts
    deterministic: bool

    def make(
        self, layer: nn.Module, name: str, weights: ExpertWeights, group: int, options: WeightOptions
    ) -> Int4Experts:
        """Parameters of one of the two weights, all zero."""
        made = Int4Experts.empty(*weights.shape, group, options.device, options.dtype)
        for part in ("words", "scales", "factors"):
            if (data := getattr(made, part)) is not None:
                register(layer, f"{name}_{part}", data)
        return made

    def part(self, shard: WeightShard) -> Int4Weight:
        """The place of a shard of [N, K]; ranks split `down` by its inputs."""
        assert shard.index is not None
        if shard.dim:
            return self.down.expert(shard.index)
        return self.gate_up.expert(shard.index).rows(slice(shard.offset, shard.offset + shard.length))

    def apply(self, x: Normed, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
        if self.dense is not None:
            return self.dense.apply(x, routing, mlp)
        rows, gate_up, down = x.tensor(), self.gate_up, self.down
        if not (use_triton(rows) or (self.deterministic and INTERPRET)):
            return experts_reference(rows, gate_up, down, routing.chosen(), mlp)
        if not self.deterministic and use_expert_gemv(rows) and mlp.is_plain:
            return int4_expert_gemv(rows, gate_up, down, routing.chosen())
        keeps = self.deterministic and gate_up.factors is not None
        choice = choose_int4_experts(routing.num_pairs, len(self.down), rows.device, keeps)
        return experts_triton(rows, gate_up, down, routing.tiles(choice.rows), choice, mlp)


class Int4ExpertsMethod(Int4Method, PackedExpertsMethod):
    """Weights that `format` reads. Those whose inputs are in another order for each expert (desc_act,
    actorder) are dequantised on a GPU too."""

    def __init__(self, format: Int4Format, packs: bool = True) -> None:
        """As `Int4LinearMethod`."""
        self.format = format
        self.packs = packs

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        """Words and scales of both weights; dequantised `gate_up` and `down`."""
        self.deterministic = options.deterministic
        shards = gate_up.shards + down.shards
        if self.format.sorts or not self.keeps_bits(options):
            self.dense = UnquantizedExpertsMethod()
            shards = self.dense.create(layer, gate_up, down, options)
            return self.prepare(shards, options)
        created = self.prepare(shards, options)
        groups = (self.group_of(each.shards[0]) for each in (gate_up, down))
        self.gate_up = self.make(layer, "gate_up", gate_up, next(groups), options)
        self.down = self.make(layer, "down", down, next(groups), options)
        return created

    def target(self, part: WeightShard) -> Int4Weight | Store:
        if self.dense is not None:
            return partial(self.dense.fill, part)
        return self.part(part)
