"""The input embedding and the LM head, both split over the ranks by rows of the vocabulary.

A vocabulary that is not a multiple of the ranks is padded with zero rows, which callers drop from logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.distributed.group import TPGroup
from nanovllm.layers.weights import WeightLayer, WeightOptions
from nanovllm.quantization.shards import WeightShard
from nanovllm.quantization.unquantized import UnquantizedLinearMethod


class _VocabParallelLayer(WeightLayer):
    weight: torch.Tensor  # [padded vocabulary / ranks, hidden_size]; with several ranks one more zero row

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
        if tp.size > 1:  # the local row of each id; ids of other ranks map to the last row, which is zero
            own = torch.arange(vocab_size, device=options.device) - self.first_id
            self._row_of = own.where((own >= 0) & (own < self.rows), self.rows)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        return F.embedding(self._row_of[token_ids], self.weight)


class ParallelLMHead(_VocabParallelLayer):
    """hidden [n, hidden_size] -> logits [n, rows] of this rank's part of the vocabulary, with its padding.

    tied_to: use this embedding's weight; the layer then has no weights to load.
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
