"""Int4LinearMethod: a weight with 4 bits for each value, from AWQ, GPTQ or compressed-tensors files.

All formats become one layout as they are loaded, which kernels read; on a CPU, and in float32, the weight is
dequantised instead. Opens no file.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.formats.int4.kernels.layout import Int4Weight
from nanovllm.formats.int4.kernels.matmul import choose_int4_tile, int4_linear
from nanovllm.formats.int4.kernels.values import dequantise
from nanovllm.formats.int4.layouts import Int4Format
from nanovllm.formats.int4.loading import Int4Method, Store, name_of, register
from nanovllm.kernels.activation import Activation
from nanovllm.kernels.compat import multiprocessors, use_triton
from nanovllm.kernels.matmul import linear
from nanovllm.quantization.base import Gated, LinearMethod, Normed
from nanovllm.quantization.shards import WeightOptions, WeightShard
from nanovllm.quantization.unquantized import dense_method


class FourBitLinear(LinearMethod):
    """x @ weight^T of a weight in 4 bits: by `int4_linear`, or for many rows dequantised and multiplied. If
    its inputs are sorted, x is sorted with them.
    """

    weight: Int4Weight
    order: torch.Tensor | None = None  # [K]: the input of each column
    dtype: torch.dtype
    deterministic: bool
    fuse: bool
    _dense: LinearMethod | None = (
        None  # the dequantised weight, if the device or dtype has no product for 4 bits
    )

    def make(self, layer: nn.Module, shape: tuple[int, ...], group: int, options: WeightOptions) -> None:
        """Parameters `words` and `scales`, and those that a group has besides, all zero."""
        n, k = shape
        self.dtype, self.deterministic, self.fuse = options.dtype, options.deterministic, options.fuse
        self.weight = Int4Weight.empty(n, k, group, options.device)
        for name in ("words", "scales", "factors"):
            if (data := getattr(self.weight, name)) is not None:
                register(layer, name, data)

    def part(self, shard: WeightShard) -> Int4Weight:
        """The rows that a module's part of the weight fills."""
        end = shard.offset + shard.length
        return self.weight.rows(slice(shard.offset, end) if shard.dim == 0 else slice(None))

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._dense is not None:
            return self._dense.apply(x, bias)
        return self._product(x.flatten(0, -2), bias).unflatten(0, x.shape[:-1])

    def apply_to_normed(
        self, x: Normed, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor | Gated:
        if self._dense is not None:
            return self._dense.apply_to_normed(x, bias, activation)
        if activation not in (None, Activation.SILU):
            return super().apply_to_normed(x, bias, activation)
        return self._product(x.tensor(), bias, silu=activation is not None)

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._dense is not None:
            return self._dense.apply_and_add(x, residual, bias)
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
    """A weight that `format` reads, in 4 bits or dequantised."""

    def __init__(self, format: Int4Format, packs: bool = True) -> None:
        """packs: keep 4 bits, where a kernel can read them; else dequantise."""
        self.format = format
        self.packs = packs

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """`words`, `scales` and perhaps `order`; dequantised `weight`, and perhaps `order`."""
        created = self.prepare(shards, options)
        self._dense = None
        if not self.keeps_bits(options):
            self._dense = dense_method(shape, options)
            self._dense.create(layer, shape, shards, options)
            self.deterministic_needs_alignment = self._dense.deterministic_needs_alignment
        else:
            self.make(layer, shape, self.group_of(shards[0]), options)
        if self.format.sorts and self._dense is None:
            self.order = torch.arange(shape[1], dtype=torch.int32, device=options.device)
            register(layer, "order", self.order)
        return created

    def target(self, part: WeightShard) -> Int4Weight | Store:
        if (dense := self._dense) is not None:
            first = part.offset if part.dim == 0 else 0
            return lambda rows: dense.load(WeightShard.rows(rows.shape, first), rows)
        return self.part(part)

    def finish_loading(self) -> None:
        super().finish_loading()
        if self._dense is not None:
            self._dense.finish_loading()
        if self.order is not None and self.orders:
            first, *others = self.orders.values()
            if any(not torch.equal(first, other) for other in others):
                names = ", ".join(name_of(part, str(self.format.order)) for part in self.orders)
                raise ValueError(f"{names} differ, but these weights are one product")
            self.order.copy_(first)
