"""The input embedding and the output head, both split by rows of the vocabulary.

A vocabulary that the ranks do not divide is padded with zero rows; they never appear in logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.distributed.group import TPGroup
from nanovllm.layers.weights import WeightLayer, WeightOptions
from nanovllm.quantization.shards import WeightShard
from nanovllm.quantization.unquantized import UnquantizedLinearMethod


class _VocabParallelLayer(WeightLayer):
    weight: torch.Tensor  # [padded vocabulary / ranks, hidden_size]; with several ranks one row of 0 more

    def __init__(self, vocab_size: int, tp: TPGroup) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // tp.size)
        self.first_id = min(tp.rank * self.rows, vocab_size)

    def _allocate_rows(self, hidden_size: int, options: WeightOptions) -> None:
        owned = min(self.rows, self.vocab_size - self.first_id)
        shape = (self.vocab_size, hidden_size)
        shard = WeightShard("weight", None, shape, dim=0, start=self.first_id, length=owned, offset=0)
        rows = self.rows if self.tp.size == 1 else self.rows + 1
        self._allocate("weight", (rows, hidden_size), [shard], options)
        self.weight[owned:].zero_()


class VocabParallelEmbedding(_VocabParallelLayer):
    """token_ids [T] -> this rank's part of a sum over the ranks, [T, hidden_size]; 0 for other ranks' ids."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TPGroup, options: WeightOptions) -> None:
        super().__init__(vocab_size, tp)
        self._allocate_rows(hidden_size, options)
        if tp.size > 1:  # where the row of each id is here; for another rank's it is the last one, of zeros
            own = torch.arange(vocab_size, device=options.device) - self.first_id
            self._row_of = own.where((own >= 0) & (own < self.rows), self.rows)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        return F.embedding(self._row_of[token_ids], self.weight)


class ParallelLMHead(_VocabParallelLayer):
    """hidden [n, hidden_size] -> logits [n, rows] of this rank's part of the vocabulary, with its padding.

    `tied_to` makes it use that embedding's weight; it then has nothing to load.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: TPGroup,
        options: WeightOptions,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(vocab_size, tp)
        if tied_to is None:
            self._allocate_rows(hidden_size, options)
        else:
            self.weight = tied_to.weight
        self.method = UnquantizedLinearMethod(options.dtype, options.device, options.deterministic)
        self.method.weight = self.weight[: self.rows]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.method.apply(hidden)
