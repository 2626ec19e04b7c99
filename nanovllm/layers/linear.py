"""Linear layers split over the ranks: by output (column), by input (row), or not at all (replicated).

A column layer leaves its output split over the ranks. A row layer takes a split input and returns this rank's
part of a sum, which the residual stream computes: nothing here communicates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.activation import Activation
from nanovllm.layers.weights import WeightLayer, WeightOptions, split_evenly
from nanovllm.quantization.base import Normed, Product
from nanovllm.quantization.shards import ShardId, WeightShard, WeightSource


class _LinearLayer(WeightLayer):
    """A weight [N, K], handled by a `LinearMethod`, and an optional bias [N]; both are given as shards."""

    bias: torch.Tensor | None

    def __init__(
        self,
        shape: tuple[int, int],
        weight: list[WeightShard],
        bias: list[WeightShard] | None,
        options: WeightOptions,
    ) -> None:
        super().__init__()
        self.method = options.linear_method()
        self._expect(self.method.create(self, shape, weight))
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self._allocate("bias", shape[:1], bias, options)

    def _load(self, shard: WeightShard, source: WeightSource) -> None:
        if shard.param == "bias":
            super()._load(shard, source)
        else:
            self.method.load(shard, source)

    def finish_loading(self) -> None:
        self.method.finish_loading()


class ReplicatedLinear(_LinearLayer):
    """x [..., input_size] -> [..., output_size], complete on every rank."""

    def __init__(self, input_size: int, output_size: int, options: WeightOptions, bias: bool = False) -> None:
        shape = (output_size, input_size)
        own_bias = [WeightShard.whole("bias", shape[:1])] if bias else None
        super().__init__(shape, [WeightShard.whole("weight", shape)], own_bias, options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(x, self.bias)


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One checkpoint tensor of a column layer: its number of rows, and the range that this rank takes."""

    shard_id: ShardId
    total: int
    start: int
    length: int


class _PackedColumnLinear(_LinearLayer):
    """x [T, input_size] -> this rank's outputs of each part, concatenated: [T, sum of lengths]."""

    def __init__(self, input_size: int, parts: list[OutputPart], bias: bool, options: WeightOptions) -> None:
        sizes = [part.length for part in parts]
        super().__init__(
            (sum(sizes), input_size),
            _row_shards("weight", parts, (input_size,)),
            _row_shards("bias", parts, ()) if bias else None,
            options,
        )
        self.output_sizes = sizes

    def forward(self, x: Normed, activation: Activation | None = None) -> torch.Tensor:
        """The product with x; with an activation, that of its two halves."""
        return self.method.apply_to_normed(x, self.bias, activation)


def _row_shards(param: str, parts: list[OutputPart], rest: tuple[int, ...]) -> list[WeightShard]:
    shards, offset = [], 0
    for part in parts:
        shape = (part.total, *rest)
        shards.append(WeightShard(param, part.shard_id, shape, 0, part.start, part.length, offset))
        offset += part.length
    return shards


class MergedColumnParallelLinear(_PackedColumnLinear):
    """Column-parallel layers of output `sizes` on the same input, as one product. Shard ids are 0, 1, ..."""

    def __init__(
        self, input_size: int, sizes: list[int], tp: TPGroup, options: WeightOptions, bias: bool = False
    ) -> None:
        parts = []
        for index, total in enumerate(sizes):
            length = split_evenly("output size", total, tp.size)
            parts.append(OutputPart(index, total, tp.rank * length, length))
        super().__init__(input_size, parts, bias, options)


class ColumnParallelLinear(_PackedColumnLinear):
    """x [T, input_size] -> [T, output_size / ranks]: each rank computes a slice of the outputs."""

    def __init__(
        self, input_size: int, output_size: int, tp: TPGroup, options: WeightOptions, bias: bool = False
    ) -> None:
        length = split_evenly("output size", output_size, tp.size)
        part = OutputPart(None, output_size, tp.rank * length, length)
        super().__init__(input_size, [part], bias, options)


class QKVParallelLinear(_PackedColumnLinear):
    """Query, key and value projections as one product, split by whole heads. Shard ids are "q", "k" and "v".

    With fewer KV heads than ranks, each KV head is copied to all ranks whose query heads read it.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        tp: TPGroup,
        options: WeightOptions,
        bias: bool = False,
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
        super().__init__(hidden_size, parts, bias, options)
        self.num_heads = own_heads
        self.num_kv_heads = kv_heads
        self.head_dim = head_dim

    def split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """qkv [T, n] -> views q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]."""
        return tuple(x.unflatten(-1, (-1, self.head_dim)) for x in qkv.split(self.output_sizes, dim=-1))


def can_split_heads(num_heads: int, num_kv_heads: int, ranks: int) -> bool:
    """Whether all ranks get the same number of whole heads; KV heads are repeated if there are too few."""
    return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)


class RowParallelLinear(_LinearLayer):
    """x [T, input_size / ranks] -> this rank's part of a sum over the ranks, [T, output_size]."""

    def __init__(
        self, input_size: int, output_size: int, tp: TPGroup, options: WeightOptions, bias: bool = False
    ) -> None:
        length = split_evenly("input size", input_size, tp.size)
        shard = WeightShard("weight", None, (output_size, input_size), 1, tp.rank * length, length, 0)
        own_bias = [WeightShard.whole("bias", (output_size,))] if bias else None
        super().__init__((output_size, length), [shard], own_bias, options)
        self._adds_bias = tp.rank == 0  # the ranks' outputs are summed: add it once

    def forward(self, x: torch.Tensor) -> Product:
        return Product(self.method, x, self.bias if self._adds_bias else None)
