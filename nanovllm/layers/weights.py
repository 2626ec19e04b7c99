"""WeightLayer: a module that loads its parameters from checkpoint tensors, in any order, any number of times.

A layer declares which part of which tensor it owns. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.quantization.base import LinearMethod
from nanovllm.quantization.shards import ShardId, WeightShard, WeightSource
from nanovllm.quantization.unquantized import UnquantizedLinearMethod


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """The weight options of all layers; for deterministic and fuse see `UnquantizedLinearMethod`."""

    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False
    fuse: bool = False

    def linear_method(self) -> LinearMethod:
        """Return a new method, for the weight of one linear layer."""
        return UnquantizedLinearMethod(self.dtype, self.device, self.deterministic, self.fuse)


class WeightLayer(nn.Module):
    """Owns parameters, which are uninitialised until `load_weight` has loaded each of `weight_shards`."""

    def __init__(self) -> None:
        super().__init__()
        self._shards: dict[tuple[str, ShardId], WeightShard] = {}

    def _allocate(
        self, param: str, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> None:
        data = torch.empty(shape, dtype=options.dtype, device=options.device)
        self.register_parameter(param, nn.Parameter(data, requires_grad=False))
        self._expect(shards)

    def _expect(self, shards: list[WeightShard]) -> None:
        self._shards |= {(shard.param, shard.shard_id): shard for shard in shards}

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield the shards that a checkpoint must hold for this layer."""
        return iter(self._shards.values())

    def load_weight(self, name: str, source: WeightSource, shard_id: ShardId = None) -> None:
        """Copy this rank's part of `source`, a whole checkpoint tensor, into parameter `name`.

        If `source` is a slice of a file, only that part is read. Values are cast to the parameter's dtype.
        Can be called again at any time; call `finish_loading` before the layer is used. Raises ValueError for
        an unknown name or shard, and for a wrong shape.
        """
        shard = self._shards.get((name, shard_id))
        if shard is None:
            wanted = name if shard_id is None else f"{name}[{shard_id!r}]"
            has = ", ".join(shard.label for shard in self._shards.values())
            raise ValueError(f"{type(self).__name__} has no weight {wanted}; it has {has}")
        if wrong := shard.wrong_shape(source):
            raise ValueError(f"{type(self).__name__}'s weight {shard.label} has shape {wrong}")
        self._load(shard, source)

    def _load(self, shard: WeightShard, source: WeightSource) -> None:
        shard.copy(source, self.get_parameter(shard.param))

    def finish_loading(self) -> None:
        """Prepare for use after all tensors are loaded; see `LinearMethod.finish_loading`."""
        return


def split_evenly(what: str, total: int, ranks: int) -> int:
    """Return `total // ranks`; ValueError with the possible sizes if `ranks` does not divide `total`."""
    if total % ranks:
        divisors = ", ".join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)
        raise ValueError(f"{what} {total} cannot be split over {ranks} ranks; sizes that can: {divisors}")
    return total // ranks
