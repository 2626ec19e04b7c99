"""Fp8LinearMethod: a weight in FP8 (E4M3) with float32 scales, of rows or of blocks of 128 x 128.

On GPUs that multiply FP8 values, activations are quantised too, each row by itself. Elsewhere the weight is
dequantised to the model's dtype as it is loaded. Opens no file and knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.activation import Activation
from nanovllm.kernels.compat import HAS_TRITON
from nanovllm.kernels.fp8 import FP8, FP8_MAX, GROUP, Fp8Rows, quantise_rows
from nanovllm.kernels.fp8_gemv import fp8_gemv
from nanovllm.kernels.fp8_matmul import Fp8Weight, fp8_linear, quantises_inside, use_scaled_mm
from nanovllm.kernels.gemv import use_gemv
from nanovllm.quantization.base import (
    FLOATS,
    Gated,
    Kind,
    LinearMethod,
    Normed,
    WeightOptions,
    WeightShard,
    WeightSource,
    dtype_of,
)
from nanovllm.quantization.unquantized import QuantConfig, UnquantizedLinearMethod

_LEAST_CAPABILITY = (8, 9)  # of GPUs that multiply FP8 values
_MULTIPLE = 16  # of the inputs of a product in FP8
_CHUNK = 2**24  # elements that are quantised at once
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in files


class Stored(Enum):
    """How a checkpoint holds a weight [N, K]."""

    FLOATS = auto()  # in 16 or 32 bits; quantised as it is loaded, as ROWS are
    ROWS = auto()  # FP8, `weight_scale` [N, 1]
    TENSOR = auto()  # FP8, `weight_scale` [1]
    BLOCKS = auto()  # FP8, `weight_scale_inv` [ceil(N / 128), ceil(K / 128)]: factors, in spite of the name

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None: all."""
        return GROUP if self is Stored.BLOCKS else None

    def scales(self, weight: WeightShard) -> WeightShard:
        """The shard of the scales of a weight's shard. Every rank reads all of them."""
        n, k = weight.shape
        name = "weight_scale_inv" if self is Stored.BLOCKS else "weight_scale"
        shape = {Stored.ROWS: (n, 1), Stored.TENSOR: (1,)}.get(self, (-(-n // GROUP), -(-k // GROUP)))
        whole = replace(WeightShard.whole(name, shape), module=weight.module)
        return replace(whole, dtypes=_SCALE_DTYPES, scale=True)


def quantise_weight(
    weight: torch.Tensor, stored: Stored, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] as codes and float32 scales of the shape in checkpoints; with `scales`, with these.

    A scale is the largest absolute value / 448; that of zeros is 1.
    """
    n, k = weight.shape
    wide = weight.float()
    if stored is Stored.BLOCKS:
        padded = nn.functional.pad(wide, (0, -k % GROUP, 0, -n % GROUP))
        tiles = padded.view(-(-n // GROUP), GROUP, -(-k // GROUP), GROUP)
        scales = _scales(tiles.abs().amax((1, 3))) if scales is None else scales
        return _codes(tiles, scales[:, None, :, None]).view_as(padded)[:n, :k].contiguous(), scales
    if scales is None:
        top = wide.abs()
        scales = _scales(top.amax().view(1) if stored is Stored.TENSOR else top.amax(1, keepdim=True))
    return _codes(wide, scales), scales


def _scales(top: torch.Tensor) -> torch.Tensor:
    return torch.where(top == 0, 1.0, (top / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny))


def _codes(wide: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (wide / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


class _Part:
    """This rank's part of a weight: its rows and columns in the checkpoint's tensor, and where they go."""

    def __init__(self, shard: WeightShard, stored: Stored) -> None:
        self.shard, self.stored = shard, stored
        (n, k), end = shard.shape, shard.start + shard.length
        self.rows = range(shard.start, end) if shard.dim == 0 else range(n)
        self.columns = range(k) if shard.dim == 0 else range(shard.start, end)
        self.offset = shard.offset if shard.dim == 0 else 0
        self.arrived: set[str] = set()  # in this load: codes, scales, floats
        self.scales: torch.Tensor | None = None  # arrived before their codes

    def name(self, param: str) -> str:
        return param if self.shard.module is None else f"{self.shard.module}.{param}"

    @property
    def is_aligned(self) -> bool:
        """Whether its rows are whole blocks, in the checkpoint and in the parameter."""
        return self.rows.start % GROUP == 0 and self.offset % GROUP == 0

    def scales_of_rows(self, scales: torch.Tensor, first: int, rows: range) -> torch.Tensor:
        """The scales of some rows of the checkpoint's tensor, [rows, 1 or blocks of columns]; those that are
        given begin at row `first`."""
        if self.stored is Stored.TENSOR:
            return scales.reshape(1, 1).expand(len(rows), 1)
        if self.stored is not Stored.BLOCKS:
            return scales.reshape(-1, 1)[rows.start - first : rows.stop - first]
        blocks = torch.arange(rows.start, rows.stop, device=scales.device) // GROUP - first // GROUP
        return scales.reshape(-1, -(-self.shard.shape[1] // GROUP))[blocks]

    def factors(self, scales: torch.Tensor) -> torch.Tensor:
        """`scales_of_rows` as factors of this rank's columns."""
        if self.stored is not Stored.BLOCKS:
            return scales
        return scales[:, torch.arange(self.columns.start, self.columns.stop, device=scales.device) // GROUP]

    def pieces(self) -> Iterator[range]:
        """All rows, some at a time, in whole blocks."""
        step = max(GROUP, _CHUNK // max(1, self.shard.shape[1]) // GROUP * GROUP)
        first = self.rows.start // GROUP * GROUP if self.rows else 0
        for start in range(first, self.rows.stop if self.rows else 0, step):
            last = min(start + step, -(-self.rows.stop // GROUP) * GROUP, self.shard.shape[0])
            yield range(start, last)

    def own(self, piece: range) -> range:
        """This rank's rows among them."""
        return range(max(piece.start, self.rows.start), min(piece.stop, self.rows.stop))

    def place(self, rows: range) -> slice:
        """Where these rows of the checkpoint's tensor are in the parameter."""
        start = self.offset + rows.start - self.rows.start
        return slice(start, start + len(rows))


class Fp8LinearMethod(LinearMethod):
    """Products in FP8, if `products`; else, and if the sizes do not allow them, those of the
    dequantised weight.

    A row of x is quantised by itself: with one scale, or one for each 128 columns if the weight has blocks.
    """

    dense: UnquantizedLinearMethod | None  # the dequantised weight, if there are no products in FP8
    weight: Fp8Weight

    def __init__(self, stored: Stored, products: bool = False, input_scales: bool = False) -> None:
        """input_scales: the checkpoint has scales for activations. They are not used: each row's own scale is
        at least as exact."""
        self.stored, self.products, self.input_scales = stored, products, input_scales

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        self.parts = {shard.module: _Part(shard, self.stored) for shard in shards}
        self.options, parts = options, self.parts.values()
        whole_groups = self.stored.group is None or all(part.columns.start % GROUP == 0 for part in parts)
        if self.products and whole_groups and shape[1] % _MULTIPLE == 0:
            self.dense = None
            self._create_codes(layer, shape, all(part.is_aligned for part in parts))
        else:
            self.dense = UnquantizedLinearMethod()
            self.dense.create(layer, shape, shards, options)
        if self.stored is Stored.FLOATS:
            return shards
        weights = [replace(shard, dtypes=(FP8,), update_dtypes=FLOATS) for shard in shards]
        scales = [self.stored.scales(shard) for shard in shards]
        inputs = [replace(WeightShard.whole("input_scale", (1,)), module=shard.module) for shard in shards]
        inputs = [replace(each, dtypes=_SCALE_DTYPES, scale=True) for each in inputs]
        return weights + scales + (inputs if self.input_scales else [])

    def _create_codes(self, layer: nn.Module, shape: tuple[int, ...], aligned: bool) -> None:
        """Scales are one dimension in memory, because only rows of weights are checked for alignment."""
        n, k = shape
        groups = (n,) if self.stored.group is None else (-(-n // GROUP) if aligned else n, -(-k // GROUP))
        device = self.options.device
        for name, size, dtype in (("weight", shape, FP8), ("weight_scale", groups, torch.float32)):
            data = torch.zeros(size, dtype=dtype, device=device)
            parameter = nn.Parameter(data if name == "weight" else data.flatten(), requires_grad=False)
            layer.register_parameter(name, parameter)
        scales = layer.get_parameter("weight_scale").view(groups)
        self.weight = Fp8Weight(layer.get_parameter("weight"), scales)

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        part = self.parts[shard.module]
        if shard.param == "weight" and dtype_of(source) == FP8:
            part.arrived.add("codes")
            part.shard.copy(source, self.weight.codes if self.dense is None else self.dense.weight)
            if part.scales is not None:
                self._store_scales(part, part.scales)
        elif shard.param == "weight":
            part.arrived.add("floats")
            self._quantise(part, source)
        elif shard.param != "input_scale":
            part.arrived.add("scales")
            self._store_scales(part, source[...].to(self.options.device, torch.float32))

    def finish_loading(self) -> None:
        for part in self.parts.values():
            arrived = sorted(part.arrived)
            part.arrived, part.scales = set(), None
            scale = part.name(self.stored.scales(part.shard).param)
            if arrived in (["codes"], ["scales"]):
                other = f"without {scale}" if arrived == ["codes"] else f"which {scale} is for, is missing"
                raise ValueError(f"{part.name('weight')} in float8_e4m3fn, {other}; pass both in one update")
            if len(arrived) > 1 and "floats" in arrived:
                raise ValueError(f"{part.name('weight')} is not in FP8, and {scale} came with it; pass one")

    def _quantise(self, part: _Part, source: WeightSource) -> None:
        """Quantise a tensor of floats. Scales need whole rows, so every rank reads them."""
        scales, device = None, self.options.device
        if self.stored is Stored.TENSOR:
            tops = [source[a : a + GROUP].abs().amax().float() for a in range(0, part.shard.shape[0], GROUP)]
            scales = _scales(torch.stack(tops).amax().view(1).to(device))
        columns = slice(part.columns.start, part.columns.stop)
        for piece in part.pieces():
            rows = source[piece.start : piece.stop].to(device)
            codes, found = quantise_weight(rows, self.stored, scales)
            own = part.own(piece)
            codes = codes[own.start - piece.start : own.stop - piece.start, columns]
            factors = part.scales_of_rows(found, piece.start, own)
            if self.dense is None:
                self.weight.codes[part.place(own), : len(part.columns)] = codes
                self._store_own(part, own, factors)
            else:
                place = self.dense.weight[part.place(own), : len(part.columns)]
                place.copy_(codes.float() * part.factors(factors))

    def _store_scales(self, part: _Part, scales: torch.Tensor) -> None:
        """Store the scales of a checkpoint; those of a dequantised weight wait for its codes."""
        if self.dense is None:
            self._store_own(part, part.rows, part.scales_of_rows(scales, 0, part.rows))
        elif "codes" not in part.arrived:
            part.scales = scales
        else:
            for piece in part.pieces():
                own = part.own(piece)
                place = self.dense.weight[part.place(own), : len(part.columns)]
                place.mul_(part.factors(part.scales_of_rows(scales, 0, own)))

    def _store_own(self, part: _Part, rows: range, scales: torch.Tensor) -> None:
        """Store scales_of_rows for products in FP8."""
        place = part.place(rows)
        if self.stored.group is None:
            self.weight.scales[place] = scales[:, 0]
            return
        step = self.weight.group_rows
        first = part.columns.start // GROUP
        scales = scales[::step, first : first + self.weight.scales.shape[1]]
        self.weight.scales[place.start // step : place.start // step + len(scales)] = scales

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.dense is not None:
            return self.dense.apply(x, bias)
        rows = x.flatten(0, -2)
        few = self._few_rows(rows)
        out = fp8_gemv(rows, self.weight, bias)[0] if few else self._multiply(self._rows(rows), bias)
        return out.unflatten(0, x.shape[:-1])

    def apply_to_normed(
        self, x: Normed, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor | Gated:
        if self.dense is not None:
            return self.dense.apply_to_normed(x, bias, activation)
        rows = x.tensor() if x.is_computed else x.x
        if not self._few_rows(rows) or activation not in (None, Activation.SILU):
            out = self._multiply(x.quantised(self.stored.group), bias)
            return out if activation is None else Gated(out, activation)
        silu = activation is not None
        if x.is_computed:
            return fp8_gemv(rows, self.weight, bias, silu=silu)[0]
        norm, residual = x.weight, x.residual
        out, x.total = fp8_gemv(
            rows, self.weight, bias, norm_weight=norm, eps=x.eps, residual=residual, silu=silu
        )
        return out

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.dense is not None:
            return self.dense.apply_and_add(x, residual, bias)
        if self._few_rows(x):
            return fp8_gemv(x, self.weight, bias)[0], residual
        return self._add(self._rows(x), residual, bias)

    def apply_to_gated(
        self, x: Gated, residual: torch.Tensor | None, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.dense is not None:
            return super().apply_to_gated(x, residual, bias)
        return self._add(x.quantised(self.stored.group), residual, bias)

    def _few_rows(self, x: torch.Tensor) -> bool:
        return not self.options.deterministic and use_gemv(x)

    def _rows(self, x: torch.Tensor) -> Fp8Rows | torch.Tensor:
        """x in FP8, or as it is, if the product quantises it."""
        if quantises_inside(x, self.weight):
            return x
        return quantise_rows(x, self.stored.group)

    def _multiply(self, x: Fp8Rows | torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        options = self.options
        return fp8_linear(x, self.weight, bias, None, options.dtype, options.deterministic)

    def _add(
        self, x: Fp8Rows | torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype, deterministic = self.options.dtype, self.options.deterministic
        by_torch = not deterministic and use_scaled_mm(x, self.weight, dtype)
        if residual is None or bias is not None or by_torch or not self.options.fuse:
            return self._multiply(x, bias), residual
        return fp8_linear(x, self.weight, None, residual, dtype, deterministic), None


@dataclass(frozen=True)
class Fp8Config(QuantConfig):
    """All linear layers but `ignored` are in FP8; the LM head is not."""

    stored: Stored = Stored.FLOATS
    ignored: tuple[str, ...] = ()  # modules, or the last parts of their names
    input_scales: bool = False
    products: bool = False

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> Fp8Config:
        """Read a quantization_config of quant_method "fp8". ValueError for what is not supported."""
        check_choices(
            "config.json: quantization_config",
            stated,
            {
                "activation_scheme": ("dynamic", "static", None),
                "fmt": ("e4m3", None),
                "weight_block_size": ([GROUP, GROUP], None),
            },
        )
        names = stated.get("modules_to_not_convert") or stated.get("ignored_layers") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"config.json: quantization_config: modules_to_not_convert must be names, not {names!r}"
            )
        stored = Stored.TENSOR if stated.get("weight_block_size") is None else Stored.BLOCKS
        return cls(stored, tuple(names), stated.get("activation_scheme") == "static")

    def method(self, path: str, kind: Kind) -> LinearMethod:
        whole = f".{path}."
        if kind != "linear" or any(f".{name}." in whole for name in self.ignored):
            return super().method(path, kind)
        return Fp8LinearMethod(self.stored, self.products, self.input_scales)

    def on(self, capability: tuple[int, int]) -> Fp8Config:
        return replace(self, products=multiplies_fp8(capability))

    @property
    def note(self) -> str | None:
        if self.products:
            return None
        return (
            "the FP8 weights are dequantised as they are loaded, because this device does not multiply FP8 "
            "values (GPUs from compute capability 8.9 on do, with Triton)"
        )


def multiplies_fp8(capability: tuple[int, int]) -> bool:
    """Whether devices of this CUDA compute capability, (0, 0) for a CPU, multiply FP8 values."""
    return HAS_TRITON and capability >= _LEAST_CAPABILITY


def check_choices(where: str, stated: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    """ValueError unless each key has one of its supported values; None: it may be absent."""
    for key, values in supported.items():
        if stated.get(key) not in values:
            names = ", ".join(repr(value) for value in values if value is not None)
            raise ValueError(f"{where}: {key} {stated.get(key)!r} is not supported; supported: {names}")
