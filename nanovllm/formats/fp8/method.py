"""Fp8LinearMethod: products with a weight in FP8 (E4M3), with float32 scales of rows or of blocks.

On GPUs that multiply FP8 values, activations are quantised too, each row by itself. Elsewhere the weight is
dequantised to the model's dtype as it is loaded. Opens no file and knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nanovllm.formats.fp8.experts import Fp8ExpertsMethod
from nanovllm.formats.fp8.kernels.fused import add_rms_norm_fp8, silu_and_mul_fp8
from nanovllm.formats.fp8.kernels.gemv import fp8_gemv, use_fp8_gemv
from nanovllm.formats.fp8.kernels.matmul import Fp8Weight, fp8_linear, use_scaled_mm
from nanovllm.formats.fp8.kernels.values import GROUP, Fp8Rows, quantise_rows
from nanovllm.formats.fp8.loading import (
    Fp8Method,
    Part,
    Store,
    Stored,
    is_aligned,
    make_weight,
    rows_in_blocks,
    splits_blocks,
)
from nanovllm.formats.stated import check_choices, check_expressions, names_of
from nanovllm.kernels.activation import Activation
from nanovllm.kernels.compat import HAS_TRITON
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.method import ExpertsMethod
from nanovllm.quantization.base import Gated, Kind, LinearMethod, Normed
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard
from nanovllm.quantization.unquantized import dense_method

_WHERE = "config.json: quantization_config"
_LEAST_CAPABILITY = (8, 9)  # of GPUs that multiply FP8 values
OTHER_CACHE = "the files' scales of a KV cache that is not in FP8 are not used"  # a note
_MULTIPLE = 16  # of the inputs of a product in FP8


def normed_rows(x: Normed, group: int | None) -> Fp8Rows:
    """The normalised rows in FP8, with one scale for each `group` columns; None: for each row. Computed once
    for all products of x."""
    rows = x.kept
    if not isinstance(rows, Fp8Rows) or rows.group != group:
        if x.is_computed:
            rows = quantise_rows(x.tensor(), group)
        else:
            assert x.weight is not None
            rows, x.total = add_rms_norm_fp8(x.x, x.residual, x.weight, x.eps, group)
        x.kept = rows
    return rows


def gated_rows(x: Gated, group: int | None) -> Fp8Rows:
    """The same of an activation."""
    if x.activation is Activation.SILU:
        return silu_and_mul_fp8(x.product, group)
    return quantise_rows(x.tensor(), group)


class Fp8LinearMethod(Fp8Method, LinearMethod):
    """Products in FP8, if `products`; else, and if the sizes do not allow them, those of the
    dequantised weight.

    A row of x is quantised by itself: with one scale, or one for each 128 columns if the weight has blocks.
    """

    # The dequantised weight, if there are no products in FP8.
    dense: LinearMethod | None
    weight: Fp8Weight
    options: WeightOptions

    def __init__(self, stored: Stored, products: bool = False, input_scales: bool = False) -> None:
        """input_scales: the checkpoint has scales for activations. They are not used: each row's own scale is
        at least as exact."""
        self.stored, self.products, self.input_scales = stored, products, input_scales

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        self.options, self.device, self.dense = options, options.device, None
        target: Fp8Weight | Store
        if self.products and shape[1] % _MULTIPLE == 0 and not splits_blocks(shards, self.stored):
            (n, k), groups = shape, shape[:1]
            if self.stored.in_blocks:
                groups = -(-n // GROUP) if is_aligned(shards) else n, -(-k // GROUP)
            self.weight = Fp8Weight(
                *make_weight(layer, ("weight", "weight_scale"), shape, groups, self.device)
            )
            target = self.weight
        else:
            self.dense = dense_method(shape, options)
            self.dense.create(layer, shape, shards, options)
            self.deterministic_needs_alignment = self.dense.deterministic_needs_alignment
            target = self._store
        self.parts = {shard.module: Part(shard, self.stored, target) for shard in shards}
        return self.needed(shards, self.input_scales)

    def _store(self, rows: torch.Tensor, first: int) -> None:
        assert self.dense is not None
        self.dense.load(WeightShard.rows(rows.shape, first), rows)

    def finish_loading(self) -> None:
        super().finish_loading()
        if self.dense is not None:
            self.dense.finish_loading()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.dense is not None:
            return self.dense.apply(x, bias)
        rows = x.flatten(0, -2)
        few = self._few_rows(rows)
        out = fp8_gemv(rows, self.weight, bias)[0] if few else self._multiply(self._quantised(rows), bias)
        return out.unflatten(0, x.shape[:-1])

    def apply_to_normed(
        self, x: Normed, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor | Gated:
        if self.dense is not None:
            return self.dense.apply_to_normed(x, bias, activation)
        rows = x.tensor() if x.is_computed else x.x
        if not self._few_rows(rows) or activation not in (None, Activation.SILU):
            out = self._multiply(normed_rows(x, self.stored.group), bias)
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
        return self._add(self._quantised(x), residual, bias)

    def apply_to_gated(
        self, x: Gated, residual: torch.Tensor | None, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.dense is not None:
            return super().apply_to_gated(x, residual, bias)
        return self._add(gated_rows(x, self.stored.group), residual, bias)

    def _few_rows(self, x: torch.Tensor) -> bool:
        return not self.options.deterministic and use_fp8_gemv(x)

    def _quantised(self, x: torch.Tensor) -> Fp8Rows:
        return quantise_rows(x, self.stored.group)

    def _multiply(self, x: Fp8Rows, bias: torch.Tensor | None) -> torch.Tensor:
        options = self.options
        return fp8_linear(x, self.weight, bias, None, options.dtype, options.deterministic)

    def _add(
        self, x: Fp8Rows, residual: torch.Tensor | None, bias: torch.Tensor | None
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
    ignored: tuple[str, ...] = ()  # as `_covers` reads them
    input_scales: bool = False
    products: bool = False

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> Fp8Config:
        """Read a quantization_config of quant_method "fp8". ValueError for what is not supported."""
        check_choices(
            _WHERE,
            stated,
            {
                "activation_scheme": ("dynamic", "static", None),
                "fmt": ("e4m3", "float8_e4m3fn", None),
                "weight_block_size": ([GROUP, GROUP], None),
            },
        )
        where = f"{_WHERE}: modules_to_not_convert"
        names = stated.get("modules_to_not_convert") or stated.get("ignored_layers") or []
        ignored = names_of(where, names, "names")
        check_expressions(where, ignored)
        stored = Stored.TENSOR if stated.get("weight_block_size") is None else Stored.BLOCKS
        static = stated.get("activation_scheme") == "static"
        cache = stated.get("kv_cache_scheme")
        in_fp8 = bool(cache) and is_fp8_cache(cache)
        return cls(stored, ignored, static, cache_scales=in_fp8)

    def method(self, path: str, kind: Kind) -> LinearMethod:
        if kind != "linear" or self._ignores(self.names.of(path)):
            return super().method(path, kind)
        return Fp8LinearMethod(self.stored, self.products, self.input_scales)

    def _ignores(self, names: Iterable[str]) -> bool:
        return any(_covers(name, each) for each in names for name in self.ignored)

    def experts(self, path: str) -> ExpertsMethod:
        if self._ignores((*self.names.of(path), *self.names.of_experts(path))):
            return UnquantizedExpertsMethod()
        return Fp8ExpertsMethod(self.stored, self.products, self.input_scales)

    def on(self, capability: tuple[int, int]) -> Fp8Config:
        return replace(self, products=multiplies_fp8(capability))

    def packed_rows(self, name: str, shape: Sequence[int], rows: Mapping[str, int]) -> Mapping[str, int]:
        return rows_in_blocks(name, shape, rows)

    @property
    def itemsize(self) -> float | None:
        return 1 if self.products else None

    @property
    def speed(self) -> float:
        return 2.0 if self.products else 1.0

    @property
    def note(self) -> str | None:
        if self.products:
            return None
        return (
            "the FP8 weights are dequantised as they are loaded, because this device does not multiply FP8 "
            "values (GPUs from compute capability 8.9 on do, with Triton)"
        )


def _covers(pattern: str, name: str) -> bool:
    """Whether a name of `modules_to_not_convert` is that of a module, of one that holds it, or the last parts
    of its name; it may be a regular expression for whole parts, from the first on."""
    if f".{pattern}." in f".{name}.":
        return True
    return re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name) is not None


def multiplies_fp8(capability: tuple[int, int]) -> bool:
    """Whether devices of this CUDA compute capability, (0, 0) for a CPU, multiply FP8 values."""
    return HAS_TRITON and capability >= _LEAST_CAPABILITY


def is_fp8_cache(scheme: Any) -> bool:
    """Whether a kv_cache_scheme is that of a cache in FP8, whose scales multiply what is stored."""
    if not isinstance(scheme, Mapping):
        return str(scheme).upper() == "FP8"
    return (scheme.get("num_bits", 8), scheme.get("type", "float")) == (8, "float")


_ROUTERS = ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")  # and gates of states
ON_THE_FLY = Fp8Config(ignored=_ROUTERS)
