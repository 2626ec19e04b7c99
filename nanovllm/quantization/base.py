"""LinearMethod: how the weight of one layer is stored, loaded and multiplied.

A layer declares what is multiplied, and as `WeightShard`s which part of the weight this rank holds. The
method does the rest. It never communicates, and nothing here opens a file.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from nanovllm.kernels.activation import Activation
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.quantization.shards import WeightMethod, WeightOptions, WeightShard

# What multiplies or looks up a weight. An embedding that is also the LM head is "tied_embedding".
Kind = Literal["linear", "embedding", "tied_embedding", "lm_head"]


class Normed:
    """norm(x + residual), [T, K], computed once, by whoever multiplies it first.

    A method may compute it within its product; then it sets `total`.
    """

    __slots__ = ("_value", "eps", "kept", "residual", "weight", "x")

    def __init__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> None:
        """x, residual: [T, K]. weight: [K], of the RMSNorm with `eps`."""
        self.x = x
        self.residual = residual
        self.weight = weight
        self.eps = eps
        self._value: torch.Tensor | None = None
        self.kept: Any = None  # another form of the result, which a method has computed for further products

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


class Gated:
    """activation(the two halves of a product [T, 2N]), [T, N], computed by whoever multiplies it."""

    __slots__ = ("activation", "product")

    def __init__(self, product: torch.Tensor, activation: Activation) -> None:
        self.product = product
        self.activation = activation

    def __getitem__(self, rows: torch.Tensor) -> Gated:
        return Gated(self.product[rows], self.activation)

    def tensor(self) -> torch.Tensor:
        """The result, in the product's dtype."""
        return self.activation.and_mul(self.product)


def _tensor(x: torch.Tensor | Gated) -> torch.Tensor:
    return x.tensor() if isinstance(x, Gated) else x


@dataclass(frozen=True, slots=True)
class Product:
    """The product of a weight [N, K] with x [T, K], plus a bias [N]; not computed yet.

    So rows can be dropped before it, and it can add itself to the residual stream.
    """

    method: LinearMethod
    x: torch.Tensor | Gated
    bias: torch.Tensor | None
    scale: float = 1.0  # of product and bias

    def __getitem__(self, rows: torch.Tensor) -> Product:
        return replace(self, x=self.x[rows])

    def tensor(self) -> torch.Tensor:
        """The product, [T, N]."""
        if isinstance(self.x, Gated):
            out = self.method.apply_to_gated(self.x, None, self.bias)[0]
        else:
            out = self.method.apply(self.x, self.bias)
        return out if self.scale == 1.0 else out * self.scale

    def added_to(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `LinearMethod.apply_and_add`."""
        if self.scale != 1.0:
            return self.tensor(), residual
        if isinstance(self.x, Gated):
            return self.method.apply_to_gated(self.x, residual, self.bias)
        return self.method.apply_and_add(self.x, residual, self.bias)


class LinearMethod(WeightMethod):
    """Stores, loads and multiplies one weight [N, K].

    A subclass defines how to create, load and apply. It may override the fused products.
    """

    # Whether its products give a row the same bits in any step only if rows of a weight are aligned.
    deterministic_needs_alignment = True

    def on(self, shape: tuple[int, ...], options: WeightOptions, kind: Kind) -> LinearMethod:
        """The method for a weight of this shape on this device, if another one suits it better."""
        return self

    @abstractmethod
    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """Register parameters for a weight of `shape` on `layer`. What no shard fills is zero.

        shards: the parts of the whole weight that this rank holds. Return the shards that a checkpoint must
        hold to fill the parameters; if it holds the weight itself, these are `shards`.
        """

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> x @ weight^T + bias [..., N]."""

    def apply_to_normed(
        self, x: Normed, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor | Gated:
        """The product with x [T, K]; with an activation, that of its two halves, [T, N / 2], which the next
        product may compute."""
        out = self.apply(x.tensor(), bias)
        return out if activation is None else activation.and_mul(out)

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (the product with x [T, K], residual [T, N]), not added yet; or (their sum, None).

        The sum may use the memory of the residual.
        """
        return self.apply(x, bias), residual

    def apply_to_gated(
        self, x: Gated, residual: torch.Tensor | None, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `apply_and_add`; without a residual only the product, and None."""
        rows = x.tensor()
        return (
            (self.apply(rows, bias), None) if residual is None else self.apply_and_add(rows, residual, bias)
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, K] -> hidden @ weight^T, [n, N]: the product of an LM head, which may be float32 in a
        model in 16 bits."""
        return self.apply(hidden)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [T] of the weight, [T, K]. Only embeddings need it."""
        raise NotImplementedError(f"{type(self).__name__} has no rows to look up")

    def first_rows(self, num: int) -> LinearMethod:
        """A method for the first `num` rows, in the same memory. Only tied embeddings need it."""
        raise NotImplementedError(f"{type(self).__name__} has no rows to share")
