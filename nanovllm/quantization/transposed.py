"""TransposedLinearMethod: the weights of MLPs in the model's dtype, stored as [K, N]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.quantization.base import Kind, LinearMethod, WeightOptions, WeightShard, WeightSource
from nanovllm.quantization.unquantized import QuantConfig


class TransposedLinearMethod(LinearMethod):
    """x @ weight, with a weight [K, N]."""

    weight: torch.Tensor

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        data = torch.empty(shape[::-1], dtype=options.dtype, device=options.device)
        self.weight = nn.Parameter(data, requires_grad=False)
        layer.register_parameter("weight", self.weight)
        return shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        shard.copy(source, self.weight.T)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight.T, bias)


@dataclass(frozen=True)
class TransposedConfig(QuantConfig):
    """Chooses it for the modules whose names contain `modules` of config.json's quantization_config."""

    modules: str

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> TransposedConfig:
        return cls(stated.get("modules", ".mlp."))

    def method(self, path: str, kind: Kind) -> LinearMethod:
        chosen = kind == "linear" and self.modules in path
        return TransposedLinearMethod() if chosen else super().method(path, kind)
