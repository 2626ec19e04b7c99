"""Nvfp4LinearMethod and Nvfp4ExpertsMethod: weights in NVFP4, with activations in 16 bits.

A GPU keeps the 4 bits, and multiplies them by the kernels of `formats/int4`; elsewhere the weights are
dequantised as they are loaded. Opens no file.
"""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.formats.gathered import DequantisedLinear, GatheredMethod
from nanovllm.formats.int4.experts import PackedExpertsMethod
from nanovllm.formats.int4.kernels.layout import FACTOR, NVFP4, Int4Weight, pack_nvfp4
from nanovllm.formats.int4.loading import keeps_bits
from nanovllm.formats.int4.method import FourBitLinear
from nanovllm.formats.nvfp4.layouts import Nvfp4Format
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.method import ExpertWeights
from nanovllm.quantization.base import Kind, LinearMethod
from nanovllm.quantization.shards import WeightOptions, WeightShard


class Nvfp4Method(GatheredMethod):
    """Loads weights that `format` reads. Each part of a weight keeps a factor of its own."""

    format: Nvfp4Format
    packs: bool  # keep 4 bits, where a kernel can read them; else dequantise

    def store(self, target: Int4Weight, tensors: dict[str, torch.Tensor]) -> None:
        """Fill the place of a module's part of a weight."""
        words, scales = pack_nvfp4(tensors[self.format.codes], self.format.scales(tensors))
        assert target.factors is not None
        target.words.copy_(words)
        target.scales.copy_(scales)
        target.factors.copy_((self.format.factor_of(tensors) * FACTOR).expand_as(target.factors))


class Nvfp4LinearMethod(Nvfp4Method, FourBitLinear):
    """x @ weight^T with 4 bits, or of the dequantised weight."""

    def __init__(self, format: Nvfp4Format, packs: bool = True) -> None:
        """As `Int4LinearMethod`."""
        self.format, self.packs = format, packs

    def on(self, shape: tuple[int, ...], options: WeightOptions, kind: Kind) -> LinearMethod:
        return self if self.packs and keeps_bits(options) else DequantisedLinear(self.format)

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """`words`, `scales` and `factors`."""
        self.make(layer, shape, NVFP4, options)
        return self.prepare(shards, options)

    def fill(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        self.store(self.part(part), tensors)


class Nvfp4ExpertsMethod(Nvfp4Method, PackedExpertsMethod):
    """The same of experts, each with a factor for each of its projections."""

    def __init__(self, format: Nvfp4Format, packs: bool = True) -> None:
        """As `Int4LinearMethod`."""
        self.format, self.packs = format, packs

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        """Words, scales and factors of both weights; dequantised `gate_up` and `down`."""
        self.deterministic = options.deterministic
        if not (self.packs and keeps_bits(options)):
            self.dense = UnquantizedExpertsMethod()
            return self.prepare(self.dense.create(layer, gate_up, down, options), options)
        self.gate_up = self.make(layer, "gate_up", gate_up, NVFP4, options)
        self.down = self.make(layer, "down", down, NVFP4, options)
        return self.prepare(gate_up.shards + down.shards, options)

    def fill(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        if self.dense is not None:
            self.dense.fill(part, self.format.values(part, tensors))
        else:
            self.store(self.part(part), tensors)
