"""Keys: numbers of a GGUF file whose layers differ, below its architecture's name. Tensors by other names,
and with other values. Refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nanovllm.formats.gguf.file import GGUFFile, GGUFTensor


def shortest(value: Any) -> Any:
    """A float32 as the shortest decimal number that gives it: the one that was written in config.json."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


class Keys:
    """What readers of such files ask. ModelLoadError, with the key, for what does not fit."""

    def __init__(self, file: GGUFFile, tensors: Mapping[str, GGUFTensor]) -> None:
        self._file, self._tensors = file, tensors
        self._architecture = file.scalar("general.architecture", str)

    def _key(self, key: str) -> str:
        return f"{self._architecture}.{key}"

    def _count(self, key: str) -> int:
        value = self._file.scalar(self._key(key), int)
        if value is None or not 0 < value < 2**31:
            raise self._file.problem(f"{self._key(key)} must be a number from 1 on, not {value!r}")
        return int(value)

    def _same(self, key: str) -> int:
        """A number of each layer with attention, or a list in which others have 0."""
        value = self._file.metadata.get(self._key(key))
        if not isinstance(value, np.ndarray):
            return self._count(key)
        some = np.unique(value[value != 0])
        if len(some) != 1:
            raise self._file.problem(
                f"{self._key(key)} {some[:8].tolist()}, not one number, is not supported"
            )
        return int(some[0])

    def _kind(self, layer: int, modules: Mapping[str, str]) -> str:
        """Of these kinds the one whose module the layer has. Tensors are what is computed with: keys that
        state a kind may be wrong or missing."""
        names = {kind: f"blk.{layer}.{module}" for kind, module in modules.items()}
        kinds = [kind for kind, name in names.items() if f"{name}.weight" in self._tensors]
        if len(kinds) != 1:
            what = "both of" if kinds else "none of"
            raise self._file.problem(f"layer {layer} has {what} {' and '.join(names.values())}")
        return kinds[0]


@dataclass(frozen=True, eq=False)
class _Changed(GGUFTensor):
    """With values, or a shape, that `change` gives."""

    change: Callable[[torch.Tensor], torch.Tensor] = field(kw_only=True)
    becomes: tuple[int, ...] = field(kw_only=True)  # its shape then

    def get_shape(self) -> list[int]:
        return list(self.becomes)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.change(super().__getitem__(slice(None)))[index]


def changed(
    tensor: GGUFTensor, change: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> GGUFTensor:
    """The tensor with values that `change` gives, which have this shape."""
    return _Changed(**vars(tensor), change=change, becomes=shape)


def less_1(tensor: GGUFTensor) -> GGUFTensor:
    """The weight of a norm, which files store plus 1."""
    return changed(tensor, lambda weight: weight - 1, tensor.shape)


def distinct(file: GGUFFile, renamed: Iterable[tuple[str, str, GGUFTensor]]) -> dict[str, GGUFTensor]:
    """Tensors by their new names. renamed: the stored name, the new one and the tensor. ModelLoadError for
    two of one name."""
    found: dict[str, GGUFTensor] = {}
    for stored, name, tensor in renamed:
        if name in found:
            raise file.problem(f"tensor {stored!r} is a second {name}")
        found[name] = tensor
    return found
