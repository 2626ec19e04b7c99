"""Fp8ExpertsMethod: products with the weights of experts in FP8 (E4M3), with scales of rows or of blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from nanovllm.formats.fp8.kernels.grouped import Fp8Experts, fp8_experts_reference, fp8_experts_triton
from nanovllm.formats.fp8.kernels.matmul import Fp8Weight
from nanovllm.formats.fp8.kernels.values import GROUP
from nanovllm.formats.fp8.loading import (
    Fp8Method,
    Part,
    Store,
    Stored,
    is_aligned,
    make_weight,
    splits_blocks,
)
from nanovllm.kernels.compat import use_triton
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.kernels.grouped_matmul import choose_experts
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import ExpertMLP
from nanovllm.moe.method import ExpertsMethod, ExpertWeights
from nanovllm.quantization.base import Normed
from nanovllm.quantization.shards import WeightOptions, WeightShard

_MULTIPLE = 16  # of the inputs of a product in FP8


class Fp8ExpertsMethod(Fp8Method, ExpertsMethod):
    """Products in FP8, if `products`; else, and if the sizes do not allow them, of dequantised weights.

    The width of an expert is padded with zeros to a multiple of 16.
    """

    dense: UnquantizedExpertsMethod | None  # the dequantised weights, if there are no products in FP8
    gate_up: Fp8Experts
    down: Fp8Experts

    def __init__(self, stored: Stored, products: bool = False, input_scales: bool = False) -> None:
        """As `Fp8LinearMethod`."""
        self.stored, self.products, self.input_scales = stored, products, input_scales

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        self.device, self.dense = options.device, None
        experts, hidden, width = down.shape
        shards = gate_up.shards + down.shards
        if self.products and hidden % _MULTIPLE == 0 and not splits_blocks(shards, self.stored):
            padded = -(-width // _MULTIPLE) * _MULTIPLE
            rows = [replace(each, offset=each.offset // width * padded) for each in gate_up.shards]
            self.gate_up = self._make(layer, "gate_up", (experts, 2 * padded, hidden), rows)
            self.down = self._make(layer, "down", (experts, hidden, padded), down.shards)
            shards = rows + down.shards
        else:
            self.dense = UnquantizedExpertsMethod()
            shards = self.dense.create(layer, gate_up, down, options)
        self.parts = {shard.module: Part(shard, self.stored, self._target(shard)) for shard in shards}
        return self.needed(shards, self.input_scales)

    def _make(
        self, layer: nn.Module, name: str, shape: tuple[int, int, int], shards: list[WeightShard]
    ) -> Fp8Experts:
        experts, n, k = shape
        groups: tuple[int, ...] = (experts, n)
        if self.stored.in_blocks:
            groups = experts, -(-n // GROUP) if is_aligned(shards) else n, -(-k // GROUP)
        return Fp8Experts(*make_weight(layer, (name, f"{name}_scale"), shape, groups, self.device))

    def _target(self, shard: WeightShard) -> Fp8Weight | Store:
        """What a shard fills. Ranks split down by its inputs."""
        assert shard.index is not None
        if self.dense is not None:
            return partial(self.dense.fill, shard)
        return (self.down if shard.dim else self.gate_up).expert(shard.index)

    def apply(self, x: Normed, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
        """The number of rows chooses the tile, and no bit depends on the tile: `deterministic` changes
        nothing."""
        if self.dense is not None:
            return self.dense.apply(x, routing, mlp)
        if mlp.gate_up_bias is not None or mlp.down_bias is not None:
            raise ValueError("experts in FP8 have no biases; load this model without quantization")
        rows, act = x.tensor(), mlp.activation  # the router has read the rows
        if not use_triton(rows):
            return fp8_experts_reference(rows, self.gate_up, self.down, routing.chosen(), act)
        num_experts = len(self.down.codes)
        choice = choose_experts(routing.num_pairs, num_experts, torch.bfloat16, rows.device)
        return fp8_experts_triton(rows, self.gate_up, self.down, routing.tiles(choice.rows), choice, act)
