"""MXFP8: weights as codes in E4M3 with a power of two (E8M0) for each 32 columns of a row. They
are dequantised as they are loaded, on every device: in bfloat16 that is exact. Opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.formats.gathered import DequantisedConfig, Format, PartShard, check_groups, positive
from nanovllm.formats.stated import check_choices
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightShard, scale_values

GROUP = 32  # columns that share a scale
_DUMMY_SCALE = 1.0  # as dummy codes are drawn as weights are


@dataclass(frozen=True)
class Mxfp8Format(Format):
    """`weight` [N, K] in E4M3, `weight_scale` [N, K / 32] in bytes; ModelOpt and compressed-tensors alike."""

    name: str = "MXFP8"

    def shards(self, part: WeightShard) -> list[PartShard]:
        (n, k), e8m0 = part.shape, (torch.uint8, torch.float8_e8m0fnu)
        check_groups(self.name, part, GROUP)
        codes = PartShard.of("weight", part, (n, k), (torch.float8_e4m3fn,), covers=(1, 1))
        scales = PartShard.of(
            "weight_scale", part, (n, k // GROUP), e8m0, covers=(1, GROUP), check=positive, dummy=_DUMMY_SCALE
        )
        return [codes, scales]

    def values(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        scales = scale_values(tensors["weight_scale"]).repeat_interleave(GROUP, 1)
        return tensors["weight"].float() * scales


MXFP8 = DequantisedConfig(Mxfp8Format())


def mxfp8_quantized(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> QuantConfig:
    """What a group of compressed-tensors with format "mxfp8-quantized" states. ValueError for what is not
    supported."""
    float8: dict[str, tuple[Any, ...]] = {"num_bits": (8,), "type": ("float",), "symmetric": (True, None)}
    float8 |= {"strategy": ("group",), "group_size": (GROUP,)}
    check_choices(f"{where}: weights", weights, float8 | {"dynamic": (False, None)})
    if inputs:
        check_choices(f"{where}: input_activations", inputs, float8)
    return MXFP8
