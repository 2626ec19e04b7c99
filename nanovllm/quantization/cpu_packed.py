"""PackedLinearMethod: a weight on a CPU, packed once for the kernels of `kernels/cpu/matmul.py`.

An engine in float32 stores it in the checkpoint's 16 bits as long as that is exact: it then reads half as
much memory, and its products are the same.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from nanovllm import isa
from nanovllm.kernels.compat import cpu_kernel
from nanovllm.quantization.base import LinearMethod, WeightOptions, WeightShard, WeightSource, dtype_of

_SIXTEEN = (torch.bfloat16, torch.float16)


def can_pack(shape: tuple[int, ...], options: WeightOptions) -> bool:
    """Whether the CPU's kernels multiply a weight of this shape."""
    on_cpu = options.device.type == "cpu" and isa.has_kernels()
    return on_cpu and options.dtype in (*_SIXTEEN, torch.float32) and shape[1] % 2 == 0


class PackedLinearMethod(LinearMethod):
    """x @ weight^T. The bits of a row depend on no other row, nor on the number of threads.

    With `fuse` a product adds itself to the residual: the sum is rounded once.
    """

    weight: nn.Parameter  # packed, see `kernels/cpu/matmul.py`

    def create(
        self, layer: nn.Module, shape: tuple[int, ...], shards: list[WeightShard], options: WeightOptions
    ) -> list[WeightShard]:
        """One parameter, `weight`."""
        self._rows, self._columns = shape
        self._options = options
        self.weight = nn.Parameter(torch.empty(0, dtype=options.dtype), requires_grad=False)
        layer.register_parameter("weight", self.weight)
        return shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        index = (slice(None),) * shard.dim + (slice(shard.start, shard.start + shard.length),)
        tensor = source[index]
        self._store_as(self._dtype_for(tensor, dtype_of(source)))
        if shard.length:
            row, column = (shard.offset, 0) if shard.dim == 0 else (0, shard.offset)
            cpu_kernel("matmul.copy_rows")(self.weight.data, tensor, row, column)

    def _dtype_for(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype that holds this tensor, and what is stored already."""
        if self._options.dtype != torch.float32:
            return self._options.dtype
        if dtype not in _SIXTEEN:
            values = tensor.float()
            dtype = next((each for each in _SIXTEEN if torch.equal(values, values.to(each).float())), None)
        stored = self.weight.dtype if self.weight.numel() else dtype
        return dtype if dtype is not None and dtype == stored else torch.float32

    def _store_as(self, dtype: torch.dtype) -> None:
        """Have memory in `dtype`, with the present content."""
        if self.weight.numel() and self.weight.dtype == dtype:
            return
        shape = cpu_kernel("matmul.packed_shape")((self._rows, self._columns), dtype)
        packed = torch.zeros(shape, dtype=dtype)
        if self.weight.numel():
            old = cpu_kernel("matmul.unpacked")(self.weight.data)[: self._rows]
            cpu_kernel("matmul.copy_rows")(packed, old, 0, 0)
        self.weight.data = packed

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.flatten(0, -2)
        return self._product(rows, bias, None).unflatten(0, x.shape[:-1])

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
