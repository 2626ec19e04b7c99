"""Linear layers split over the ranks, by output (column) or by input (row), and the
input embedding and the LM head, both split by rows of the vocabulary. `weights.py` says which part of a
weight a rank holds.

A column layer leaves its output split over the ranks. A row layer takes a split input and returns this rank's
part of a sum, which the residual stream computes: nothing here communicates. A vocabulary that is not a
multiple of the ranks is padded with zero rows, which callers drop from logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nanovllm.kernels.activation import Activation
from nanovllm.layers.stream import Group
from nanovllm.layers.weights import LinearLayer, Part, VocabLayer, even_rows, packed_rows, rows_of_heads
from nanovllm.quantization.base import Gated, Normed, Product
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard


class _PackedColumnLinear(LinearLayer):
    """x [T, input_size] -> this rank's outputs of several layers, concatenated: [T, sum of lengths]."""

    def __init__(self, input_size: int, rows: dict[str, Part], bias: bool) -> None:
        """rows: of each module of the checkpoint."""
        shards, offset = packed_rows(input_size, rows)
        biases = [replace(shard, param="bias", shape=shard.shape[:1]) for shard in shards] if bias else None
        super().__init__((offset, input_size), shards, biases)
        self.output_sizes = [shard.length for shard in shards]

    def forward(self, x: Normed, activation: Activation | None = None) -> torch.Tensor | Gated:
        """The product with x; with an activation, that of its two halves."""
        return self.method.apply_to_normed(x, self.bias, activation)


class MergedColumnParallelLinear(_PackedColumnLinear):
    """Column-parallel layers on the same input as one product. sizes: the output size of each, by name."""

    def __init__(self, input_size: int, sizes: dict[str, int], tp: Group, bias: bool = False) -> None:
        rows = {name: even_rows("output size", total, tp.rank, tp.size) for name, total in sizes.items()}
        super().__init__(input_size, rows, bias)


class QKVParallelLinear(_PackedColumnLinear):
    """q_proj, k_proj and v_proj as one product, split by whole heads.

    With fewer KV heads than ranks, each KV head is copied to all ranks whose query heads read it.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        tp: Group,
        bias: bool = False,
        values: bool = True,
    ) -> None:
        """values: False leaves out v_proj."""
        q, kv = rows_of_heads(head_dim, num_heads, num_kv_heads, tp.rank, tp.size)
        rows = {"q_proj": q, "k_proj": kv} | ({"v_proj": kv} if values else {})
        super().__init__(hidden_size, rows, bias)
        self.num_heads, self.num_kv_heads, self.head_dim = q[2] // head_dim, kv[2] // head_dim, head_dim

    def split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """qkv [T, n] -> views q [T, num_heads, head_dim], k and, if there is one, v [T, num_kv_heads,
        head_dim]."""
        return tuple(x.unflatten(-1, (-1, self.head_dim)) for x in qkv.split(self.output_sizes, dim=-1))


class RowParallelLinear(LinearLayer):
    """x [T, input_size / ranks] -> this rank's part of a sum over the ranks, [T, output_size].

    scale: a factor of the output.
    """

    def __init__(
        self, input_size: int, output_size: int, tp: Group, bias: bool = False, scale: float = 1.0
    ) -> None:
        _, start, length = even_rows("input size", input_size, tp.rank, tp.size)
        shard = WeightShard("weight", None, (output_size, input_size), 1, start, length, 0)
        own_bias = [WeightShard.whole("bias", (output_size,))] if bias else None
        super().__init__((output_size, length), [shard], own_bias)
        self._scale = scale
        self._adds_bias = tp.rank == 0  # the ranks' outputs are summed: add it once

    def forward(self, x: torch.Tensor | Gated) -> Product:
        return Product(self.method, x, self.bias if self._adds_bias else None, self._scale)


class VocabParallelEmbedding(VocabLayer):
    """token_ids [T] -> this rank's part of a sum over the ranks, [T, hidden_size]; 0 for other ranks' ids.

    tied: its weight is also that of a `ParallelLMHead`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: Group, tied: bool = False) -> None:
        super().__init__(vocab_size, tp.rank, tp.size)
        self.tp = tp
        rows = self.rows if tp.size == 1 else self.rows + 1  # the last one is zero, for ids of other ranks
        self.declare_rows(rows, hidden_size, "tied_embedding" if tied else "embedding")

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, quant)
        if self.tp.size > 1:  # the local row of each id
            own = torch.arange(self.vocab_size, device=options.device) - self.first_id
            self._row_of = own.where((own >= 0) & (own < self.rows), self.rows)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.method.embed(token_ids if self.tp.size == 1 else self._row_of[token_ids])


class ParallelLMHead(VocabLayer):
    """hidden [n, hidden_size] -> logits [n, rows] of this rank's part of the vocabulary, with its padding.

    tied_to: use this embedding's weight, allocated before; the layer then has no weights to load.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: Group, tied_to: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__(vocab_size, tp.rank, tp.size)
        self._tied_to = [tied_to]  # in a list, so that it is no part of this module
        if tied_to is None:
            self.declare_rows(self.rows, hidden_size, "lm_head")

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, quant)
        if (embedding := self._tied_to[0]) is not None:
            self.method = embedding.method.first_rows(self.rows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.method.logits(hidden)
