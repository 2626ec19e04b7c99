"""LinearMethod: how the weight of one layer is stored, loaded and multiplied. It never communicates.

A layer declares what is multiplied, and as `WeightShard`s which part of the weight this rank holds. The
method does the rest. Nothing here opens a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import nn

from nanovllm.kernels.activation import Activation
from nanovllm.kernels.rms_norm import add_rms_norm

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FILE_DTYPES = {  # the names of safetensors
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
}
# What multiplies or looks up a weight. An embedding that is also the LM head is "tied_embedding".
Kind = Literal["linear", "embedding", "tied_embedding", "lm_head"]


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """How the weights of a model are stored; for deterministic and fuse see `UnquantizedLinearMethod`."""

    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False
    fuse: bool = False


class _WeightSlice(Protocol):
    """A tensor in a file; indexing reads only the indexed part: `safe_open(...).get_slice(name)`."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


WeightSource = torch.Tensor | _WeightSlice


@dataclass(frozen=True, slots=True)
class WeightShard:
    """The destination of one checkpoint tensor: its `[start, start + length)` along `dim` is copied to the
    parameter's `[offset, offset + length)` along the same `dim`."""

    param: str  # the last part of the tensor's name
    module: str | None  # the part before it, if that is not the layer's own: "q_proj" of "qkv_proj"
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int
    start: int
    length: int
    offset: int
    dtypes: tuple[torch.dtype, ...] = _FLOATS  # of the tensor in the checkpoint
    dummy: float | None = None  # the value of all elements of a dummy weight; None: random values

    @classmethod
    def whole(cls, param: str, shape: tuple[int, ...], dummy: float | None = None) -> WeightShard:
        """The only shard of a parameter that every rank holds completely."""
        return cls(param, None, shape, dim=0, start=0, length=shape[0], offset=0, dummy=dummy)

    def module_name(self, path: str) -> str:
        """The checkpoint's name of the module that owns the tensor, if the layer is `path`."""
        parent, dot, _ = path.rpartition(".")
        return path if self.module is None else f"{parent}{dot}{self.module}"

    def wrong_shape(self, source: WeightSource) -> str | None:
        """The shape of `source` and the one that is needed, for an error; None if they are the same."""
        shape = tuple(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        return None if shape == self.shape else f"{shape}, but the model needs {self.shape}"

    def wrong_dtype(self, source: WeightSource) -> str | None:
        """The dtype of `source`, for an error; None if the checkpoint may have it."""
        if isinstance(source, torch.Tensor):
            return None if source.dtype in self.dtypes else str(source.dtype)
        name = source.get_dtype()
        return None if _FILE_DTYPES.get(name) in self.dtypes else name

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


class Normed:
    """norm(x + residual), [T, K], computed once, by whoever multiplies it first.

    A method may compute it within its product; then it sets `total`.
    """

    __slots__ = ("_value", "eps", "residual", "weight", "x")

    def __init__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> None:
        """x, residual: [T, K]. weight: [K], of the RMSNorm with `eps`."""
        self.x = x
        self.residual = residual
        self.weight = weight
        self.eps = eps
        self._value: torch.Tensor | None = None

    @classmethod
    def computed(cls, value: torch.Tensor, total: torch.Tensor) -> Normed:
        """A norm that is computed already. `total` may have fewer rows, of a stream that ranks share."""
        normed = cls(total, None, None, 0.0)
        normed._value = value
        return normed

    @property
    def is_computed(self) -> bool:
        return self._value is not None

    def tensor(self) -> torch.Tensor:
        """The normalised rows."""
        if self._value is None:
            assert self.weight is not None
            self._value, self.total = add_rms_norm(self.x, self.residual, self.weight, self.eps)
        return self._value

    @property
    def total(self) -> torch.Tensor:
        """x + residual."""
        if self.residual is not None:
            self.tensor()
        return self.x

    @total.setter
    def total(self, total: torch.Tensor) -> None:
        self.x, self.residual = total, None


@dataclass(frozen=True, slots=True)
class Product:
    """The product of a weight [N, K] with x [T, K], plus a bias [N]; not computed yet.

    So rows can be dropped before it, and it can add itself to the residual stream.
    """

    method: LinearMethod
    x: torch.Tensor
    bias: torch.Tensor | None
    scale: float = 1.0  # of product and bias

    def __getitem__(self, rows: torch.Tensor) -> Product:
        return replace(self, x=self.x[rows])

    @classmethod
    def cat(cls, products: Sequence[Product]) -> Product:
        """The product of one weight with the rows of all."""
        return replace(products[0], x=torch.cat([each.x for each in products]))

    def tensor(self) -> torch.Tensor:
        """The product, [T, N]."""
        out = self.method.apply(self.x, self.bias)
        return out if self.scale == 1.0 else out * self.scale

    def added_to(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `LinearMethod.apply_and_add`."""
        if self.scale != 1.0:
            return self.tensor(), residual
        return self.method.apply_and_add(self.x, residual, self.bias)


class LinearMethod(ABC):
    """Stores, loads and multiplies one weight [N, K]. One instance serves one layer.

    A subclass defines how to create, load and apply. It may override the fused products.

    All device memory belongs to parameters of the layer. Loading again writes to the same memory, whose
    addresses CUDA graphs hold. A load of all tensors does not depend on the previous content.
    """

    @abstractmethod
    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """Register parameters for a weight of `shape` on `layer`. What no shard fills is zero.

        shards: the parts of the whole weight that this rank holds. Return the shards that a checkpoint must
        hold to fill the parameters; if it holds the weight itself, these are `shards`.
        """

    @abstractmethod
    def load(self, shard: WeightShard, source: WeightSource) -> None:
        """Load this rank's part of `source`, the checkpoint tensor of `shard`; can be called again."""

    def finish_loading(self) -> None:
        """Do the work that needs all tensors. Called after loading, before the next product."""
        return

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> x @ weight^T + bias [..., N]."""

    def apply_to_normed(
        self, x: Normed, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor:
        """The product with x [T, K]; with an activation, that of its two halves, [T, N / 2]."""
        out = self.apply(x.tensor(), bias)
        return out if activation is None else activation.and_mul(out)

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (the product with x [T, K], residual [T, N]), not added yet; or (their sum, None).

        The sum may use the memory of the residual.
        """
        return self.apply(x, bias), residual

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [T] of the weight, [T, K]. Only embeddings need it."""
        raise NotImplementedError(f"{type(self).__name__} has no rows to look up")

    def first_rows(self, num: int) -> LinearMethod:
        """A method for the first `num` rows, in the same memory. Only tied embeddings need it."""
        raise NotImplementedError(f"{type(self).__name__} has no rows to share")
