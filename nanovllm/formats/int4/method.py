"""Int4LinearMethod: a weight with 4 bits for each value, from AWQ, GPTQ or compressed-tensors files.

All formats become one layout as they are loaded, which kernels read; on a CPU, and in float32, the weight is
dequantised instead. Opens no file.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.formats.gathered import DequantisedLinear
from nanovllm.formats.int4.kernels.layout import Int4Weight
from nanovllm.formats.int4.kernels.matmul import choose_int4_tile, int4_linear
from nanovllm.formats.int4.kernels.values import dequantise
from nanovllm.formats.int4.layouts import name_of
from nanovllm.formats.int4.loading import FourBitMethod, Int4Method, register
from nanovllm.kernels.activation import Activation
from nanovllm.kernels.compat import multiprocessors, use_triton
from nanovllm.kernels.matmul import linear
from nanovllm.quantization.base import Gated, Kind, LinearMethod, Normed
from nanovllm.quantization.shards import WeightOptions, WeightShard


class FourBitLinear(FourBitMethod, LinearMethod):
    """x @ weight^T of a weight in 4 bits: by `int4_linear`, or for many rows dequantised and multiplied. If
    its inputs are sorted, x is sorted with them.
    """

    weight: Int4Weight
    order: torch.Tensor | None = None  # [K]: the input of each column
    dtype: torch.dtype
    deterministic: bool
    fuse: bool

    def on(self, shape: tuple[int, ...], options: WeightOptions, kind: Kind) -> LinearMethod:
        return self if self.keeps((), options) else DequantisedLinear(self.format)

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """Parameters `words` and `scales`, and those that a group has besides, all zero."""
        created, (n, k) = self.prepare(shards, options), shape
        self.dtype, self.deterministic, self.fuse = options.dtype, options.deterministic, options.fuse
        self.weight = Int4Weight.empty(n, k, self.group_of(shards[0]), options.device)
        for name in ("words", "scales", "factors"):
            if (data := getattr(self.weight, name)) is not None:
                register(layer, name, data)
        return created

    def fill(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        end = part.offset + part.length
        rows = self.weight.rows(slice(part.offset, end) if part.dim == 0 else slice(None))
        self.store(rows, part, tensors)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(x.flatten(0, -2), bias).unflatten(0, x.shape[:-1])

    def apply_to_normed(
        self, x: Normed, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor | Gated:
        if activation not in (None, Activation.SILU):
            return super().apply_to_normed(x, bias, activation)
        return self._product(x.tensor(), bias, silu=activation is not None)

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.fuse or bias is not None:
            return self.apply(x, bias), residual
        return self._product(x, None, residual), None

    def _product(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        """x [T, K] @ weight^T + bias + residual, or SiLU of the halves; the residual is overwritten."""
        weight, order = self.weight, self.order
        if order is not None:
            x = x.index_select(1, order)
        if use_triton(x):
            processors = multiprocessors(x.device)
            tile = choose_int4_tile(len(x), weight, processors, self.deterministic)
            if tile is not None:
                return int4_linear(x, weight, bias, residual, silu=silu, tile=tile)
        dense = dequantise(weight.words, weight, self.dtype)
        if self.deterministic:
            out = linear(x, dense, bias, residual)
        elif residual is not None:
            out = residual.addmm_(x, dense.T)
        else:
            out = F.linear(x, dense, bias)
        return Activation.SILU.and_mul(out) if silu else out


class Int4LinearMethod(Int4Method, FourBitLinear):
    """A weight that an `Int4Format` reads, with its order of inputs, if that is not theirs."""

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """`words`, `scales` and perhaps `order`."""
        created = super().create(layer, shape, shards, options)
        if self.format.sorts:
            self.order = torch.arange(shape[1], dtype=torch.int32, device=options.device)
            register(layer, "order", self.order)
        return created

    def finish_loading(self) -> None:
        super().finish_loading()
        if self.order is not None and self.orders:
            first, *others = self.orders.values()
            if any(not torch.equal(first, other) for other in others):
                names = ", ".join(name_of(part, str(self.format.order)) for part in self.orders)
                raise ValueError(f"{names} differ, but these weights are one product")
            self.order.copy_(first)
