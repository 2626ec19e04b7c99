"""WeightShard: a tensor that a checkpoint must hold, and the part of it that a rank keeps. Opens no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

ShardId = str | int | None
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FILE_DTYPES = {  # the names of safetensors
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class WeightSlice(Protocol):
    """A tensor in a file; indexing reads only the indexed part: `safe_open(...).get_slice(name)`."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


WeightSource = torch.Tensor | WeightSlice


@dataclass(frozen=True, slots=True)
class WeightShard:
    """The destination of one checkpoint tensor: its `[start, start + length)` along `dim` is copied to the
    parameter's `[offset, offset + length)` along the same `dim`."""

    param: str
    shard_id: ShardId
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int
    start: int
    length: int
    offset: int
    dtypes: tuple[torch.dtype, ...] = FLOATS  # of the tensor in the checkpoint
    dummy: float | None = None  # the value of all elements of a dummy weight; None: random values

    @property
    def label(self) -> str:
        """Its name within the layer: the parameter, and the shard if there are several."""
        return self.param if self.shard_id is None else f"{self.param}[{self.shard_id!r}]"

    @classmethod
    def whole(cls, param: str, shape: tuple[int, ...]) -> WeightShard:
        """The only shard of a parameter that every rank holds completely."""
        return cls(param, None, shape, dim=0, start=0, length=shape[0], offset=0)

    def wrong_shape(self, source: WeightSource) -> str | None:
        """The shape of `source` and the one that is needed, for an error; None if they are the same."""
        shape = tuple(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        return None if shape == self.shape else f"{shape}, but the model needs {self.shape}"

    def wrong_dtype(self, source: WeightSource) -> str | None:
        """The dtype of `source`, for an error; None if the checkpoint may have it."""
        if isinstance(source, torch.Tensor):
            return None if source.dtype in self.dtypes else str(source.dtype)
        name = source.get_dtype()
        return None if FILE_DTYPES.get(name) in self.dtypes else name

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part of `parameter` that this shard fills, as a view."""
        return parameter.narrow(self.dim, self.offset, self.length)

    def copy(self, source: WeightSource, parameter: torch.Tensor) -> None:
        """Copy this rank's part of `source`, a whole checkpoint tensor, to its place, cast to its dtype.

        If `source` is a slice of a file, only that part is read.
        """
        if self.length:
            index = (slice(None),) * self.dim + (slice(self.start, self.start + self.length),)
            self.place(parameter).copy_(source[index])
