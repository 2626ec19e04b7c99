"""Int4LinearMethod: a weight with 4 bits for each value, from AWQ, GPTQ or compressed-tensors files.

All formats become one layout as they are loaded, which kernels read; on a CPU, and in float32, the weight is
dequantised instead. Opens no file.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import nn

from nanovllm.kernels.activation import Activation
from nanovllm.kernels.compat import multiprocessors, use_triton
from nanovllm.kernels.int4_layout import (
    BLOCK,
    SUB,
    Int4Weight,
    pack_codes,
    pack_scales,
)
from nanovllm.kernels.int4_matmul import choose_int4_tile, int4_linear
from nanovllm.kernels.int4_values import dequantise
from nanovllm.kernels.matmul import linear
from nanovllm.quantization.base import Gated, LinearMethod, Normed, WeightOptions, WeightShard, WeightSource
from nanovllm.quantization.int4_formats import Int4Format, Int4Shard
from nanovllm.quantization.unquantized import UnquantizedLinearMethod, torch_linear

_MIDDLE = 8  # the zero point of formats without zero points


class Int4LinearMethod(LinearMethod):
    """x @ weight^T of a weight that `format` reads: by `int4_linear`, or for many rows dequantised
    and multiplied.

    The tensors of a module become its part of the weight when all of them are there, so an update must have
    all or none. Inputs whose groups are no neighbours are sorted by group, and x with them.
    """

    group: int  # columns of this rank's weight that share a scale
    weight: Int4Weight
    order: torch.Tensor | None = None  # [K]: the input of each column

    def __init__(self, format: Int4Format, packs: bool = True) -> None:
        """packs: keep 4 bits, where a kernel can read them; else dequantise."""
        self.format = format
        self.packs = packs

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """`words`, `scales` and perhaps `order`; dequantised `weight`, and perhaps `order`."""
        (n, k), whole = shape, shards[0].shape[1]
        created: list[WeightShard] = [made for shard in shards for made in self.format.shards(shard)]
        self.group = self._group(whole, k)
        self._check_split(whole, k)
        self.dtype, self.device = options.dtype, options.device
        self.deterministic, self.fuse = options.deterministic, options.fuse
        self._waiting: dict[WeightShard, dict[str, torch.Tensor]] = {}
        self._orders: dict[WeightShard, torch.Tensor] = {}
        self._dense: UnquantizedLinearMethod | None = None
        if not (self.packs and keeps_bits(options)):
            self._dense = UnquantizedLinearMethod()
            self._dense.create(layer, shape, shards, options)
        else:
            self.weight = Int4Weight.empty(n, k, self.group, options.device)
            self._register(layer, "words", self.weight.words)
            self._register(layer, "scales", self.weight.scales)
        if self.format.sorts and self._dense is None:
            self.order = torch.arange(k, dtype=torch.int32, device=options.device)
            self._register(layer, "order", self.order)
        return created

    @staticmethod
    def _register(layer: nn.Module, name: str, data: torch.Tensor) -> None:
        layer.register_parameter(name, nn.Parameter(data, requires_grad=False))

    def _group(self, whole: int, k: int) -> int:
        """The largest groups that do not cross the edges of the ranks' parts, and that kernels can read: a
        scale may be repeated."""
        group = gcd(self.format.group_of(whole), k)
        return group if group % BLOCK == 0 else gcd(group, BLOCK)

    def _check_split(self, whole: int, k: int) -> None:
        if self.group < SUB:
            unit = gcd(self.format.group_of(whole), BLOCK)
            sizes = [str(size) for size in range(1, 65) if whole % (size * min(unit, SUB)) == 0]
            raise ValueError(
                f"{whole} inputs in groups of {self.format.group_of(whole)} cannot be split into parts of "
                f"{k}: parts must be multiples of {SUB}; tensor_parallel_size could be {', '.join(sizes)}"
            )
        if self.format.sorts and k < whole:
            raise ValueError(
                f"{self.format.name} with desc_act (actorder) cannot be split over ranks, because a rank's "
                f"inputs have parts of all groups; use tensor_parallel_size=1, or a file without desc_act"
            )

    # -- loading ---------------------------------------------------------------------------------------------

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        assert isinstance(shard, Int4Shard) and shard.weight is not None
        part = shard.weight
        whole = self.format.group_of(part.shape[1])
        rows, columns = _owned(part)
        groups = range(columns.start // whole, -(-columns.stop // whole))
        if shard.role == "codes":
            read = self.format.read_codes(source, rows, columns)
        elif shard.role == "scales":
            read = self.format.read_scales(source, rows, groups)
        elif shard.role == "zeros":
            read = self.format.read_zeros(source, rows, groups)
        else:
            read = source[:]
        waiting = self._waiting.setdefault(part, {})
        waiting[shard.role] = torch.empty_like(read, device=self.device).copy_(read)
        if len(waiting) == len(self.format.shards(part)):
            del self._waiting[part]
            self._fill(part, waiting)

    def _fill(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        """Store one module's part of the weight. All of its tensors are there."""
        rows, columns = _owned(part)
        codes, scales = tensors["codes"], tensors["scales"].to(self.dtype)
        zeros = tensors.get("zeros", torch.tensor(_MIDDLE, device=self.device)).expand_as(scales)
        if "order" in tensors:
            codes = self._sorted(part, codes, tensors["order"])
        if not (scales > 0).all() or not scales.isfinite().all():
            raise ValueError(f"{_name(part, self.format.scales)} has values that {self.dtype} cannot hold")
        # The groups of the file that hold the first columns of ours.
        starts = torch.arange(0, len(columns), self.group, device=self.device) + columns.start
        whole = self.format.group_of(part.shape[1])
        of_file = starts // whole - columns.start // whole
        scales, zeros = scales[of_file], zeros[of_file]
        place = slice(part.offset, part.offset + len(rows)) if part.dim == 0 else slice(None)
        if self._dense is None:
            self.weight.words[:, place] = pack_codes(codes)
            self.weight.scales[: len(starts), place] = pack_scales(scales, zeros)
            return
        values = dequantised(codes, scales, zeros, self.group)
        if self.format.sorts:  # back: x stays as it is
            values = torch.empty_like(values).index_copy_(1, self._orders[part].long(), values)
        self._dense.weight[place] = values

    def _sorted(self, part: WeightShard, codes: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """The columns of codes [n, K] sorted by `groups` [K], in which they are. Dummy weights have one."""
        if not self.format.sorts or not groups.any():
            order = torch.arange(len(groups), device=groups.device)
        else:
            order = torch.argsort(groups, stable=True)
        self._orders[part] = order.int()
        return codes[:, order] if self.format.sorts else codes

    def finish_loading(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for part, tensors in waiting.items():
            missing = [shard.param for shard in self.format.shards(part) if shard.role not in tensors]
            has = [shard.param for shard in self.format.shards(part) if shard.role in tensors]
            raise ValueError(
                f"{part.module or 'this weight'}: {', '.join(has)} came without {', '.join(missing)}; "
                "pass all of them together"
            )
        if self.order is not None and self._orders:
            first, *others = self._orders.values()
            if any(not torch.equal(first, other) for other in others):
                names = ", ".join(_name(part, str(self.format.order)) for part in self._orders)
                raise ValueError(f"{names} differ, but these weights are one product")
            self.order.copy_(first)

    # -- products --------------------------------------------------------------------------------------------

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
            out = torch_linear(x, dense, bias)
        return Activation.SILU.and_mul(out) if silu else out


def keeps_bits(options: WeightOptions) -> bool:
    """Whether kernels read 4 bits on this device and for this dtype."""
    return options.dtype in (torch.float16, torch.bfloat16) and options.device.type != "cpu"


def dequantised(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int) -> torch.Tensor:
    """(codes [n, K] uint8 - zeros) * scales [groups, n], [n, K] in the dtype of the scales."""
    scales, zeros = (each.repeat_interleave(group, 0).T for each in (scales.float(), zeros))
    return (codes.float() - zeros) * scales


def _owned(part: WeightShard) -> tuple[range, range]:
    """The rows and the columns of the whole weight that a rank holds."""
    own = range(part.start, part.start + part.length)
    n, k = part.shape
    return (own, range(k)) if part.dim == 0 else (range(n), own)


def _name(part: WeightShard, param: str) -> str:
    return param if part.module is None else f"{part.module}.{param}"
