"""The input embedding and the LM head, both split over the ranks by rows of the vocabulary.

A vocabulary that is not a multiple of the ranks is padded with zero rows, which callers drop from logits.
"""

from __future__ import annotations

import torch

from nanovllm.distributed.group import TPGroup
from nanovllm.layers.weights import WeightLayer
from nanovllm.quantization.base import Kind, WeightOptions, WeightShard
from nanovllm.quantization.unquantized import QuantConfig


class _VocabParallelLayer(WeightLayer):
    """A weight [padded vocabulary / ranks, hidden_size]."""

    def __init__(self, vocab_size: int, tp: TPGroup) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // tp.size)
        self.first_id = min(tp.rank * self.rows, vocab_size)

    def _declare_rows(self, rows: int, hidden_size: int, kind: Kind) -> None:
        owned = min(self.rows, self.vocab_size - self.first_id)
        shard = WeightShard("weight", None, (self.vocab_size, hidden_size), 0, self.first_id, owned, 0)
        self.declare((rows, hidden_size), [shard], kind)


class VocabParallelEmbedding(_VocabParallelLayer):
    """token_ids [T] -> this rank's part of a sum over the ranks, [T, hidden_size]; 0 for other ranks' ids.

    tied: its weight is also that of a `ParallelLMHead`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TPGroup, tied: bool = False) -> None:
        super().__init__(vocab_size, tp)
        rows = self.rows if tp.size == 1 else self.rows + 1  # the last one is zero, for ids of other ranks
        self._declare_rows(rows, hidden_size, "tied_embedding" if tied else "embedding")

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, quant)
        if self.tp.size > 1:  # the local row of each id
            own = torch.arange(self.vocab_size, device=options.device) - self.first_id
            self._row_of = own.where((own >= 0) & (own < self.rows), self.rows)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.method.embed(token_ids if self.tp.size == 1 else self._row_of[token_ids])


class ParallelLMHead(_VocabParallelLayer):
    """hidden [n, hidden_size] -> logits [n, rows] of this rank's part of the vocabulary, with its padding.

    tied_to: use this embedding's weight, allocated before; the layer then has no weights to load.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: TPGroup, tied_to: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__(vocab_size, tp)
        self._tied_to = [tied_to]  # in a list, so that it is no part of this module
        if tied_to is None:
            self._declare_rows(self.rows, hidden_size, "lm_head")

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, quant)
        if (embedding := self._tied_to[0]) is not None:
            self.method = embedding.method.first_rows(self.rows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.method.apply(hidden)
