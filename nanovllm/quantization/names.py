"""FileNames: what modules are called in a checkpoint's files, where the engine calls them otherwise.

Lists such as `ignore` and `modules_to_not_convert` of a quantization_config hold these names. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from nanovllm.quantization.shards import WeightSource, rows_of

PackedRows = Callable[[str, Sequence[int], Mapping[str, int]], Mapping[str, int]]
BARE = "model."  # what the files of a decoder without its LM head leave out before names
_IN_DECODER = ("embed_tokens.", "layers.", "norm.", "rotary_emb.")  # files of a bare decoder begin names so
_CACHE_SCALE = re.compile(r"\.self_attn\.(q_scale|k_scale|v_scale|k_proj\.k_scale|v_proj\.v_scale)$")


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
        prefixes = ((own, file) for file, own in self.prefixes.items() if own is not None)
        others = (file + name.removeprefix(own) for own, file in prefixes if name.startswith(own))
        return tuple(dict.fromkeys((name, *others, name.removeprefix(BARE))))

    def of_experts(self, path: str) -> tuple[str, ...]:
        """Those of the first expert's last projection, which decides for all experts of `path`."""
        return self.of(f"{path}.0.{self.last}")


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of quantised keys, values or queries, which weights do not need."""
    return _CACHE_SCALE.search(f".{name}") is not None
