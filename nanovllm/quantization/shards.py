"""WeightShard: which part of a checkpoint's tensor fills a parameter. WeightMethod: what loads it. FileNames:
what modules are called in a checkpoint's files, where the engine calls them otherwise.

A tensor may lie in a file, of which only that part is read. Nothing here opens a file or multiplies.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FILE_DTYPES = {  # the names of safetensors
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    "F8_E8M0": torch.float8_e8m0fnu,
    **{"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
}
PackedRows = Callable[[str, Sequence[int], Mapping[str, int]], Mapping[str, int]]
BARE = "model."  # what the files of a decoder without its LM head leave out before names
_IN_DECODER = ("embed_tokens.", "layers.", "norm.", "rotary_emb.")  # files of a bare decoder begin names so
_CACHE_SCALE = re.compile(r"\.self_attn\.(q_scale|k_scale|v_scale|k_proj\.k_scale|v_proj\.v_scale)$")


class _WeightSlice(Protocol):
    """A tensor in a file; indexing reads only the indexed part: `safe_open(...).get_slice(name)`."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


WeightSource = torch.Tensor | _WeightSlice


def dtype_of(source: WeightSource) -> torch.dtype | None:
    """The dtype of a tensor or a slice; None if no weight has it."""
    return source.dtype if isinstance(source, torch.Tensor) else _FILE_DTYPES.get(source.get_dtype())


class _Rows:
    """Some rows of a tensor in a file."""

    def __init__(self, source: WeightSource, start: int, count: int) -> None:
        self._source, self._start, self._count = source, start, count

    def get_shape(self) -> list[int]:
        assert not isinstance(self._source, torch.Tensor)
        return [self._count, *self._source.get_shape()[1:]]

    def get_dtype(self) -> str:
        assert not isinstance(self._source, torch.Tensor)
        return self._source.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        first, *others = (slice(None),) if index is ... else parts
        start, stop, _ = first.indices(self._count)
        return self._source[(slice(self._start + start, self._start + stop), *others)]


def rows_of(source: WeightSource, start: int, count: int) -> WeightSource:
    """The rows `[start, start + count)` of a checkpoint tensor; nothing is read yet."""
    return source[start : start + count] if isinstance(source, torch.Tensor) else _Rows(source, start, count)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Scales of a file in float32. Bytes are exponents (E8M0): b means 2 ** (b - 127), and 255 is NaN."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


@dataclass(frozen=True, slots=True)
class WeightShard:
    """The destination of one checkpoint tensor: its `[start, start + length)` along `dim` is copied to the
    parameter's `[offset, offset + length)` along the same `dim`. If the parameter holds several weights, such
    as those of experts, `index` is the number of the one that it fills."""

    param: str  # the last part of the tensor's name
    module: str | None  # the part before it, if that is not the layer's own: "q_proj" of "qkv_proj"
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int
    start: int
    length: int
    offset: int
    dtypes: tuple[torch.dtype, ...] = FLOATS  # of the tensor in the checkpoint
    dummy: float | Callable[..., Any] | None = None  # a dummy weight's value, or what random ones become
    index: int | None = None  # along the parameter's first dimension, which the tensor does not have
    update_dtypes: tuple[torch.dtype, ...] = ()  # more dtypes, of a tensor that replaces it later
    scale: bool = False  # finite and above 0, perhaps without its dimensions of 1; dummy weights have none

    @classmethod
    def whole(cls, param: str, shape: tuple[int, ...], dummy: float | None = None) -> WeightShard:
        """The only shard of a parameter that every rank holds completely."""
        return cls(param, None, shape, dim=0, start=0, length=shape[0], offset=0, dummy=dummy)

    @classmethod
    def rows(cls, shape: tuple[int, ...], offset: int) -> WeightShard:
        """Of a tensor that is the rows of a parameter from `offset` on."""
        return replace(cls.whole("weight", shape), offset=offset)

    def module_name(self, path: str) -> str:
        """The checkpoint's name of the module that owns the tensor, if the layer is `path`."""
        parent, dot, _ = path.rpartition(".")
        return path if self.module is None else f"{parent}{dot}{self.module}"

    def wrong_shape(self, source: WeightSource) -> str | None:
        """The shape of `source` and the one that is needed, for an error; None if they are the same."""
        shape = tuple(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        same = shape == self.shape
        if self.scale:
            same = [size for size in shape if size != 1] == [size for size in self.shape if size != 1]
        return None if same else f"{shape}, but the model needs {self.shape}"

    def wrong_dtype(self, source: WeightSource, update: bool = False) -> str | None:
        """The dtype of `source`, for an error; None if the checkpoint, or an `update` of it, may have it."""
        accepted = self.dtypes + self.update_dtypes if update else self.dtypes
        if dtype_of(source) in accepted:
            return None
        return str(source.dtype) if isinstance(source, torch.Tensor) else source.get_dtype()

    def wrong_value(self, source: WeightSource) -> str | None:
        """The first value of a scale that no scale may have, for an error; other tensors may have all."""
        if not self.scale:
            return None
        values = scale_values(source[...]).flatten()
        wrong = values[~(values.isfinite() & (values > 0))]
        return f"{wrong[0].item()}, which must be finite and above 0" if len(wrong) else None

    @property
    def own(self) -> tuple[slice, ...]:
        """The index of this rank's part of the whole tensor."""
        return (slice(None),) * self.dim + (slice(self.start, self.start + self.length),)

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part of `parameter` that this shard fills, as a view."""
        own = parameter if self.index is None else parameter[self.index]
        return own.narrow(self.dim, self.offset, self.length)

    def copy(self, source: WeightSource, parameter: torch.Tensor) -> None:
        """Copy this rank's part of `source`, a whole checkpoint tensor, to its place, cast to its dtype.

        If `source` is a slice of a file, only that part is read.
        """
        if self.length:
            self.place(parameter).copy_(source[self.own])


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """How the weights of a model are stored; for deterministic and fuse see `UnquantizedLinearMethod`."""

    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False
    fuse: bool = False


class WeightMethod(ABC):
    """Stores and loads the weights of one layer, and only of this one.

    All device memory belongs to parameters of the layer, but for weights that oneDNN reorders on a CPU.
    Loading again writes to the same memory, whose addresses CUDA graphs hold. A load of all tensors does not
    depend on the previous content.
    """

    @abstractmethod
    def load(self, shard: WeightShard, source: WeightSource) -> None:
        """Load this rank's part of `source`, the checkpoint tensor of `shard`; can be called again."""

    def finish_loading(self) -> None:
        """Do the work that needs all tensors. Called after loading, before the next product."""
        return

    def unpack(self) -> None:
        """Bring all memory back to parameters, which can then be freed."""
        return

    def pack(self) -> None:
        """Be ready for products again after `unpack`."""
        return


@dataclass(frozen=True)
class FileNames:
    """How files name modules and tensors, both ways; a family gives it once. A value."""

    # Tensors that hold several modules, by the module's name: the modules and their rows, in order.
    packed: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)
    prefixes: Mapping[str, str | None] = field(default_factory=dict, hash=False)  # replaced; None: left out
    last: str = "down_proj"  # of an expert's projections

    def named(self, full_name: str) -> str | None:
        """The model's name of a tensor of the files, or of a module that packs others; None: the model does
        not have it."""
        name: str | None = full_name
        for prefix, own in self.prefixes.items():
            if full_name.startswith(prefix):
                name = None if own is None else own + full_name.removeprefix(prefix)
                break
        return f"{BARE}{name}" if name is not None and name.startswith(_IN_DECODER) else name

    def tensors(
        self, full_name: str, tensor: WeightSource, packed_rows: PackedRows
    ) -> Iterator[tuple[str, WeightSource]]:
        """What a tensor of the files is by the model's names: one, none, or the parts of a packed one, of
        which nothing is read yet. packed_rows: see `QuantConfig.packed_rows`."""
        name = self.named(full_name)
        if name is None:
            return
        path, _, param = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        rows = self.packed.get(module)
        if rows is None:
            yield name, tensor
            return
        shape = tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape()
        if "scale" in param and prod(shape) == 1:  # of the whole packed tensor
            yield from ((f"{parent}.{part}.{param}", tensor) for part in rows)
            return
        rows = packed_rows(full_name, shape, rows)
        if [*shape, 0][0] != sum(rows.values()):  # of another length: the checker names it
            yield name, tensor
            return
        start = 0
        for part, count in rows.items():
            yield f"{parent}.{part}.{param}", rows_of(tensor, start, count)
            start += count

    def of(self, path: str) -> tuple[str, ...]:
        """All names that the module `path` may have in files."""
        parent, dot, last = path.rpartition(".")
        holders = {part: module for module, parts in self.packed.items() for part in parts}
        name = f"{parent}{dot}{holders.get(last, last)}"
        prefixes, whole = ((own, file) for file, own in self.prefixes.items() if own is not None), f"{name}."
        others = (f"{file}{whole.removeprefix(own)}"[:-1] for own, file in prefixes if whole.startswith(own))
        return tuple(dict.fromkeys((name, *others, name.removeprefix(BARE))))

    def of_experts(self, path: str) -> tuple[str, ...]:
        """Those of the first expert's last projection, which decides for all experts of `path`."""
        return self.of(f"{path}.0.{self.last}")


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of quantised keys, values or queries, which weights do not need."""
    return _CACHE_SCALE.search(f".{name}") is not None
