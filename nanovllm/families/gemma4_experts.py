"""Gemma 4's experts (26B-A4B): a layer adds up an MLP and routed experts, each behind a norm of its own.

The router normalises rows by itself, and weighs each expert's result by a learned factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanovllm.families.kernels.joined_norms import sum_of_norms, two_norms
from nanovllm.layers.stream import RMSNorm, Step
from nanovllm.layers.weights import WeightLayer
from nanovllm.models.config import HFConfig, ModelConfig
from nanovllm.models.decoder import Build, GatedMLP
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.layers import Experts, MoESpec
from nanovllm.moe.replicated import ReplicatedLinear
from nanovllm.quantization.base import Normed
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource


class Gemma4Spec(MoESpec):
    """Its "shared" expert is the MLP beside the experts."""

    @classmethod
    def of(cls, hf: HFConfig, config: ModelConfig) -> Gemma4Spec:
        """ValueError for what is malformed."""
        spec = cls(
            num_experts=hf.integer("num_experts"),
            top_k=hf.integer("top_k_experts"),
            width=hf.integer("moe_intermediate_size"),
            activation=config.activation,
            shared_width=config.intermediate_size,
            shared_gate=False,
        )
        spec.check_size(config.hidden_size)
        return spec

    def record(self, layers: Sequence[Any], max_tokens: int, device: torch.device) -> torch.Tensor:
        record = torch.zeros((max_tokens, len(layers), self.top_k), dtype=torch.int16, device=device)
        for index, layer in enumerate(layers):
            layer.block.record = record[:, index]
        return record


class _InModelDtype(ReplicatedLinear):
    """Never quantised."""

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, QuantConfig())


class Router(WeightLayer):
    """Logits of the experts, and a factor of each expert. Its rows are the stream, normalised with the weight
    `scale`."""

    scale: torch.Tensor  # [hidden_size] float32, times hidden_size ** -0.5
    per_expert_scale: torch.Tensor  # [experts] float32

    def __init__(self, config: ModelConfig, spec: MoESpec) -> None:
        super().__init__()
        self._factor = config.hidden_size**-0.5
        self.proj = _InModelDtype(config.hidden_size, spec.num_experts)
        for name, size in (("scale", config.hidden_size), ("per_expert_scale", spec.num_experts)):
            self.declare((size,), [WeightShard.whole(name, (size,), dummy=1.0)])

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, replace(options, dtype=torch.float32), quant)

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        super().load(shard, source)
        if shard.param == "scale":
            self.scale *= self._factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], normalised -> [T, experts]."""
        logits: torch.Tensor = self.proj(x)
        return logits


class MLPBesideExperts(nn.Module):
    """The block of a layer. Its term is the same on all ranks, and no part of a sum."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        spec, size, eps = config.moe, config.hidden_size, config.rms_norm_eps
        assert isinstance(spec, MoESpec)
        self._top_k, self._tp = spec.top_k, build.tp
        self.record: torch.Tensor | None = None  # as in `MoE`
        self.mlp = GatedMLP(config, build)
        self.router = Router(config, spec)
        self.experts = Experts(size, spec, build.tp)
        self.pre_feedforward_layernorm_2 = RMSNorm(size, eps)
        self.post_feedforward_layernorm_1 = RMSNorm(size, eps)
        self.post_feedforward_layernorm_2 = RMSNorm(size, eps)

    def forward(self, x: Normed, step: Step) -> torch.Tensor:
        """x [T, hidden_size], the MLP's -> [T, hidden_size]."""
        dense = self.mlp(x, step).tensor()
        rows, before = x.total, self.pre_feedforward_layernorm_2
        slots = step.meta.slot_mapping if step.meta.cu_seqlens_q is None else None  # as in `MoE`
        normed, to_route = two_norms(rows, before.weight, self.router.scale, before.eps)
        routing = Routing(self.router(to_route), self._top_k, True, slots, self.router.per_expert_scale)
        routed = self.experts(Normed.computed(normed, normed), routing)
        if self.record is not None:
            self.record[: len(rows)] = routing.chosen().ids
        if self._tp.size > 1:  # one sum for both
            dense, routed = self._tp.all_reduce(torch.cat((dense, routed))).chunk(2)
        first, second = self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2
        return sum_of_norms(dense, routed, first.weight, second.weight, first.eps)
