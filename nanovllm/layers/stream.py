"""The residual stream of a decoder, the norms that read it, and the group of ranks that sum its terms. Owns
only the norms' weights.

A layer is written as lines of `x.add(norm, block, step)`, which is x + block(norm(x)). A block's term is
added late: by its own product, by the next norm, or together with the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from nanovllm.attention.base import AttentionColumns, AttentionMetadata
from nanovllm.batch import Batch
from nanovllm.layers.weights import WeightLayer
from nanovllm.quantization.base import Normed, Product
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource


class Step(NamedTuple):
    """What blocks need to know of the T tokens of a step, or of a part of it."""

    positions: torch.Tensor  # [T] within their sequences
    meta: AttentionMetadata
    layer_inputs: torch.Tensor | None = None  # [T, layers, size], of models whose layers have inputs
    halves: tuple[AttentionMetadata, AttentionMetadata] | None = None  # of `meta`, if computed in two parts
    slots: torch.Tensor | None = None  # [T] int64, of each token's sequence


# Attention, an MLP, a mixture of experts: norm(x) [T, hidden_size] -> a term of the stream, this rank's part
# of a sum over the ranks. Where rows are kept, only attention sees the others.
Term = torch.Tensor | Product
Block = Callable[[Normed, Step], Term]
Norm = Callable[["Stream"], Normed]  # a `RMSNorm`, or what stands in its place


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream, [T, hidden_size]: `residual` plus the sum of `term` over the ranks."""

    term: torch.Tensor
    residual: torch.Tensor | None = None
    summed: bool = False  # `term` is the same on all ranks, and no part of a sum

    def add(
        self,
        norm: Norm,
        block: Block,
        step: Step,
        keep: torch.Tensor | None = None,
        after: RMSNorm | None = None,
    ) -> Stream:
        """Return x + block(norm(x)), with `after` x + after(block(norm(x))).

        keep [n]: the result has only these rows. All others are dropped before the block's last product.
        """
        x: Normed = norm(self)
        term = block(x, step)
        return added(x.total, term, keep, after)


class AnyStream(Protocol):
    """A stream, whole or in halves."""

    def add(
        self,
        norm: Norm,
        block: Block,
        step: Step,
        keep: torch.Tensor | None = None,
        after: RMSNorm | None = None,
    ) -> AnyStream:
        """As `Stream.add`. The result replaces this stream."""


def added(
    total: torch.Tensor, term: Term, keep: torch.Tensor | None = None, after: RMSNorm | None = None
) -> Stream:
    """The stream `total` plus a block's term; `keep` and `after` as in `Stream.add`."""
    if keep is not None:
        term, total = term[keep], total[keep]
    if after is not None:
        return after.added(term.tensor() if isinstance(term, Product) else term, total)
    return Stream(*term.added_to(total)) if isinstance(term, Product) else Stream(term, total)


class Group:
    """Rank `rank` of `size` that share one model; each holds a part of every weight.

    One rank has all, and every collective is the identity. `parallel.group.TPGroup` connects several; without
    it they only define which part a layer owns.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), not {rank}")
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over the ranks, on each of them; `x` may be overwritten."""
        if self.size > 1:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group to communicate through")
        return x

    def normed(
        self, term: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> Normed:
        """The norm of `residual` plus the sum of `term` over the ranks. On one rank it is computed by whoever
        reads it."""
        return Normed(self.all_reduce(term), residual, weight, eps)

    def split(
        self, batch: Batch, columns: AttentionColumns[np.ndarray]
    ) -> tuple[AttentionColumns[np.ndarray], AttentionColumns[np.ndarray]] | None:
        """The halves in which a prefill step is computed; None: whole."""
        return None

    def most_whole(self, max_tokens: int) -> int:
        """The most tokens of a prefill step that is not split, of at most `max_tokens`."""
        return max_tokens

    def begin(self, embedded: torch.Tensor, step: Step) -> AnyStream:
        """The stream of a step. embedded: [T, hidden_size], this rank's part of the embeddings."""
        return Stream(embedded)

    def whole_rows(self, x: torch.Tensor, width: int) -> tuple[slice, torch.Tensor]:
        """Return the range of rows that this rank draws from, and these rows of logits, [own rows, width].

        x: [S, n], this rank's columns of all rows; rank r has the columns from r * n on. Columns past `width`
        are padding.
        """
        return slice(0, len(x)), x[:, :width]

    def join_rows(self, ids: torch.Tensor, mine: slice, logits: torch.Tensor) -> torch.Tensor:
        """The ids [S] int64 of all rows, on every rank. mine, logits: result and argument of `whole_rows`."""
        return ids

    def join_columns(self, x: torch.Tensor, mine: slice, logits: torch.Tensor) -> torch.Tensor:
        """As `join_rows`, for columns [S, C] float32, at least on rank 0. Integers up to 2**24 are exact."""
        return x

    def exchanges_rows(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether a CUDA graph may capture `whole_rows` of `rows` rows."""
        return True

    def close(self) -> None:
        """Leave the group and free its memory. No operation may be waiting."""


class RMSNorm(WeightLayer):
    """Normalise the last dimension, of `size`, by its root mean square and scale it by a weight.

    With a group `tp` of several ranks, it also sums a stream's term over them. offset: added to the weight of
    the checkpoint; the sum is float32, as Gemma computes it.
    """

    weight: torch.Tensor  # [size]

    def __init__(self, size: int, eps: float, tp: Group | None = None, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.tp = tp or Group()
        self.offset = offset
        self.declare((size,), [WeightShard.whole("weight", (size,), dummy=1.0 - offset)])

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        if self.offset:
            options = replace(options, dtype=torch.float32)
        super().allocate(path, options, quant)

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        super().load(shard, source)
        if self.offset:
            self.weight += self.offset

    def forward(self, x: Stream) -> Normed:
        """norm(x). Its `total` may have only this rank's rows where the group runs a step in halves."""
        if x.summed:
            return Normed(x.term, x.residual, self.weight, self.eps)
        return self.tp.normed(x.term, x.residual, self.weight, self.eps)

    def added(self, term: torch.Tensor, total: torch.Tensor) -> Stream:
        """The stream `total` plus the norm of a block's term; a family may compute more."""
        return Stream(self(Stream(term)).tensor(), total, summed=True)
