"""Mxfp4Config: experts in MXFP4, as gpt-oss's checkpoints hold them: blocks of 4 bits, and a scale for each.

A GPU multiplies them as they are, in bfloat16; elsewhere they are dequantised as they are loaded. Opens no
file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from nanovllm.formats.int4.experts import PackedExpertsMethod
from nanovllm.formats.int4.kernels.layout import MXFP4, check_mxfp4_scales, pack_mxfp4
from nanovllm.formats.int4.loading import keeps_bits
from nanovllm.formats.mxfp4.kernels.values import BYTES, GROUP, SCALE_NAN, dequantise_mxfp4
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.method import ExpertsMethod, ExpertWeights
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource

_KEY = "config.json: quantization_config"
_DUMMY_SCALE = 120.0  # a byte: 2 ** -7, with which random codes have a standard deviation of 0.02

_DEQUANTISED = "experts in MXFP4 are dequantised as they are loaded: they take four times the files' memory"
logger = logging.getLogger("nanovllm")


@lru_cache
def say_dequantised() -> None:
    """Once: of a device that could keep 4 bits, with another dtype or on ranks that share groups."""
    logger.warning("%s; dtype='bfloat16' and parts of multiples of %d would keep 4 bits", _DEQUANTISED, GROUP)


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


class Mxfp4ExpertsMethod(PackedExpertsMethod):
    """Products with blocks and scales as they are stored; elsewhere, and on ranks whose part of `down` begins
    or ends within a group, with the dequantised weights. A projection becomes its part of the weight when its
    blocks and scales are there, so an update must have both."""

    def __init__(self, packs: bool = True) -> None:
        """packs: keep 4 bits in a bfloat16 model, where kernels read them."""
        self._packs = packs
        self._weights: dict[str | None, WeightShard] = {}  # by their modules
        self._waiting: dict[str | None, dict[str, torch.Tensor]] = {}

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        """Words and scales of both weights; or dequantised ones."""
        self._options, self.deterministic = options, options.deterministic
        shards = gate_up.shards + down.shards
        splits = any((part.start % GROUP or part.length % GROUP) and part.dim for part in shards)
        if self._packs and keeps_bits(options) and options.dtype == torch.bfloat16 and not splits:
            self.gate_up = self.make(layer, "gate_up", gate_up, MXFP4, options)
            self.down = self.make(layer, "down", down, MXFP4, options)
        else:
            if self._packs:
                say_dequantised()
            self.dense = UnquantizedExpertsMethod()
            shards = self.dense.create(layer, gate_up, down, options)
        self._weights = {weight.module: weight for weight in shards}
        return [shard for weight in shards for shard in mxfp4_shards(weight)]

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        weight = self._weights[shard.module]
        own = slice(weight.start, weight.start + weight.length)
        groups = slice(own.start // GROUP, -(-own.stop // GROUP))  # ranks may share one
        read = source[own] if weight.dim == 0 else source[:, groups]
        if shard.param == "scales":
            if (read == SCALE_NAN).any():
                raise ValueError(f"a scale is {SCALE_NAN}, which means NaN")
            if self.dense is None:
                check_mxfp4_scales(read)
        waiting = self._waiting.setdefault(shard.module, {})
        waiting[shard.param] = torch.empty_like(read, device=self._options.device).copy_(read)
        if len(waiting) < 2:
            return
        del self._waiting[shard.module]
        if self.dense is None:
            part = self.part(weight)
            words, scales = pack_mxfp4(waiting["blocks"], waiting["scales"])
            part.words.copy_(words)
            part.scales.copy_(scales)
            return
        values = dequantise_mxfp4(waiting["blocks"], waiting["scales"], self._options.dtype)
        if weight.dim:
            values = values.narrow(1, own.start - groups.start * GROUP, weight.length)
        self.dense.fill(weight, values)

    def finish_loading(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for module, tensors in waiting.items():
            [has], [missing] = tensors, {"blocks", "scales"} - tensors.keys()
            raise ValueError(f"{module}.{has} came without {missing}; pass both in one update")


@dataclass(frozen=True)
class Mxfp4Config(QuantConfig):
    """Experts are in MXFP4, except those whose names match one of `skipped`."""

    skipped: tuple[str, ...] = ()  # patterns with *
    packs: bool = True  # whether a device can read 4 bits

    def experts(self, path: str) -> ExpertsMethod:
        if any(path.startswith(each) or fnmatchcase(path, each) for each in self.skipped):
            return UnquantizedExpertsMethod()
        return Mxfp4ExpertsMethod(self.packs)

    def on(self, capability: tuple[int, int]) -> QuantConfig:
        """The same for devices of this CUDA compute capability; elsewhere weights are dequantised."""
        return replace(self, packs=capability >= (8, 0))

    @property
    def expert_itemsize(self) -> float | None:
        """4 bits, and a byte for each group; None: dequantised."""
        return 0.5 + 1 / GROUP if self.packs else None

    @property
    def keeps_rows(self) -> bool:
        return False

    @property
    def note(self) -> str | None:
        if self.packs:
            return None
        return _DEQUANTISED

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> QuantConfig:
        """quant_method "mxfp4". ValueError for what is malformed."""
        names = stated.get("modules_to_not_convert") or []
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise ValueError(f"{_KEY}: modules_to_not_convert must be a list of names, not {names!r}")
        return cls(tuple(names))
