"""What several families share: layers of two blocks, how layers are made, and names of modules in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nanovllm.layers.stream import AnyStream, Step
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import Build
from nanovllm.quantization.shards import FileNames
from nanovllm.states.layers import PackedStep


class TwoBlocks(nn.Module):
    """Two blocks, each with a norm before it, and perhaps one after it; each adds to the residual stream."""

    def __init__(self, first: dict[str, nn.Module], second: dict[str, nn.Module]) -> None:
        """first, second: a norm, a block and perhaps another norm, by their names in files."""
        super().__init__()
        for name, module in {**first, **second}.items():
            self.add_module(name, module)
        self._names = tuple(first), tuple(second)

    def records(self, block: nn.Module) -> bool:
        """Whether the second block notes something of all rows, also of those that are not needed."""
        return False

    def forward(self, x: AnyStream, step: Step, keep: torch.Tensor | None = None) -> AnyStream:
        """keep [n]: only these rows are needed after the first block."""
        first, second = ([getattr(self, name) for name in names] for names in self._names)
        early, late = (None, keep) if self.records(second[1]) else (keep, None)
        x = x.add(first[0], first[1], step, early, first[2] if len(first) > 2 else None)
        return x.add(second[0], second[1], step, late, second[2] if len(second) > 2 else None)


@dataclass(frozen=True)
class LayersOf:
    """How all layers of a model are made: by `layer`, whose last argument is this."""

    layer: Callable[..., nn.Module]
    setting: Any = None  # of the model's layers
    packed: PackedStep = field(default_factory=PackedStep, compare=False)  # they share it, for one step

    def __call__(self, config: ModelConfig, index: int, build: Build) -> nn.Module:
        return self.layer(config, index, build, self)

    def __reduce__(self) -> tuple[type[LayersOf], tuple[Any, ...]]:
        return LayersOf, (self.layer, self.setting)  # each rank has its own step


@dataclass(frozen=True)
class RenamedModules(FileNames):
    """Modules with other names in files than here."""

    # By the module that holds them, "": any other one: their names in files, and ours.
    modules: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False, kw_only=True)

    def named(self, full_name: str) -> str | None:
        name = super().named(full_name)
        return None if name is None else _renamed(name, self.modules)

    def of(self, path: str) -> tuple[str, ...]:
        in_files = {
            holder: {own: name for name, own in names.items()}
            for holder, names in self.modules.items()
            if holder
        }
        names = super().of(path)
        return tuple(dict.fromkeys((*names, *(_renamed(name, in_files) for name in names))))


def _renamed(name: str, modules: Mapping[str, Mapping[str, str]]) -> str:
    parts = name.split(".")
    tables = [modules.get(holder, modules.get("", {})) for holder in ["", *parts]]
    return ".".join(table.get(part, part) for part, table in zip(parts, tables, strict=False))


def decoder_prefixes(others: Sequence[str]) -> dict[str, str | None]:
    """Of the files of a model that reads images: the decoder, and `others`, which are left out."""
    left_out = dict.fromkeys([*others, *(f"model.{name}" for name in others)])
    return {"model.language_model.": "model.", "language_model.": "", **left_out}
