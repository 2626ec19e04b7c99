"""Nvfp4LinearMethod and Nvfp4ExpertsMethod: weights in NVFP4, with activations in 16 bits.

A GPU keeps the 4 bits, and multiplies them by the kernels of `formats/int4`; elsewhere the weights are
dequantised as they are loaded. Opens no file.
"""

from __future__ import annotations

import torch

from nanovllm.formats.int4.experts import PackedExpertsMethod
from nanovllm.formats.int4.kernels.layout import FACTOR, NVFP4, Int4Weight, pack_nvfp4
from nanovllm.formats.int4.loading import FourBitMethod
from nanovllm.formats.int4.method import FourBitLinear
from nanovllm.formats.nvfp4.layouts import Nvfp4Format
from nanovllm.quantization.shards import WeightShard


class Nvfp4Method(FourBitMethod):
    """Loads weights that an `Nvfp4Format` reads. Each part of a weight keeps a factor of its own."""

    format: Nvfp4Format

    def group_of(self, part: WeightShard) -> int:
        return NVFP4

    def store(self, target: Int4Weight, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        words, scales = pack_nvfp4(tensors[self.format.codes], self.format.scales(tensors))
        assert target.factors is not None
        target.words.copy_(words)
        target.scales.copy_(scales)
        target.factors.copy_((self.format.factor_of(tensors) * FACTOR).expand_as(target.factors))


class Nvfp4LinearMethod(Nvfp4Method, FourBitLinear):
    """x @ weight^T with 4 bits, or of the dequantised weight."""


class Nvfp4ExpertsMethod(Nvfp4Method, PackedExpertsMethod):
    """The same of experts, each with a factor for each of its projections."""
