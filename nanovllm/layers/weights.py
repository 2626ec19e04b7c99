"""WeightLayer: a module whose parameters are filled from checkpoint tensors, each shard exactly once.

A layer declares which part of which tensor it owns; this module copies it. It opens no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.gemv import gemv, use_gemv
from nanovllm.kernels.matmul import linear, use_linear

ShardId = str | int | None


class WeightSlice(Protocol):
    """A tensor in a file, of which only the indexed part is read: `safe_open(...).get_slice(name)`."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


WeightSource = torch.Tensor | WeightSlice


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Where one checkpoint tensor goes: `[start, start + length)` along `dim` is copied to the parameter's
    `[offset, offset + length)` along the same `dim`."""

    param: str
    shard_id: ShardId
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int
    start: int
    length: int
    offset: int

    @classmethod
    def whole(cls, param: str, shape: tuple[int, ...]) -> WeightShard:
        """The only shard of a parameter that every rank holds completely."""
        return cls(param, None, shape, dim=0, start=0, length=shape[0], offset=0)


class WeightLayer(nn.Module):
    """Owns parameters made by `_allocate`, uninitialised until `load_weight` was called for each shard."""

    deterministic = False  # whether a row's product must have the same bits beside any other rows

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._dtype = dtype
        self._device = device
        self._shards: dict[tuple[str, ShardId], WeightShard] = {}
        self._unloaded: set[tuple[str, ShardId]] = set()

    def _allocate(self, param: str, shape: tuple[int, ...], shards: list[WeightShard]) -> None:
        data = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.register_parameter(param, nn.Parameter(data, requires_grad=False))
        for shard in shards:
            self._shards[param, shard.shard_id] = shard
            self._unloaded.add((param, shard.shard_id))

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., K] @ weight [N, K]^T + bias: how layers multiply where nothing is fused in."""
        if self._uses_gemv(x):
            return gemv(x, weight, bias)[0]
        if self._uses_linear(x, weight):
            return linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
        return F.linear(x, weight, bias)

    def _uses_gemv(self, x: torch.Tensor) -> bool:
        return not self.deterministic and use_gemv(x)

    def _uses_linear(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        return self.deterministic or use_linear(x, weight)

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield what a checkpoint must hold for this layer."""
        return iter(self._shards.values())

    def unloaded(self) -> list[WeightShard]:
        """Return the shards that `load_weight` has not filled yet."""
        return [shard for key, shard in self._shards.items() if key in self._unloaded]

    def load_weight(self, name: str, source: WeightSource, shard_id: ShardId = None) -> None:
        """Copy this rank's part of `source`, a whole checkpoint tensor, into parameter `name`.

        Only that part is read when `source` is a slice of a file. Values are cast to the parameter's dtype.
        Raises ValueError for an unknown name or shard, a wrong shape, or a shard that was already loaded.
        """
        key = (name, shard_id)
        label = name if shard_id is None else f"{name}[{shard_id!r}]"
        shard = self._shards.get(key)
        if shard is None:
            raise ValueError(f"{type(self).__name__} has no weight {label}; it has {list(self._shards)}")
        if key not in self._unloaded:
            raise ValueError(f"{type(self).__name__}'s weight {label} was already loaded")
        shape = tuple(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        if shape != shard.shape:
            raise ValueError(
                f"{type(self).__name__}'s weight {label} has shape {shape}, expected {shard.shape}"
            )
        if shard.length:
            index = (slice(None),) * shard.dim + (slice(shard.start, shard.start + shard.length),)
            target: torch.Tensor = self.get_parameter(name).data
            target.narrow(shard.dim, shard.offset, shard.length).copy_(source[index])
        self._unloaded.remove(key)


def split_evenly(what: str, total: int, ranks: int) -> int:
    """Return `total // ranks`; ValueError naming the sizes that divide when `ranks` does not."""
    if total % ranks:
        divisors = ", ".join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)
        raise ValueError(f"{what} {total} cannot be split over {ranks} ranks; sizes that can: {divisors}")
    return total // ranks
