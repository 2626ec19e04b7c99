"""Weights of which a checkpoint holds several tensors: they wait for each other, and become a module's part
of a weight when all are there.

A `Format` says which tensors those are, and what they mean. Opens no file and multiplies nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from nanovllm.kernels.activation import Activation
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import ExpertMLP
from nanovllm.moe.method import ExpertsMethod, ExpertWeights
from nanovllm.quantization.base import Gated, Kind, LinearMethod, Normed
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightMethod, WeightOptions, WeightShard, WeightSource, scale_values
from nanovllm.quantization.unquantized import dense_method

Check = Callable[[torch.Tensor], str | None]  # says what is wrong with values in float32
_Shard = TypeVar("_Shard", bound="PartShard")


def owned(part: WeightShard) -> tuple[range, range]:
    """The rows and the columns of the whole weight that a rank holds."""
    own, (n, k) = range(part.start, part.start + part.length), part.shape
    return (own, range(k)) if part.dim == 0 else (range(n), own)


def positive(values: torch.Tensor) -> str | None:
    """Of scales that must be finite and above 0."""
    return _wrong(values, values.isfinite() & (values > 0), "finite and above 0")


def not_negative(values: torch.Tensor) -> str | None:
    """Of scales that must be finite and not below 0."""
    return _wrong(values, values.isfinite() & (values >= 0), "finite and not below 0")


def _wrong(values: torch.Tensor, good: torch.Tensor, need: str) -> str | None:
    return None if good.all() else f"{values[~good].flatten()[0].item()}, which must be {need}"


@dataclass(frozen=True, slots=True)
class PartShard(WeightShard):
    """One tensor of a weight [N, K]; `shape` is the tensor's, start and length are not used."""

    weight: WeightShard | None = None  # the part of the weight that this rank holds
    covers: tuple[int, int] | None = None  # rows and columns of the weight by element; None: all read all
    loose: bool = False  # the tensor may lack dimensions of 1, or have more of them
    check: Check | None = None  # of its values

    @classmethod
    def of(
        cls: type[_Shard],
        param: str,
        weight: WeightShard,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...],
        *,
        covers: tuple[int, int] | None = None,
        loose: bool = False,
        check: Check | None = None,
        dummy: float | Callable[..., Any] | None = None,
    ) -> _Shard:
        """A tensor of the module of `weight`."""
        return cls(
            param,
            weight.module,
            shape,
            dim=0,
            start=0,
            length=shape[0],
            offset=weight.offset,
            dtypes=dtypes,
            dummy=dummy,
            weight=weight,
            covers=covers,
            loose=loose,
            check=check,
        )

    def wrong_shape(self, source: WeightSource) -> str | None:
        found = tuple(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        same = found == self.shape
        if self.loose:
            same = [size for size in found if size != 1] == [size for size in self.shape if size != 1]
        return None if same else f"{found}, but the model needs {self.shape}"

    def wrong_value(self, source: WeightSource) -> str | None:
        return None if self.check is None else self.check(scale_values(source[...]))

    def read(self, source: WeightSource) -> torch.Tensor:
        """What a rank needs of it: of elements that cover some of its rows and columns. Only that is read."""
        if self.covers is None or self.weight is None:
            return source[...].reshape(self.shape)
        rows, columns = owned(self.weight)
        (r, c), whole = self.covers, source[...].reshape(self.shape) if self.loose else source
        return whole[rows.start // r : -(-rows.stop // r), columns.start // c : -(-columns.stop // c)]


class Format(ABC):
    """How a checkpoint holds weights [N, K] in several tensors. A value; equal ones are the same format."""

    name: str

    def on(self, options: WeightOptions) -> Format:
        """The same for a model with these options."""
        return self

    @abstractmethod
    def shards(self, part: WeightShard) -> Sequence[PartShard]:
        """The tensors of a module that hold a rank's part of its weight. ValueError if sizes do not fit."""

    @abstractmethod
    def values(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The rank's part [rows, columns] in float32, of what its shards have read, by param. ValueError for
        values that no weight may have."""


def check_groups(name: str, part: WeightShard, group: int) -> None:
    """ValueError if groups of so many columns do not divide a weight, or a rank's part of it."""
    k = part.shape[1]
    if k % group:
        raise ValueError(f"{k} inputs are no multiple of {group}, the size of a group of {name}")
    if part.dim == 1 and (part.start % group or part.length % group):
        sizes = [str(size) for size in range(1, 65) if k % (size * group) == 0]
        raise ValueError(
            f"{k} inputs in groups of {group} cannot be split into parts of {part.length}, which cut a "
            f"group; tensor_parallel_size could be {', '.join(sizes)}"
        )


class GatheredMethod(WeightMethod):
    """Loads weights of a format, each module's when all of its tensors are there, so an update must have all
    or none."""

    format: Format
    device: torch.device

    def prepare(self, parts: Sequence[WeightShard], options: WeightOptions) -> list[WeightShard]:
        """What a checkpoint must hold to fill `parts`. ValueError if ranks cannot split them."""
        self.device, self.format = options.device, self.format.on(options)
        self._needed = {part: self.format.shards(part) for part in parts}
        self._waiting: dict[WeightShard, dict[str, torch.Tensor]] = {}
        return [shard for shards in self._needed.values() for shard in shards]

    def check(self, shard: PartShard, read: torch.Tensor) -> None:
        """ValueError for what a shard has read, and this method cannot store."""

    @abstractmethod
    def fill(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        """Store a module's part of a weight; all of its tensors are there."""

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        assert isinstance(shard, PartShard) and shard.weight is not None
        read, waiting = shard.read(source), self._waiting.setdefault(shard.weight, {})
        self.check(shard, read)
        waiting[shard.param] = torch.empty_like(read, device=self.device).copy_(read)
        if len(waiting) == len(self._needed[shard.weight]):
            del self._waiting[shard.weight]
            self.fill(shard.weight, waiting)

    def finish_loading(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for part, tensors in waiting.items():
            params = [shard.param for shard in self._needed[part]]
            has, missing = (
                ", ".join(p for p in params if (p in tensors) == is_in) for is_in in (True, False)
            )
            raise ValueError(
                f"{part.module or 'this weight'}: {has} came without {missing}; pass all of them together"
            )


class DequantisedLinear(GatheredMethod, LinearMethod):
    """A weight of a format in the model's dtype."""

    dense: LinearMethod

    def __init__(self, format: Format) -> None:
        self.format = format

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """The parameters of a weight in the model's dtype."""
        created = self.prepare(shards, options)
        self.dense = dense_method(shape, options)
        self.dense.create(layer, shape, shards, options)
        self.deterministic_needs_alignment = self.dense.deterministic_needs_alignment
        return created

    def fill(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        values = self.format.values(part, tensors)
        self.dense.load(WeightShard.rows(values.shape, part.offset if part.dim == 0 else 0), values)

    def finish_loading(self) -> None:
        super().finish_loading()
        self.dense.finish_loading()

    def unpack(self) -> None:
        self.dense.unpack()

    def pack(self) -> None:
        self.dense.pack()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.dense.apply(x, bias)

    def apply_to_normed(
        self, x: Normed, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor | Gated:
        return self.dense.apply_to_normed(x, bias, activation)

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.dense.apply_and_add(x, residual, bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dense.logits(hidden)


class DequantisedExperts(GatheredMethod, ExpertsMethod):
    """The weights of experts of a format in the model's dtype."""

    dense: UnquantizedExpertsMethod

    def __init__(self, format: Format) -> None:
        self.format = format

    def create(
        self, layer: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, options: WeightOptions
    ) -> list[WeightShard]:
        self.dense = UnquantizedExpertsMethod()
        return self.prepare(self.dense.create(layer, gate_up, down, options), options)

    def fill(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        self.dense.fill(part, self.format.values(part, tensors))

    def apply(self, x: Normed, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
        return self.dense.apply(x, routing, mlp)


@dataclass(frozen=True)
class DequantisedConfig(QuantConfig):
    """All modules that it is asked for are in a format of 8 bits."""

    format: Format

    def method(self, path: str, kind: Kind) -> LinearMethod:
        return DequantisedLinear(self.format)

    def experts(self, path: str) -> WeightMethod:
        return DequantisedExperts(self.format)

    @property
    def note(self) -> str | None:
        return (
            f"weights in {self.format.name} are dequantised as they are loaded, to twice the files' memory "
            "in 16 bits, and activations are not quantised"
        )
