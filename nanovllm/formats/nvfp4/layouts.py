"""Nvfp4Format: where tensors of a checkpoint hold NVFP4's codes, scales of groups and factor of the tensor.

ModelOpt's and compressed-tensors' files are values of it. Reads tensors; stores and multiplies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.formats.gathered import Format, PartShard, check_groups, not_negative, positive
from nanovllm.formats.nvfp4.kernels.values import GROUP, dequantise_nvfp4
from nanovllm.quantization.shards import WeightShard

SCALES = "weight_scale"
_DUMMY_FACTOR = 0.0068  # random codes with scales of 1 then spread by 0.02


@dataclass(frozen=True)
class Nvfp4Format(Format):
    """Codes [N, K / 2], two in a byte, scales [N, K / 16] in E4M3, and one float32 number for all of them."""

    name: str
    codes: str  # the last part of the tensor's name
    factor: str
    divides: bool  # scales are divided by the number, not multiplied

    def shards(self, part: WeightShard) -> list[PartShard]:
        (n, k), e4m3 = part.shape, (torch.float8_e4m3fn,)
        check_groups("NVFP4", part, GROUP)
        number = 1 / _DUMMY_FACTOR if self.divides else _DUMMY_FACTOR
        allowed = positive if self.divides else not_negative
        return [
            PartShard.of(self.codes, part, (n, k // 2), (torch.uint8,), covers=(1, 2)),
            PartShard.of(
                SCALES, part, (n, k // GROUP), e4m3, covers=(1, GROUP), check=_scales_of_groups, dummy=1.0
            ),
            PartShard.of(self.factor, part, (1,), (torch.float32,), loose=True, check=allowed, dummy=number),
        ]

    def scales(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The scales of groups in float32, of what the shards have read; 0 where the factor is 0."""
        scales, number = tensors[SCALES].float(), tensors[self.factor]
        scales = torch.where(number == 0, 0.0, scales)
        if scales.isnan().any():
            raise ValueError(f"{SCALES} has nan, and {self.factor} is {number.item()}; only with 0 it may")
        return scales

    def values(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        scales, number = self.scales(tensors), tensors[self.factor]
        scales = scales / number if self.divides else scales * number
        return dequantise_nvfp4(tensors[self.codes], scales)

    def factor_of(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """What multiplies codes times scales, float32 [1]."""
        return tensors[self.factor].reciprocal() if self.divides else tensors[self.factor]


def _scales_of_groups(values: torch.Tensor) -> str | None:
    """ModelOpt's are all NaN in a matrix of zeros."""
    return None if values.isnan().all() else not_negative(values)


MODELOPT = Nvfp4Format("ModelOpt's NVFP4", "weight", "weight_scale_2", divides=False)
COMPRESSED_TENSORS = Nvfp4Format(
    "compressed-tensors (nvfp4-pack-quantized)", "weight_packed", "weight_global_scale", divides=True
)
