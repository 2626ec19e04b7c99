"""Mxfp4Config: experts in MXFP4, as gpt-oss's checkpoints hold them: blocks of 4 bits, and a scale for each.

The weights are dequantised as they are loaded. Opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.expert_tiles import ExpertMLP
from nanovllm.kernels.mxfp4 import BYTES, GROUP, SCALE_NAN, dequantise_mxfp4
from nanovllm.kernels.routing import Routing
from nanovllm.quantization.base import (
    ExpertsMethod,
    ExpertWeights,
    Normed,
    WeightOptions,
    WeightShard,
    WeightSource,
)
from nanovllm.quantization.experts import UnquantizedExpertsMethod
from nanovllm.quantization.unquantized import QuantConfig

_KEY = "config.json: quantization_config"
_DUMMY_SCALE = 120.0  # a byte: 2 ** -7, with which random codes have a standard deviation of 0.02


def mxfp4_shards(weight: WeightShard) -> tuple[WeightShard, WeightShard]:
    """The shards of the blocks [N, K / 32, 16] and scales [N, K / 32], uint8, of a weight [N, K].

    Start and length are those of the weight, in values. ValueError if K is no multiple of 32.
    """
    n, k = weight.shape
    if k % GROUP:
        raise ValueError(
            f"experts in MXFP4 need a hidden_size and an intermediate_size that are multiples of {GROUP}, "
            f"not {k}"
        )
    blocks = replace(weight, param="blocks", shape=(n, k // GROUP, BYTES), dtypes=(torch.uint8,))
    scales = replace(blocks, param="scales", shape=(n, k // GROUP), dummy=_DUMMY_SCALE)
    return blocks, scales


class Mxfp4ExpertsMethod(ExpertsMethod):
    """Products of the dequantised weights. Those of a projection become its part of the weight when blocks
    and scales are there, so an update must have both."""

    def __init__(self) -> None:
        self.dense = UnquantizedExpertsMethod()
        self._weights: dict[str | None, WeightShard] = {}  # by their modules
        self._waiting: dict[str | None, dict[str, torch.Tensor]] = {}

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        self._options = options
        weights = self.dense.create(layer, gate_up, down, options)
        self._weights = {weight.module: weight for weight in weights}
        return [shard for weight in weights for shard in mxfp4_shards(weight)]

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        weight = self._weights[shard.module]
        own = slice(weight.start, weight.start + weight.length)
        groups = slice(own.start // GROUP, -(-own.stop // GROUP))  # ranks may share one
        read = source[own] if weight.dim == 0 else source[:, groups]
        if shard.param == "scales" and (read == SCALE_NAN).any():
            raise ValueError(f"a scale is {SCALE_NAN}, which means NaN")
        waiting = self._waiting.setdefault(shard.module, {})
        waiting[shard.param] = torch.empty_like(read, device=self._options.device).copy_(read)
        if len(waiting) == 2:
            del self._waiting[shard.module]
            values = dequantise_mxfp4(waiting["blocks"], waiting["scales"], self._options.dtype)
            if weight.dim:
                values = values.narrow(1, own.start - groups.start * GROUP, weight.length)
            weight.place(self.dense.down if weight.dim else self.dense.gate_up).copy_(values)

    def finish_loading(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for module, tensors in waiting.items():
            [has], [missing] = tensors, {"blocks", "scales"} - tensors.keys()
            raise ValueError(f"{module}.{has} came without {missing}; pass both in one update")

    def apply(self, x: Normed, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
        return self.dense.apply(x, routing, mlp)


@dataclass(frozen=True)
class Mxfp4Config(QuantConfig):
    """Experts are in MXFP4, except those whose names match one of `skipped`."""

    skipped: tuple[str, ...] = ()  # patterns with *

    def experts(self, path: str) -> ExpertsMethod:
        if any(path.startswith(each) or fnmatchcase(path, each) for each in self.skipped):
            return super().experts(path)
        return Mxfp4ExpertsMethod()

    @property
    def keeps_rows(self) -> bool:
        return False

    @property
    def note(self) -> str | None:
        return "experts in MXFP4 are dequantised as they are loaded: they take four times the files' memory"

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> QuantConfig:
        """quant_method "mxfp4". ValueError for what is malformed."""
        names = stated.get("modules_to_not_convert") or []
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise ValueError(f"{_KEY}: modules_to_not_convert must be a list of names, not {names!r}")
        return cls(tuple(names))
