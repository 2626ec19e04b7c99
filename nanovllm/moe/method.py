"""ExpertsMethod: how the weights of all experts of a layer are stored, loaded and multiplied."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import ExpertMLP
from nanovllm.quantization.base import Normed
from nanovllm.quantization.shards import WeightMethod, WeightOptions, WeightShard

ROW_BYTES = 16  # of which rows of experts are multiples on a GPU, as tensor descriptors need it


class ExpertWeights(NamedTuple):
    """One of the two weights of E experts, [E, N, K]. The shards' `index` is the expert."""

    shape: tuple[int, int, int]
    shards: list[WeightShard]  # the parts that this rank holds


class ExpertsMethod(WeightMethod):
    """Stores, loads and multiplies the weights of E gated MLPs, this rank's part of each; the layer has their
    biases."""

    @abstractmethod
    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        """Register parameters on `layer`. What no shard fills is zero.

        gate_up: [E, 2I, H], the rows of gate, then those of up. down: [E, H, I]. Return the shards that a
        checkpoint must hold; if it holds the weights themselves, these are those of `gate_up` and `down`.
        """

    @abstractmethod
    def apply(self, x: Normed, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
        """x [T, H] -> the sum over a row's experts of its routing weight times their MLPs, [T, H].

        mlp: the activation, and this rank's biases.
        A row that is routed nowhere gives 0. Synchronises with no host.
        """
