"""Linear layers of which each rank holds a slice: by output (column), by input (row), or all (replicated).

A column layer leaves its output split over the ranks; a row layer takes a split input and sums over ranks.
Nothing else communicates here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.distributed.copied_rows import PendingSum
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.gemv import gemv
from nanovllm.kernels.matmul import linear
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.weights import ShardId, WeightLayer, WeightShard, split_evenly


class ReplicatedLinear(WeightLayer):
    """x [..., input_size] -> [..., output_size], complete on every rank."""

    weight: torch.Tensor  # [output_size, input_size]
    bias: torch.Tensor | None  # [output_size]

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(dtype, device)
        shape = (output_size, input_size)
        self._allocate("weight", shape, [WeightShard.whole("weight", shape)])
        if bias:
            self._allocate("bias", shape[:1], [WeightShard.whole("bias", shape[:1])])
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One checkpoint tensor that makes up a column layer: its rows, and which of them this rank takes."""

    shard_id: ShardId
    total: int
    start: int
    length: int


class _PackedColumnLinear(WeightLayer):
    """x [..., input_size] -> this rank's rows of each part, one behind the other: [..., sum of lengths]."""

    weight: torch.Tensor  # [sum of lengths, input_size]
    bias: torch.Tensor | None  # [sum of lengths]
    has_norm = False  # whether the weight of the norm before it is in its own

    def __init__(
        self, input_size: int, parts: list[OutputPart], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(dtype, device)
        self.output_sizes = [part.length for part in parts]
        rows = sum(self.output_sizes)
        self._allocate("weight", (rows, input_size), _row_shards("weight", parts, (input_size,)))
        if bias:
            self._allocate("bias", (rows,), _row_shards("bias", parts, ()))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias)

    def take_norm(self, norm: RMSNorm) -> None:
        """Multiply the weights by those of `norm`, which is before it: it is then left with the division."""
        assert self.bias is None and not self.has_norm
        self.weight.mul_(norm.weight)
        self.has_norm = True

    def after_norm(
        self,
        norm: RMSNorm,
        x: torch.Tensor | PendingSum,
        residual: torch.Tensor | None,
        silu: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (self(norm(x + residual)), x + residual, None), the first `silu_and_mul` of it with `silu`.

        In one kernel if there are few rows [T, size]. Without `silu` the division by the root mean square may
        be left to do: then the last is what to take that of.
        """
        if isinstance(x, torch.Tensor) and norm.tp.size == 1:
            if self._uses_gemv(x):
                own, eps = None if self.has_norm else norm.weight, norm.eps
                both = gemv(x, self.weight, self.bias, norm_weight=own, eps=eps, residual=residual, silu=silu)
                return *both, None
            if self.has_norm:
                x = x if residual is None else x + residual
                out = self(x)
                return (silu_and_mul(out, x, norm.eps), x, None) if silu else (out, x, x)
        x, residual = norm(x, residual)
        out = self(x)
        return silu_and_mul(out) if silu else out, residual, None


def _row_shards(param: str, parts: list[OutputPart], rest: tuple[int, ...]) -> list[WeightShard]:
    shards, offset = [], 0
    for part in parts:
        shape = (part.total, *rest)
        shards.append(WeightShard(param, part.shard_id, shape, 0, part.start, part.length, offset))
        offset += part.length
    return shards


class MergedColumnParallelLinear(_PackedColumnLinear):
    """Several column-parallel layers on the same input as one product. Shard ids are 0, 1, ..."""

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        tp: TPGroup,
        bias: bool = False,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        parts = []
        for index, total in enumerate(output_sizes):
            length = split_evenly("output size", total, tp.size)
            parts.append(OutputPart(index, total, tp.rank * length, length))
        super().__init__(input_size, parts, bias, dtype, device)


class ColumnParallelLinear(_PackedColumnLinear):
    """x [..., input_size] -> [..., output_size / ranks]: each rank computes a slice of the outputs."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: TPGroup,
        bias: bool = False,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        length = split_evenly("output size", output_size, tp.size)
        part = OutputPart(None, output_size, tp.rank * length, length)
        super().__init__(input_size, [part], bias, dtype, device)


class QKVParallelLinear(_PackedColumnLinear):
    """Query, key and value projections as one product, split by whole heads. Shard ids are "q", "k" and "v".

    With fewer KV heads than ranks, each KV head is held by the ranks whose query heads read it.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        tp: TPGroup,
        bias: bool = False,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if not can_split_heads(num_heads, num_kv_heads, tp.size):
            sizes = [n for n in range(1, num_heads + 1) if can_split_heads(num_heads, num_kv_heads, n)]
            raise ValueError(
                f"{num_heads} query heads and {num_kv_heads} KV heads cannot be split over {tp.size} ranks; "
                f"sizes that can: {', '.join(map(str, sizes))}"
            )
        own_heads = num_heads // tp.size
        kv_heads = max(1, num_kv_heads // tp.size)
        first_kv_head = tp.rank * num_kv_heads // tp.size
        parts = [OutputPart("q", num_heads * head_dim, tp.rank * own_heads * head_dim, own_heads * head_dim)]
        for shard_id in ("k", "v"):
            start, length = first_kv_head * head_dim, kv_heads * head_dim
            parts.append(OutputPart(shard_id, num_kv_heads * head_dim, start, length))
        super().__init__(hidden_size, parts, bias, dtype, device)
        self.num_heads = own_heads
        self.num_kv_heads = kv_heads


def can_split_heads(num_heads: int, num_kv_heads: int, ranks: int) -> bool:
    """Whether all ranks get equally many whole heads, KV heads being repeated when they are fewer."""
    return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)


class RowParallelLinear(WeightLayer):
    """x [..., input_size / ranks] -> [..., output_size], summed over the ranks.

    Without `reduce_results` it is this rank's part of the sum, which is the caller's to make.
    """

    weight: torch.Tensor  # [output_size, input_size / ranks]
    bias: torch.Tensor | None  # [output_size]
    adds = False  # whether `add_to` adds in place

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: TPGroup,
        bias: bool = False,
        reduce_results: bool = True,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(dtype, device)
        self.tp = tp
        self.reduce_results = reduce_results
        length = split_evenly("input size", input_size, tp.size)
        shard = WeightShard("weight", None, (output_size, input_size), 1, tp.rank * length, length, 0)
        self._allocate("weight", (output_size, length), [shard])
        if bias:
            self._allocate("bias", (output_size,), [WeightShard.whole("bias", (output_size,))])
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.tp.rank == 0 else None  # the ranks' outputs are summed: add it once
        out = self._product(x, self.weight, bias)
        return self.tp.all_reduce(out) if self.reduce_results else out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (self(x), residual), still to be added, or (their sum, None), in the residual's place."""
        if not self.adds or self._uses_gemv(x):
            return self(x), residual
        if self._uses_linear(x, self.weight):
            return linear(x, self.weight, None, residual), None
        return residual.addmm_(x, self.weight.T), None
