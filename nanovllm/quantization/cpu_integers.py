"""Weights of 8 or 4 bits in groups of 32 inputs on CPUs: quantised as they are loaded, or read as a GGUF file
stores them. Activations become int8, each group of a row by itself. Opens no file and knows no model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from nanovllm import isa
from nanovllm.kernels.cpu.int_layout import FORMATS, GROUP, IntWeight, from_blocks
from nanovllm.kernels.cpu.int_matmul import int_embed, int_linear
from nanovllm.kernels.cpu.int_quantise import quantise
from nanovllm.quantization.base import Kind, LinearMethod, WeightOptions, WeightShard, WeightSource
from nanovllm.quantization.unquantized import QuantConfig

_ROUTERS = ("gate", "shared_expert_gate")
_PRODUCTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # modules that are multiplied as one
_ROWS = 4096  # that are read and quantised at once


@runtime_checkable
class _Blocks(Protocol):
    """A tensor of a file whose blocks can be read as they are stored."""

    stored_as: str

    def blocks(self, rows: slice, columns: slice) -> torch.Tensor:
        """Blocks [rows, groups, bytes], uint8."""


class IntegerLinearMethod(LinearMethod):
    """x @ weight^T with integers. Blocks of a file in the same format are kept bit for bit."""

    deterministic_needs_alignment = False
    weight: IntWeight

    def __init__(self, format: str, as_stored: bool = False) -> None:
        """format: one of FORMATS. as_stored: of a file in this format."""
        self.format = FORMATS[format]
        self.as_stored = as_stored

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """`packed`, the codes and scales. ValueError if ranks would split groups of a file."""
        n, k = shape
        for shard in shards:
            if self.as_stored and shard.dim == 1 and (shard.start % GROUP or k % GROUP):
                raise ValueError(
                    f"{shard.shape[1]} inputs in groups of {GROUP} cannot be split into parts of {k}; use "
                    "another tensor_parallel_size, or quantization='dequantize'"
                )
        self.dtype, self.fuse = options.dtype, options.fuse
        self.weight = IntWeight.zeros(self.format, n, k, options.device)
        layer.register_parameter("packed", nn.Parameter(self.weight.data, requires_grad=False))
        return shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        part = slice(shard.start, shard.start + shard.length)
        rows, columns = (
            (slice(0, shard.shape[0]), part) if shard.dim == 1 else (part, slice(0, shard.shape[1]))
        )
        first = 0 if shard.dim == 1 else shard.offset
        for start in range(rows.start, rows.stop, _ROWS):
            some = slice(start, min(start + _ROWS, rows.stop))
            if isinstance(source, _Blocks) and source.stored_as == self.format.name and self.as_stored:
                codes, scales = from_blocks(self.format, source.blocks(some, columns))
            else:
                codes, scales = quantise(self.format, source[some, columns])
            self.weight.store(first + start - rows.start, codes, scales)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return int_linear(x.flatten(0, -2), self.weight, bias).unflatten(0, x.shape[:-1])

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.fuse or residual.dtype != x.dtype:
            return self.apply(x, bias), residual
        return int_linear(x, self.weight, bias, residual), None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return int_embed(ids, self.weight, self.dtype)

    def first_rows(self, num: int) -> IntegerLinearMethod:
        method = copy.copy(self)
        method.weight = self.weight.first_rows(num)
        return method


def _no_kernels(capability: tuple[int, int]) -> str | None:
    """Why there are no kernels for integers on a device, and what to do; None if there are."""
    if capability != (0, 0):
        return "its kernels are for CPUs; on a GPU use quantization='fp8', or leave it out"
    return None if isa.has_kernels() else isa.HINT


@dataclass(frozen=True)
class IntegerConfig(QuantConfig):
    """Weights become integers as they are loaded: linear layers in `format`, embeddings and the LM head in 8
    bits. Routers, norms, biases and experts stay in the model's dtype."""

    option: str
    format: str

    def method(self, path: str, kind: Kind) -> LinearMethod:
        if path.rpartition(".")[2] in _ROUTERS:
            return super().method(path, kind)
        return IntegerLinearMethod(self.format if kind == "linear" else "Q8_0")

    def on(self, capability: tuple[int, int]) -> QuantConfig:
        """ValueError if the device has no kernels."""
        if reason := _no_kernels(capability):
            raise ValueError(f"quantization={self.option!r} cannot be used here: {reason}")
        return self

    @property
    def itemsize(self) -> float | None:
        return FORMATS[self.format].itemsize


@dataclass(frozen=True)
class StoredConfig(QuantConfig):
    """A GGUF file: weights in one of FORMATS stay as they are stored, others are dequantised. The modules of
    one product must have one format, else they are dequantised. So are experts."""

    types: Mapping[str, str] = field(default_factory=dict, hash=False)  # of quantised modules, by their path
    kernels: bool = True

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> StoredConfig:
        """quant_method "gguf", which only GGUF files have. ValueError for anything else."""
        types = stated.get("types")
        if not isinstance(types, dict):
            raise ValueError("config.json: quant_method 'gguf' is that of GGUF files; pass the path of one")
        return cls(types)

    def method(self, path: str, kind: Kind) -> LinearMethod:
        found = self._format(path)
        return super().method(path, kind) if found is None else IntegerLinearMethod(found, as_stored=True)

    def _format(self, path: str) -> str | None:
        """What a module's weight is kept in; None: the model's dtype."""
        parent, _, name = path.rpartition(".")
        names = next((each for each in _PRODUCTS if name in each), (name,))
        first, *others = {self.types.get(f"{parent}.{each}" if parent else each) for each in names}
        return first if self.kernels and not others and first in FORMATS else None

    def on(self, capability: tuple[int, int]) -> QuantConfig:
        return replace(self, kernels=_no_kernels(capability) is None)

    @property
    def itemsize(self) -> float | None:
        """That of most weights of layers."""
        kept = Counter(self._format(path) for path in self.types if ".layers." in path)
        [(most, _)] = kept.most_common(1) or [(None, 0)]
        return None if most is None else FORMATS[most].itemsize

    @property
    def note(self) -> str | None:
        kept = Counter(found for path in self.types if (found := self._format(path)) is not None)
        rest = Counter(stored for path, stored in self.types.items() if self._format(path) is None)

        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))

        if not kept:
            return f"GGUF weights are dequantised as they are loaded: {listed(rest)}"
        also = f"; dequantised: {listed(rest)}" if rest else ""
        return (
            f"GGUF weights are used as they are stored: {listed(kept)}{also} (quantization='dequantize' "
            "dequantises all)"
        )
