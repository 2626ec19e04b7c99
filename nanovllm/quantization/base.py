"""LinearMethod: how the weight of one layer is stored, loaded and multiplied. A method never communicates.

A layer says what is multiplied, and which part of the weight this rank holds; the method does the rest.
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
    rms_of: torch.Tensor | None  # [T, K]: `out` is still to be divided by its rows' root mean square


class LinearMethod(ABC):
    """Stores, loads and multiplies one weight [N, K]. One instance serves one layer.

    A subclass says how to create, load and apply. It may override the products with something fused in.

    What takes memory on the device is in parameters of the layer. Loading again writes into the same memory,
    whose addresses CUDA graphs hold, and a load of all tensors needs nothing of what it held before.
    """

    norm_weight: torch.Tensor | None = (
        None  # of the norm before it, where loading multiplies this weight by it
    )

    @abstractmethod
    def create(
        self, layer: nn.Module, shape: tuple[int, int], shards: list[WeightShard]
    ) -> list[WeightShard]:
        """Register uninitialised parameters for a weight of `shape` on `layer`.

        `shards` are the parts of the whole weight that this rank holds. Return what a checkpoint must hold to
        fill the parameters; where it holds the weight itself, that is `shards`.
        """

    @abstractmethod
    def load(self, shard: WeightShard, source: WeightSource) -> None:
        """Take this rank's part of `source`, the checkpoint tensor of `shard`; again, any number of times."""

    def follows(self, norm_weight: torch.Tensor) -> None:
        """Learn the weight [K] of the norm before every product; a method may fold it into its own weight."""
        return

    def finish_loading(self) -> None:
        """Do what needs all tensors of a checkpoint. Called after them, before the next product.

        Raises ValueError when tensors were loaded again without others that they were folded into.
        """
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
        """Multiply `rms_norm` of x + residual, both [T, K]; with `silu`, `silu_and_mul` of the product.

        Without `silu` the result may still have to be divided, by whatever reads it next.
        """
        normed, total = add_rms_norm(x, residual, norm_weight, eps)
        out = self.apply(normed, bias)
        return NormedProduct(silu_and_mul(out) if silu else out, total, None)

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (the product with x [T, K], residual [T, N]), not added yet; or (their sum, None).

        The sum may take the memory of the residual.
        """
        return self.apply(x, bias), residual
