"""Weights of 8 or 4 bits in groups of 32 inputs on CPUs: quantised as they are loaded, or read as a GGUF file
stores them. Activations become int8, with a scale for each 16 of a row. Opens no file and knows no model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.activation import silu_and_mul
from nanovllm.cpu.kernels.int_layout import FORMATS, GROUP, IntExperts, IntFormat, IntWeight, from_blocks
from nanovllm.cpu.kernels.int_matmul import int_embed, int_linear
from nanovllm.cpu.kernels.int_quantise import quantise
from nanovllm.cpu.kernels.launch import empty
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.kernels.reference import experts_in_turn
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import ExpertMLP
from nanovllm.moe.method import ExpertsMethod, ExpertWeights
from nanovllm.quantization.base import Kind, LinearMethod, Normed
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource

ROUNDED = f"the activations that they multiply are rounded to 8 bits, {GROUP // 2} values with a scale"
_ROUTERS = ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b")  # and gates of states
_STATES = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z")
_PRODUCTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), _STATES)  # multiplied as one
_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # modules that all are integers, or none is
_ROWS = 4096  # that are read and quantised at once
# What stays where AMX multiplies bfloat16: with the others 16 sequences and long prompts are 1.5 to 2.2 times
# as fast once they are dequantised.
_WITH_MATRICES = frozenset({"Q8_0", "Q4_0", "Q4_1"})


@runtime_checkable
class _Blocks(Protocol):
    """A tensor of a file whose blocks can be read as they are stored."""

    @property
    def kept_as(self) -> str:
        """One of FORMATS, or what keeps its blocks from being used."""

    def blocks(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Blocks and their order, as `from_blocks` takes them."""


def _check_blocks(shards: list[WeightShard], k: int, block: int) -> None:
    """ValueError if ranks would split blocks of a file. k: the inputs of a rank; block: those of a block."""
    for shard in shards:
        if shard.dim == 1 and (shard.start % block or k % block):
            raise ValueError(
                f"{shard.shape[1]} inputs in groups of {block} cannot be split into parts of {k}; use "
                "another tensor_parallel_size, or quantization='dequantize'"
            )


def _load(weight: IntWeight, shard: WeightShard, source: WeightSource, as_stored: bool) -> None:
    """Fill a shard's part of a weight. as_stored: keep the blocks of a file in the same format."""
    part = slice(shard.start, shard.start + shard.length)
    rows, columns = (slice(0, shard.shape[0]), part) if shard.dim == 1 else (part, slice(0, shard.shape[1]))
    first = 0 if shard.dim == 1 else shard.offset
    for start in range(rows.start, rows.stop, _ROWS):
        some = slice(start, min(start + _ROWS, rows.stop))
        if as_stored and isinstance(source, _Blocks) and source.kept_as == weight.format.name:
            parts = from_blocks(weight.format, *source.blocks(some, columns))
        else:
            parts = quantise(weight.format, source[some, columns])
        weight.store(first + start - rows.start, parts)


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
        if self.as_stored:
            _check_blocks(shards, k, self.format.block)
        self.dtype, self.fuse = options.dtype, options.fuse
        self.weight = IntWeight.zeros(self.format, n, k, options.device)
        layer.register_parameter("packed", nn.Parameter(self.weight.data, requires_grad=False))
        return shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        _load(self.weight, shard, source, self.as_stored)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return int_linear(x.flatten(0, -2), self.weight, bias).unflatten(0, x.shape[:-1])

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.fuse or residual.dtype != x.dtype:
            return self.apply(x, bias), residual
        return int_linear(x, self.weight, bias, residual), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32: among logits in 16 bits the likeliest token often has an equal."""
        return int_linear(hidden, self.weight, dtype=torch.float32)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return int_embed(ids, self.weight, self.dtype)

    def first_rows(self, num: int) -> IntegerLinearMethod:
        method = copy.copy(self)
        method.weight = self.weight.first_rows(num)
        return method


class StoredPartsMethod(LinearMethod):
    """x @ weight^T of modules that a file stores in several formats: each is multiplied by itself."""

    deterministic_needs_alignment = False

    def __init__(self, formats: Mapping[str, str]) -> None:
        """formats: of FORMATS, by the module's name."""
        self.formats = {module: FORMATS[name] for module, name in formats.items()}
        self.parts: dict[int, IntWeight] = {}  # by their first output

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """A parameter for each module, such as `q_proj_packed`."""
        self.n = shape[0]
        for shard in shards:
            assert shard.module is not None and shard.dim == 0
            format = self.formats[shard.module]
            weight = IntWeight.zeros(format, shard.length, shape[1], options.device)
            parameter = nn.Parameter(weight.data, requires_grad=False)
            layer.register_parameter(f"{shard.module}_packed", parameter)
            self.parts[shard.offset] = weight
        return shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        _load(self.parts[shard.offset], replace(shard, offset=0), source, as_stored=True)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.flatten(0, -2)
        out = empty((len(rows), self.n), x.dtype)
        for first, weight in self.parts.items():
            own = slice(first, first + weight.n)
            int_linear(rows, weight, None if bias is None else bias[own], out=out[:, own])
        return out.unflatten(0, x.shape[:-1])


class IntegerExpertsMethod(ExpertsMethod):
    """The products of experts with integers, one expert after the other. `gate_up` and `down` may have two
    formats."""

    gate_up: IntExperts
    down: IntExperts

    def __init__(self, gate_up: str, down: str, as_stored: bool = False) -> None:
        """As `IntegerLinearMethod`, the format of each weight."""
        self.formats: tuple[IntFormat, IntFormat] = FORMATS[gate_up], FORMATS[down]
        self.as_stored = as_stored

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        """`gate_up_packed` and `down_packed`. ValueError as of `IntegerLinearMethod`."""
        shards = gate_up.shards + down.shards
        if self.as_stored:
            _check_blocks(shards, down.shape[2], self.formats[1].block)
        made = (
            IntExperts.zeros(format, *weights.shape, options.device)
            for format, weights in zip(self.formats, (gate_up, down), strict=True)
        )
        self.gate_up, self.down = made
        for name in ("gate_up", "down"):
            data = getattr(self, name).data
            layer.register_parameter(f"{name}_packed", nn.Parameter(data, requires_grad=False))
        return shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        assert shard.index is not None
        weights = self.down if shard.dim else self.gate_up  # ranks split down by its inputs
        _load(weights[shard.index], shard, source, self.as_stored)

    def apply(self, x: Normed, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
        rows, chosen = x.tensor(), routing.chosen()
        return experts_in_turn(rows, self.gate_up, self.down, chosen, mlp, int_linear, silu_and_mul)


def _no_kernels(capability: tuple[int, int]) -> str | None:
    """Why there are no kernels for integers on a device, and what to do; None if there are."""
    if capability != (0, 0):
        return "its kernels are for CPUs; on a GPU use quantization='fp8', or leave it out"
    return None if isa.has_kernels() else isa.HINT


@dataclass(frozen=True)
class IntegerConfig(QuantConfig):
    """Weights become integers as they are loaded: linear layers and experts in `format`, embeddings and the
    LM head in 8 bits. Routers, norms and biases stay in the model's dtype."""

    option: str
    format: str

    def method(self, path: str, kind: Kind) -> LinearMethod:
        if path.rpartition(".")[2] in _ROUTERS:
            return super().method(path, kind)
        formats: dict[Kind, str] = dict.fromkeys(("lm_head", "embedding", "tied_embedding"), "Q8_0")
        return IntegerLinearMethod((formats | {"linear": self.format})[kind])

    def experts(self, path: str) -> ExpertsMethod:
        return IntegerExpertsMethod(self.format, self.format)

    def on(self, capability: tuple[int, int]) -> QuantConfig:
        """ValueError if the device has no kernels."""
        if reason := _no_kernels(capability):
            raise ValueError(f"quantization={self.option!r} cannot be used here: {reason}")
        return self

    @property
    def itemsize(self) -> float | None:
        return FORMATS[self.format].itemsize

    @property
    def note(self) -> str | None:
        return (
            f"weights become integers of {FORMATS[self.format].bits} bits as they are loaded; {ROUNDED} "
            "(exact, and slower: leave quantization out, with dtype='float32')"
        )


@dataclass(frozen=True)
class StoredConfig(QuantConfig):
    """A GGUF file: weights in one of `formats` stay as they are stored, others are dequantised. The modules
    of one product all stay, or none does, and so do the experts of a layer, whose gate and up have one
    format.
    """

    types: Mapping[str, str] = field(default_factory=dict, hash=False)  # of quantised modules, by their path
    formats: frozenset[str] = frozenset(FORMATS)  # that stay

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> StoredConfig:
        """quant_method "gguf", which only GGUF files have. ValueError for anything else."""
        types = stated.get("types")
        if not isinstance(types, dict):
            raise ValueError("config.json: quant_method 'gguf' is that of GGUF files; pass the path of one")
        return cls(types)

    def method(self, path: str, kind: Kind) -> LinearMethod:
        parts = self._product(path)
        if not parts:
            return super().method(path, kind)
        first, *others = {*parts.values()}
        return StoredPartsMethod(parts) if others else IntegerLinearMethod(first, as_stored=True)

    def experts(self, path: str) -> ExpertsMethod:
        gate, _, down = (self._format(f"{path}.{name}") for name in _EXPERTS)
        if gate is None or down is None:
            return UnquantizedExpertsMethod()
        return IntegerExpertsMethod(gate, down, as_stored=True)

    def _format(self, path: str) -> str | None:
        """The format in which the weight of a module stays; None: it is dequantised. The module may be a
        projection of all experts of a layer."""
        parent, _, name = path.rpartition(".")
        if not parent.endswith(".experts"):
            return self._product(path).get(name)
        gate, up, down = (self._product(f"{parent}.{each}").get(each) for each in _EXPERTS)
        keeps = gate is not None and gate == up and down is not None
        return {"gate_proj": gate, "up_proj": up, "down_proj": down}.get(name) if keeps else None

    def _product(self, path: str) -> dict[str, str]:
        """The formats of the modules that are multiplied as one with that of `path`, by their names; none if
        they do not stay."""
        parent, _, name = path.rpartition(".")
        names = next((each for each in _PRODUCTS if name in each), (name,))
        found = {each: self.types.get(f"{parent}.{each}" if parent else each) for each in names}
        stay = {each: stored for each, stored in found.items() if stored in self.formats}
        return {} if name in _ROUTERS or len(stay) < len(found) else stay

    def on(self, capability: tuple[int, int]) -> QuantConfig:
        if _no_kernels(capability) is not None:
            return replace(self, formats=frozenset())
        return replace(self, formats=_WITH_MATRICES if isa.has_matrices() else frozenset(FORMATS))

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
            f"GGUF weights are used as they are stored: {listed(kept)}{also}; {ROUNDED} (exact, and slower: "
            "quantization='dequantize' with dtype='float32')"
        )


INT8 = IntegerConfig("int8", "Q8_0")
INT4 = IntegerConfig("int4", "Q4_0")
