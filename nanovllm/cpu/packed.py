"""PackedLinearMethod: a weight on a CPU, packed once for the kernels of `cpu/kernels/matmul.py`.

An engine in float32 stores it in the checkpoint's 16 bits as long as that is exact: it then reads half as
much memory, and its products are the same.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from nanovllm.cpu import isa
from nanovllm.kernels.activation import Activation
from nanovllm.kernels.compat import cpu_kernel
from nanovllm.quantization.base import Gated, LinearMethod, Normed
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource

_SIXTEEN = (torch.bfloat16, torch.float16)


def can_pack(shape: tuple[int, ...], options: WeightOptions) -> bool:
    """Whether the CPU's kernels multiply a weight of this shape."""
    on_cpu = options.device.type == "cpu" and isa.has_kernels()
    return on_cpu and options.dtype in (*_SIXTEEN, torch.float32) and shape[1] % 2 == 0


class PackedLinearMethod(LinearMethod):
    """x @ weight^T. The bits of a row depend on no other row, nor on the number of threads.

    With `fuse` a product adds itself to the residual: the sum is rounded once.
    """

    deterministic_needs_alignment = False
    weight: nn.Parameter  # packed, see `cpu/kernels/matmul.py`

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """One parameter, `weight`."""
        self._rows, self._columns = shape
        self._options = options
        self._is_new = True  # it holds no tensor yet
        packed = torch.zeros(self._shape_in(options.dtype), dtype=options.dtype)
        self.weight = nn.Parameter(packed, requires_grad=False)
        layer.register_parameter("weight", self.weight)
        return shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        if shard.length:
            tensor = source[shard.own]
            self._make_room_for(tensor)
            row, column = (shard.offset, 0) if shard.dim == 0 else (0, shard.offset)
            cpu_kernel("matmul.copy_rows")(self.weight.data, tensor, row, column)

    def _make_room_for(self, tensor: torch.Tensor) -> None:
        """Store in a dtype that holds the tensor as exactly as the model's does."""
        stored = self.weight.dtype
        if self._options.dtype != torch.float32 or tensor.dtype == stored:
            pass
        elif self._is_new and tensor.dtype in _SIXTEEN:
            self._store_as(tensor.dtype)
        elif stored in _SIXTEEN and not _is_exact(tensor, stored):
            self._store_as(torch.float32)
        self._is_new = False

    def finish_loading(self) -> None:
        """Store in the narrowest dtype that is exact, so that nothing depends on what was there before."""
        if self._options.dtype == torch.float32 and self.weight.dtype != _SIXTEEN[0]:
            dtype = next((each for each in _SIXTEEN if _is_exact(self.weight.data, each)), torch.float32)
            self._store_as(dtype)

    def _shape_in(self, dtype: torch.dtype) -> tuple[int, ...]:
        shape: tuple[int, ...] = cpu_kernel("matmul.packed_shape")((self._rows, self._columns), dtype)
        return shape

    def _store_as(self, dtype: torch.dtype) -> None:
        """Have memory in `dtype`, with the present content."""
        if self.weight.dtype == dtype:
            return
        packed = torch.zeros(self._shape_in(dtype), dtype=dtype)
        if not self._is_new:
            old = cpu_kernel("matmul.unpacked")(self.weight.data)[: self._rows]
            cpu_kernel("matmul.copy_rows")(packed, old, 0, 0)
        self.weight.data = packed

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.flatten(0, -2)
        return self._product(rows, bias, None).unflatten(0, x.shape[:-1])

    def apply_to_normed(
        self, x: Normed, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor | Gated:
        if activation is not None and bias is None:
            gated = cpu_kernel("gated_matmul.gated_matmul")
            found: torch.Tensor | None = gated(x.tensor(), self.weight, self._rows, activation.kind)
            if found is not None:
                return found
        return super().apply_to_normed(x, bias, activation)

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._options.fuse:
            return self.apply(x, bias), residual
        return self._product(x, bias, residual), None

    def _product(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        product: torch.Tensor = cpu_kernel("matmul.matmul")(x, self.weight, self._rows, bias, residual)
        return product

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = cpu_kernel("matmul.embed")(ids, self.weight, self._options.dtype)
        return rows

    def first_rows(self, num: int) -> PackedLinearMethod:
        method = copy.copy(self)
        method._rows = num
        return method

    def dense(self) -> torch.Tensor:
        """The weight [N, K] as it was loaded, a new tensor."""
        weight: torch.Tensor = cpu_kernel("matmul.unpacked")(self.weight.data)
        return weight[: self._rows]


def _is_exact(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` holds all values; any NaN is one."""
    return values.dtype == dtype or all(
        torch.equal(wide, narrow) or bool(((wide == narrow) | (wide.isnan() & narrow.isnan())).all())
        for wide, narrow in ((part.float(), part.to(dtype).float()) for part in values.split(2048))
    )
