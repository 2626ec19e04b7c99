"""Mxfp4Config: experts in MXFP4, as gpt-oss's checkpoints hold them: blocks of 4 bits, and a scale for each.

A GPU multiplies them as they are, in bfloat16; elsewhere they are dequantised as they are loaded. Opens no
file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch

from nanovllm.formats.gathered import Format, PartShard, owned
from nanovllm.formats.int4.experts import PackedExpertsMethod
from nanovllm.formats.int4.kernels.layout import MXFP4, Int4Weight, check_mxfp4_scales, pack_mxfp4
from nanovllm.formats.int4.loading import keeps_bits
from nanovllm.formats.mxfp4.kernels.values import BYTES, GROUP, SCALE_NAN, dequantise_mxfp4
from nanovllm.formats.stated import FourBitConfig, names_of
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.method import ExpertsMethod
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard

_KEY = "config.json: quantization_config"
_DUMMY_SCALE = 120.0  # a byte: 2 ** -7, with which random codes have a standard deviation of 0.02

_DEQUANTISED = "experts in MXFP4 are dequantised as they are loaded: they take four times the files' memory"
logger = logging.getLogger("nanovllm")


@lru_cache
def say_dequantised() -> None:
    """Once: of a device that could keep 4 bits, with another dtype or on ranks that share groups."""
    logger.warning("%s; dtype='bfloat16' and parts of multiples of %d would keep 4 bits", _DEQUANTISED, GROUP)


@dataclass(frozen=True)
class Mxfp4Format(Format):
    """Blocks [N, K / 32, 16] and scales [N, K / 32], uint8, of a weight [N, K]."""

    name: str = "MXFP4"

    def shards(self, part: WeightShard) -> list[PartShard]:
        (n, k), octets = part.shape, (torch.uint8,)
        if k % GROUP:
            raise ValueError(
                "experts in MXFP4 need a hidden_size and an intermediate_size that are multiples of "
                f"{GROUP}, not {k}"
            )
        covers = (1, GROUP)  # ranks may share a group
        return [
            PartShard.of("blocks", part, (n, k // GROUP, BYTES), octets, covers=covers),
            PartShard.of("scales", part, (n, k // GROUP), octets, covers=covers, dummy=_DUMMY_SCALE),
        ]

    def values(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        columns, values = owned(part)[1], dequantise_mxfp4(tensors["blocks"], tensors["scales"])
        return values.narrow(1, columns.start % GROUP, len(columns))


class Mxfp4ExpertsMethod(PackedExpertsMethod):
    """Products with blocks and scales as they are stored, in a bfloat16 model; elsewhere, and on ranks whose
    part of `down` begins or ends within a group, with the dequantised weights."""

    def keeps(self, parts: Sequence[WeightShard], options: WeightOptions) -> bool:
        splits = any((part.start % GROUP or part.length % GROUP) and part.dim for part in parts)
        fits = keeps_bits(options) and options.dtype == torch.bfloat16 and not splits
        if self.packs and not fits:
            say_dequantised()
        return self.packs and fits

    def group_of(self, part: WeightShard) -> int:
        return MXFP4

    def check(self, shard: PartShard, read: torch.Tensor) -> None:
        if shard.param == "scales":
            if (read == SCALE_NAN).any():
                raise ValueError(f"a scale is {SCALE_NAN}, which means NaN")
            if self.dense is None:
                check_mxfp4_scales(read)

    def store(self, target: Int4Weight, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        words, scales = pack_mxfp4(tensors["blocks"], tensors["scales"])
        target.words.copy_(words)
        target.scales.copy_(scales)

    def finish_loading(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for part, tensors in waiting.items():
            [has], [missing] = tensors, {"blocks", "scales"} - tensors.keys()
            raise ValueError(f"{part.module}.{has} came without {missing}; pass both in one update")


@dataclass(frozen=True)
class Mxfp4Config(FourBitConfig):
    """Experts are in MXFP4, except those whose names match one of `skipped`."""

    skipped: tuple[str, ...] = ()  # patterns with *

    def experts(self, path: str) -> ExpertsMethod:
        if any(path.startswith(each) or fnmatchcase(path, each) for each in self.skipped):
            return UnquantizedExpertsMethod()
        return Mxfp4ExpertsMethod(Mxfp4Format(), self.packs)

    @property
    def expert_itemsize(self) -> float | None:
        """4 bits, and a byte for each group; None: dequantised."""
        return 0.5 + 1 / GROUP if self.packs else None

    @property
    def note(self) -> str | None:
        if self.packs:
            return None
        return _DEQUANTISED

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> QuantConfig:
        """quant_method "mxfp4". ValueError for what is malformed."""
        names = stated.get("modules_to_not_convert") or []
        return cls(names_of(f"{_KEY}: modules_to_not_convert", names))
