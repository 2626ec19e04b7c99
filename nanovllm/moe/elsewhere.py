"""What a rank knows of experts that other ranks hold: the names and shapes of their tensors in a checkpoint.

A load checks all tensors of a checkpoint, and an update all that come, so each rank knows every name. Of a
file nothing but headers is read for other ranks, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from nanovllm.quantization.shards import WeightMethod, WeightShard, WeightSource


@dataclass(frozen=True, slots=True)
class ElsewhereShard(WeightShard):
    """A tensor that another rank loads; `length` is 0."""

    of: WeightShard | None = None  # what that rank's tensor must fit

    def wrong_shape(self, source: WeightSource) -> str | None:
        assert self.of is not None
        return self.of.wrong_shape(source)

    def wrong_value(self, source: WeightSource) -> str | None:
        """Of a tensor in memory, as in an update; the rank that reads a file's values checks them."""
        assert self.of is not None
        return self.of.wrong_value(source) if isinstance(source, torch.Tensor) else None


class Elsewhere(WeightMethod):
    """Stores nothing."""

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        """Nothing is read."""


def elsewhere(shards: Iterable[WeightShard]) -> dict[WeightShard, WeightMethod | None]:
    """The shards of other ranks' experts as those of a layer here."""
    names, nowhere = [each.name for each in fields(WeightShard)], {"start": 0, "length": 0, "offset": 0}
    method = Elsewhere()
    return {
        ElsewhereShard(**{name: getattr(shard, name) for name in names} | nowhere, of=shard): method
        for shard in shards
    }
