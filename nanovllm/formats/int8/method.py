"""Int8Config: weights of 8-bit integers with a scale for each row or for all, as compressed-tensors' W8A8
files hold them. They are dequantised as they are loaded, on every device. Opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.formats.gathered import DequantisedConfig, Format, PartShard, owned, positive
from nanovllm.formats.stated import check_choices
from nanovllm.quantization.shards import FLOATS, WeightShard

_DUMMY_SCALE = 0.00027  # random codes then spread by 0.02


@dataclass(frozen=True)
class Int8Format(Format):
    """`weight` [N, K] in int8, `weight_scale` [N, 1] or [1] in the model's dtype, and for asymmetric weights
    `weight_zero_point` of its shape: (code - zero point) * scale."""

    name: str = "INT8"
    rows: bool = True  # each row has a scale; else all have one
    zeros: bool = False  # there are zero points

    def shards(self, part: WeightShard) -> list[PartShard]:
        (n, k), int8 = part.shape, (torch.int8,)
        shape = (n, 1) if self.rows else (1,)
        found = [
            PartShard.of("weight", part, (n, k), int8, covers=(1, 1)),
            PartShard.of("weight_scale", part, shape, FLOATS, loose=True, check=positive, dummy=_DUMMY_SCALE),
        ]
        if self.zeros:
            found.append(PartShard.of("weight_zero_point", part, shape, int8, loose=True, dummy=0.0))
        return found

    def values(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = owned(part)[0]
        own = slice(rows.start, rows.stop) if self.rows else slice(None)
        codes, scales = tensors["weight"].float(), tensors["weight_scale"].float()
        if self.zeros:
            codes -= tensors["weight_zero_point"].float()[own]
        return codes * scales[own]


class Int8Config(DequantisedConfig):
    """All modules that it is asked for are in INT8."""

    def leaves_out(self, name: str) -> bool:
        """The scales of activations too."""
        return name.endswith((".input_scale", ".input_zero_point")) or super().leaves_out(name)


def int_quantized(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Int8Config:
    """What a group of compressed-tensors with format "int-quantized" states. ValueError for what is not
    supported."""
    int8 = {"num_bits": (8,), "type": ("int", None), "symmetric": (True, False, None)}
    rows = {"strategy": ("channel", "tensor"), "dynamic": (False, None)}
    check_choices(f"{where}: weights", weights, int8 | rows)
    if inputs:
        check_choices(f"{where}: input_activations", inputs, int8 | {"strategy": ("token", "tensor")})
    return Int8Config(
        Int8Format(rows=weights["strategy"] == "channel", zeros=weights.get("symmetric") is False)
    )
