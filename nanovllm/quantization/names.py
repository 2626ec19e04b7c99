"""FileNames: what modules are called in a checkpoint's files, where the engine calls them otherwise.

Lists such as `ignore` and `modules_to_not_convert` of a quantization_config hold these names. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

BARE = "model."  # what the files of a decoder without its LM head leave out before names
_CACHE_SCALE = re.compile(r"\.self_attn\.(q_scale|k_scale|v_scale|k_proj\.k_scale|v_proj\.v_scale)$")


@dataclass(frozen=True)
class FileNames:
    """How files name modules. A value."""

    packed: tuple[tuple[str, str], ...] = ()  # (the last part of a name, that of the module that holds it)
    prefixes: tuple[tuple[str, str], ...] = ()  # (the beginning of a name, that in files)
    last: str = "down_proj"  # of an expert's projections

    @classmethod
    def of_model(
        cls, packed: Mapping[str, Mapping[str, int]], prefixes: Mapping[str, str | None], last: str
    ) -> FileNames:
        """packed, prefixes: as in `ModelConfig`. last: see above."""
        parts = tuple((part, module) for module, parts in packed.items() for part in parts)
        return cls(parts, tuple((own, file) for file, own in prefixes.items() if own is not None), last)

    def of(self, path: str) -> tuple[str, ...]:
        """All names that the module `path` may have in files."""
        parent, dot, last = path.rpartition(".")
        name = f"{parent}{dot}{dict(self.packed).get(last, last)}"
        others = (file + name.removeprefix(own) for own, file in self.prefixes if name.startswith(own))
        return tuple(dict.fromkeys((name, *others, name.removeprefix(BARE))))

    def of_experts(self, path: str) -> tuple[str, ...]:
        """Those of the first expert's last projection, which decides for all experts of `path`."""
        return self.of(f"{path}.0.{self.last}")


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of quantised keys, values or queries, which weights do not need."""
    return _CACHE_SCALE.search(f".{name}") is not None
