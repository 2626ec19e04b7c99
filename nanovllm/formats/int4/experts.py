"""Int4ExpertsMethod: the weights of experts in 4 bits, from AWQ, GPTQ or compressed-tensors files.

As `Int4LinearMethod`: one layout on a GPU, dequantised weights elsewhere. Opens no file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.formats.int4.kernels.experts import choose_int4_experts, int4_expert_gemv
from nanovllm.formats.int4.kernels.layout import Int4Experts
from nanovllm.formats.int4.loading import FourBitMethod, Int4Method, register
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


class PackedExpertsMethod(FourBitMethod, ExpertsMethod):
    """Products with weights of experts in 4 bits, or with the dequantised ones, if `dense` holds them."""

    dense: UnquantizedExpertsMethod | None = None
    gate_up: Int4Experts
    down: Int4Experts
    deterministic: bool

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        """Words, scales and perhaps factors of both weights; dequantised `gate_up` and `down`."""
        self.deterministic, shards = options.deterministic, gate_up.shards + down.shards
        if not self.keeps(shards, options):
            self.dense = UnquantizedExpertsMethod()
            return self.prepare(self.dense.create(layer, gate_up, down, options), options)
        created = self.prepare(shards, options)
        self.gate_up = self._make(layer, "gate_up", gate_up, options)
        self.down = self._make(layer, "down", down, options)
        return created

    def _make(
        self, layer: nn.Module, name: str, weights: ExpertWeights, options: WeightOptions
    ) -> Int4Experts:
        """Parameters of one of the two weights, all zero."""
        group = self.group_of(weights.shards[0])
        made = Int4Experts.empty(*weights.shape, group, options.device, options.dtype)
        for part in ("words", "scales", "factors"):
            if (data := getattr(made, part)) is not None:
                register(layer, f"{name}_{part}", data)
        return made

    def fill(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        if self.dense is not None:
            self.dense.fill(part, self.format.values(part, tensors))
            return
        assert part.index is not None
        if part.dim:  # ranks split `down` by its inputs
            place = self.down.expert(part.index)
        else:
            place = self.gate_up.expert(part.index).rows(slice(part.offset, part.offset + part.length))
        self.store(place, part, tensors)

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
    """Weights that an `Int4Format` reads. Those whose inputs are in another order for each expert (desc_act,
    actorder) are dequantised on a GPU too."""

    def keeps(self, parts: Sequence[WeightShard], options: WeightOptions) -> bool:
        return not self.format.sorts and super().keeps(parts, options)
