"""LinearMethod: how the weight of one layer is stored, loaded and multiplied. A method never communicates.

A layer defines what is multiplied and which part of the weight this rank holds; the method does the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.kernels.activation import Activation
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.quantization.shards import WeightShard, WeightSource


class Normed:
    """norm(x + residual), [T, K], computed once, by whoever multiplies it first.

    A method may compute it within its product; then it sets `total`.
    """

    __slots__ = ("_value", "eps", "residual", "weight", "x")

    def __init__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> None:
        """x, residual: [T, K]. weight: [K], of the RMSNorm with `eps`."""
        self.x = x
        self.residual = residual
        self.weight = weight
        self.eps = eps
        self._value: torch.Tensor | None = None

    @classmethod
    def computed(cls, value: torch.Tensor, total: torch.Tensor) -> Normed:
        """A norm that is computed already. `total` may have fewer rows, of a stream that ranks share."""
        normed = cls(total, None, None, 0.0)
        normed._value = value
        return normed

    @property
    def is_computed(self) -> bool:
        return self._value is not None

    def tensor(self) -> torch.Tensor:
        """The normalised rows."""
        if self._value is None:
            assert self.weight is not None
            self._value, self.total = add_rms_norm(self.x, self.residual, self.weight, self.eps)
        return self._value

    @property
    def total(self) -> torch.Tensor:
        """x + residual."""
        if self.residual is not None:
            self.tensor()
        return self.x

    @total.setter
    def total(self, total: torch.Tensor) -> None:
        self.x, self.residual = total, None


@dataclass(frozen=True, slots=True)
class Product:
    """The product of a weight [N, K] with x [T, K], plus a bias [N]; not computed yet.

    So rows can be dropped before it, and it can add itself to the residual stream.
    """

    method: LinearMethod
    x: torch.Tensor
    bias: torch.Tensor | None

    def __getitem__(self, rows: torch.Tensor) -> Product:
        return Product(self.method, self.x[rows], self.bias)

    @classmethod
    def cat(cls, products: Sequence[Product]) -> Product:
        """The product of one weight with the rows of all."""
        return cls(products[0].method, torch.cat([each.x for each in products]), products[0].bias)

    def tensor(self) -> torch.Tensor:
        """The product, [T, N]."""
        return self.method.apply(self.x, self.bias)

    def added_to(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `LinearMethod.apply_and_add`."""
        return self.method.apply_and_add(self.x, residual, self.bias)


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

    def apply_to_normed(
        self, x: Normed, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor:
        """The product with x [T, K]; with an activation, that of its two halves, [T, N / 2]."""
        out = self.apply(x.tensor(), bias)
        return out if activation is None else activation.and_mul(out)

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (the product with x [T, K], residual [T, N]), not added yet; or (their sum, None).

        The sum may use the memory of the residual.
        """
        return self.apply(x, bias), residual
