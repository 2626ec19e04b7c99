"""Parts of stored tensors that hold several projections: one after the other, or in turn for each head.

Outputs are rows of floats and of scales; weights of 4 bits may have them in columns, or 8 in a word, and each
part stays in its format's own terms. A tensor of a file is read when a part is. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from nanovllm.quantization.shards import FileNames, PackedRows, WeightSource

# Where tensors of weights in 4 bits have their outputs, by name: AWQ, GPTQ and compressed-tensors.
_AXES = {"qweight": 1, "qzeros": 1, "scales": 1, "weight_packed": 0, "weight_zero_point": 0}
_OF_INPUTS = ("g_idx", "weight_g_idx")  # the same for all parts
_SHAPE = "weight_shape"  # two numbers
_PER_WORD = 8


@dataclass(frozen=True)
class PartNames(FileNames):
    """Names of files whose packed tensors are split in 4 bits too, and may hold parts of a head together."""

    by_heads: Mapping[str, int] = field(default_factory=dict, hash=False, kw_only=True)  # heads, by module

    def tensors(
        self, full_name: str, tensor: WeightSource, packed_rows: PackedRows
    ) -> Iterator[tuple[str, WeightSource]]:
        path, _, param = (self.named(full_name) or "").rpartition(".")
        parent, _, module = path.rpartition(".")
        modules, shape = self.packed.get(module), _shape(tensor)
        is_plain = module not in self.by_heads and param not in (*_AXES, *_OF_INPUTS, _SHAPE)
        if modules is None or is_plain or prod(shape) == 1:  # a scale of the whole tensor
            yield from super().tensors(full_name, tensor, packed_rows)
            return
        stored = packed_rows(full_name, shape, modules)
        found = parts(full_name, tensor, stored, modules, self.by_heads.get(module, 1))
        if found is None:  # of another length: the checker names it
            yield f"{path}.{param}", tensor
            return
        yield from ((f"{parent}.{name}", part) for name, part in found)


class _Part:
    """Of each of `groups` equal ranges along `axis`, `size` from `start` on; a `WeightSource`."""

    def __init__(self, source: Any, axis: int, groups: int, start: int, size: int) -> None:
        self._source, self._where = source, (axis, groups, start, size)

    def get_shape(self) -> list[int]:
        axis, groups, _, size = self._where
        shape = list(self._source.get_shape())
        return [*shape[:axis], groups * size, *shape[axis + 1 :]]

    def get_dtype(self) -> str:
        dtype: str = self._source.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return _selected(self._source[:], *self._where)[index]


def _shape(tensor: WeightSource) -> list[int]:
    return list(tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape())


def _selected(whole: torch.Tensor, axis: int, groups: int, start: int, size: int) -> torch.Tensor:
    return whole.unflatten(axis, (groups, -1)).narrow(axis + 1, start, size).flatten(axis, axis + 1)


def parts(
    full_name: str, tensor: WeightSource, stored: Mapping[str, int], rows: Mapping[str, int], groups: int
) -> Iterator[tuple[str, WeightSource]] | None:
    """Each module's part of a tensor, under the last part of its name; None for a tensor of another length.

    rows: the outputs of each module in the weight; stored: those in the tensor, fewer for scales of blocks.
    groups: equal ranges of outputs, each with a part of every module. ValueError where a range of one module
    ends within a block or a word.
    """
    param = full_name.rpartition(".")[2]
    shape = _shape(tensor)
    if param in _OF_INPUTS:
        return ((f"{module}.{param}", tensor) for module in rows)
    if param == _SHAPE:
        n, k = tensor[:].tolist() if shape == [2] else (0, 0)
        if n != sum(rows.values()):
            return None
        return ((f"{module}.{param}", torch.tensor([count, k])) for module, count in rows.items())
    axis, total = _AXES.get(param, 0), sum(stored.values())
    length = shape[axis] if axis < len(shape) else 0
    packs = param in _AXES and length * _PER_WORD == total
    if length != (total // _PER_WORD if packs else total):
        return None
    unit, what = (_PER_WORD, f"words of {_PER_WORD} outputs") if packs else (1, "blocks")
    if any(count % (groups * unit) for count in stored.values()):
        raise ValueError(f"{full_name}: its {what} hold rows of several heads, whose parts are needed apart")
    sizes = {module: count // (groups * unit) for module, count in stored.items()}
    return _parts(tensor, param, axis, groups, sizes)


def _parts(
    tensor: WeightSource, param: str, axis: int, groups: int, sizes: Mapping[str, int]
) -> Iterator[tuple[str, WeightSource]]:
    start = 0
    for module, size in sizes.items():
        part: WeightSource
        if isinstance(tensor, torch.Tensor):
            part = _selected(tensor, axis, groups, start, size)
        else:
            part = _Part(tensor, axis, groups, start, size)
        yield f"{module}.{param}", part
        start += size
