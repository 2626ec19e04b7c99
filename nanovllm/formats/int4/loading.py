"""How weights of 4 bits come from a checkpoint: the tensors of a module become its part of a weight.

All formats become one layout, or are dequantised. Opens no file and multiplies nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.formats.gathered import Format, GatheredMethod, owned
from nanovllm.formats.int4.kernels.layout import Int4Weight, pack_codes, pack_scales
from nanovllm.formats.int4.layouts import Int4Format
from nanovllm.quantization.shards import WeightOptions, WeightShard


class FourBitMethod(GatheredMethod):
    """Loads weights of a format that kernels read in 4 bits."""

    def __init__(self, format: Format, packs: bool = True) -> None:
        """packs: keep 4 bits, where a kernel can read them; else dequantise."""
        self.format, self.packs = format, packs

    def keeps(self, parts: Sequence[WeightShard], options: WeightOptions) -> bool:
        """Whether the weights keep 4 bits; else they are dequantised as they are loaded."""
        return self.packs and keeps_bits(options)

    @abstractmethod
    def group_of(self, part: WeightShard) -> int:
        """The group of the memory for a rank's part of a weight, see `Int4Weight`."""

    @abstractmethod
    def store(self, target: Int4Weight, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        """Fill the place of a module's part of a weight; all of its tensors are there."""


class Int4Method(FourBitMethod):
    """Loads weights that an `Int4Format` reads. Inputs whose groups are no neighbours are sorted by group."""

    format: Int4Format

    def prepare(self, parts: Sequence[WeightShard], options: WeightOptions) -> list[WeightShard]:
        self.orders: dict[WeightShard, torch.Tensor] = {}  # of the inputs, of each module's part
        return super().prepare(parts, options)

    def group_of(self, part: WeightShard) -> int:
        return self.format.group_here(part)

    def store(self, target: Int4Weight, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        columns, codes = owned(part)[1], tensors[self.format.codes]
        if self.format.order is not None and self.format.sorts:
            order = torch.argsort(tensors[self.format.order], stable=True)
            self.orders[part], codes = order.int(), codes[:, order]
        scales, zeros = self.format.scales_and_zeros(part, tensors)
        # The groups of the file that hold the first columns of ours.
        starts = torch.arange(0, len(columns), self.group_of(part), device=self.device) + columns.start
        whole = self.format.group_of(part.shape[1])
        of_file = starts // whole - columns.start // whole
        target.words.copy_(pack_codes(codes))
        target.scales[: len(starts)] = pack_scales(scales[of_file], zeros[of_file])


def keeps_bits(options: WeightOptions) -> bool:
    """Whether kernels read 4 bits on this device and for this dtype."""
    return options.dtype in (torch.float16, torch.bfloat16) and options.device.type != "cpu"


def register(layer: nn.Module, name: str, data: torch.Tensor) -> None:
    """Make `data` a parameter of the layer."""
    layer.register_parameter(name, nn.Parameter(data, requires_grad=False))
