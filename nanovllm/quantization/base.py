"""LinearMethod: how the weight of one layer is stored, loaded and multiplied. A method never communicates.

A layer defines what is multiplied and which part of the weight this rank holds; the method does the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.quantization.shards import WeightShard, WeightSource


class NormedProduct(NamedTuple):
    """The product of a weight [N, K] with norm(x + residual)."""

    out: torch.Tensor  # [T, N], or [T, N / 2] after `silu_and_mul`
    total: torch.Tensor  # [T, K], x + residual


class LinearMethod(ABC):
    """Stores, loads and multiplies one weight [N, K]. One instance serves one layer.

    A subclass defines how to create, load and apply. It may override the fused products.

    All device memory belongs to parameters of the layer. Loading again writes to the same memory, whose
    addresses CUDA graphs hold. A load of all tensors does not depend on the previous content.
    """

    @abstractmethod
    def create(
        self, layer: nn.Module, shape: tuple[int, int], shards: list[WeightShard]
    ) -> list[WeightShard]:
        """Register uninitialised parameters for a weight of `shape` on `layer`.

        shards: the parts of the whole weight that this rank holds. Return the shards that a checkpoint must
        hold to fill the parameters; if it holds the weight itself, these are `shards`.
        """

    @abstractmethod
    def load(self, shard: WeightShard, source: WeightSource) -> None:
        """Load this rank's part of `source`, the checkpoint tensor of `shard`; can be called again."""

    def finish_loading(self) -> None:
        """Do the work that needs all tensors. Called after loading, before the next product."""
        return

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> x @ weight^T + bias [..., N]."""

    def apply_after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
        silu: bool = False,
    ) -> NormedProduct:
        """The product with `rms_norm` of x + residual, both [T, K]; with `silu`, `silu_and_mul` of it."""
        normed, total = add_rms_norm(x, residual, norm_weight, eps)
        out = self.apply(normed, bias)
        return NormedProduct(silu_and_mul(out) if silu else out, total)

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (the product with x [T, K], residual [T, N]), not added yet; or (their sum, None).

        The sum may use the memory of the residual.
        """
        return self.apply(x, bias), residual
