"""UnquantizedLinearMethod: a weight in the model's dtype; the number of rows selects the kernel.

A plain `QuantConfig` chooses it for every weight.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.doors import cpu_door
from nanovllm.kernels.activation import Activation
from nanovllm.kernels.gemv import gemv, use_gemv
from nanovllm.kernels.matmul import linear, use_linear
from nanovllm.quantization.base import Gated, Kind, LinearMethod, Normed
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource


class UnquantizedLinearMethod(LinearMethod):
    """x @ weight^T, with `gemv` for few rows, `linear` where that is faster, else torch.

    With `deterministic` it always uses `linear`, and the bits of a row do not depend on other rows.

    With `fuse` a product adds itself to the residual, if there is one rank. `linear` then rounds the sum
    once; cuBLAS does so for few rows, and for others rounds the product first, as if it were added apart.
    """

    weight: torch.Tensor  # [N, K]
    deterministic: bool
    fuse: bool

    def on(self, shape: tuple[int, ...], options: WeightOptions, kind: Kind) -> LinearMethod:
        return dense_method(shape, options, kind) if type(self) is UnquantizedLinearMethod else self

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """One parameter, `weight`."""
        self.deterministic, self.fuse = options.deterministic, options.fuse
        data = torch.empty(shape, dtype=options.dtype, device=options.device)
        dim, end = shards[0].dim, shards[-1].offset + shards[-1].length
        if end < shape[dim]:
            data.narrow(dim, end, shape[dim] - end).zero_()
        self.weight = nn.Parameter(data, requires_grad=False)
        layer.register_parameter("weight", self.weight)
        return shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        shard.copy(source, self.weight)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._few_rows(x):
            return gemv(x, self.weight, bias)[0]
        if self._by_linear(x):
            return linear(x.flatten(0, -2), self.weight, bias).unflatten(0, x.shape[:-1])
        return self.by_torch(x, bias)

    def apply_to_normed(
        self, x: Normed, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor | Gated:
        if x.is_computed or activation not in (None, Activation.SILU) or not self._few_rows(x.x):
            return super().apply_to_normed(x, bias, activation)
        silu = activation is not None
        out, x.total = gemv(
            x.x, self.weight, bias, norm_weight=x.weight, eps=x.eps, residual=x.residual, silu=silu
        )
        return out

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.fuse or bias is not None or self._few_rows(x):
            return self.apply(x, bias), residual
        if self._by_linear(x):
            return linear(x, self.weight, None, residual), None
        return residual.addmm_(x, self.weight.T), None

    def by_torch(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product, by the library of the device."""
        return F.linear(x, self.weight, bias)

    def _few_rows(self, x: torch.Tensor) -> bool:
        return not self.deterministic and use_gemv(x)

    def _by_linear(self, x: torch.Tensor) -> bool:
        return self.deterministic or use_linear(x, self.weight)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)

    def dense(self) -> torch.Tensor:
        """The weight [N, K]."""
        return self.weight

    def first_rows(self, num: int) -> UnquantizedLinearMethod:
        method = copy.copy(self)
        method.weight = self.weight[:num]
        return method


def dense_method(shape: tuple[int, ...], options: WeightOptions, kind: Kind | None = None) -> LinearMethod:
    """A new method for a weight in the model's dtype, the one that suits this device. kind: None within
    another method."""
    found: LinearMethod | None = None
    if options.device.type == "cpu":
        found = cpu_door("linear_method")(shape, options, kind)
    return found or UnquantizedLinearMethod()
