"""The residual stream of a decoder, and the norms that read it. Owns only the norms' weights.

A layer is written as lines of `x.add(norm, block, step)`, which is x + block(norm(x)). A block's term is
added late: by its own product, by the next norm, or together with the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.attention.base import AttentionMetadata, StepMetadata
from nanovllm.layers.weights import WeightLayer
from nanovllm.parallel.group import TPGroup
from nanovllm.parallel.peer_memory import PendingSum
from nanovllm.quantization.base import Normed, Product, WeightOptions, WeightShard, WeightSource
from nanovllm.quantization.unquantized import QuantConfig


class Step(NamedTuple):
    """What blocks need to know of the T tokens of a step, or of half a step."""

    positions: torch.Tensor  # [T] within their sequences
    meta: AttentionMetadata
    halves: tuple[Step, ...] = ()  # the same tokens in two parts, if the step runs in halves
    layer_inputs: torch.Tensor | None = None  # [T, layers, size], of models whose layers have inputs

    @classmethod
    def of(cls, positions: torch.Tensor, meta: StepMetadata) -> Step:
        if meta.halves is None:
            return cls(positions, meta)
        parts = positions.split([len(half.slot_mapping) for half in meta.halves])
        return cls(positions, meta, tuple(map(cls, parts, meta.halves)))

    def with_layer_inputs(self, inputs: torch.Tensor) -> Step:
        """The same, in both halves too."""
        parts = inputs.split([len(half.positions) for half in self.halves]) if self.halves else ()
        halves = (half._replace(layer_inputs=part) for half, part in zip(self.halves, parts, strict=True))
        return self._replace(halves=tuple(halves), layer_inputs=inputs)


# Attention, an MLP, a mixture of experts: norm(x) [T, hidden_size] -> a term of the stream, this rank's part
# of a sum over the ranks. Where rows are kept, only attention sees the others.
_Term = torch.Tensor | Product
_Block = Callable[[Normed, Step], _Term]


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream, [T, hidden_size]: `residual` plus the sum of `term` over the ranks."""

    term: torch.Tensor | PendingSum  # a PendingSum contains its residual
    residual: torch.Tensor | None = None
    summed: bool = False  # `term` is the same on all ranks, and no part of a sum

    def add(
        self,
        norm: Norm,
        block: _Block,
        step: Step,
        keep: torch.Tensor | None = None,
        after: RMSNorm | None = None,
    ) -> Stream:
        """Return x + block(norm(x)), with `after` x + after(block(norm(x))).

        keep [n]: the result has only these rows. All others are dropped before the block's last product.
        """
        x: Normed = norm(self)
        term = block(x, step)
        return _added(x.total, term, keep, after)


def _added(
    total: torch.Tensor, term: _Term, keep: torch.Tensor | None = None, after: RMSNorm | None = None
) -> Stream:
    if keep is not None:
        term, total = term[keep], total[keep]
    if after is not None:
        return after.added(_value(term), total)
    return Stream(*term.added_to(total)) if isinstance(term, Product) else Stream(term, total)


def _value(term: _Term) -> torch.Tensor:
    return term.tensor() if isinstance(term, Product) else term


def _cat(terms: list[_Term]) -> _Term:
    products = [term for term in terms if isinstance(term, Product)]
    return Product.cat(products) if len(products) == len(terms) else torch.cat([*map(_value, terms)])


class HalvedStream:
    """A stream in two halves of its rows: the ranks sum one half while they compute the other half.

    This is two-batch overlap, as in DeepSeek-V3's prefill and SGLang. In each layer the first half's K/V is
    stored before the second half reads it. The sum over the ranks contains the norm that follows it, so a
    block waits here until the next one brings its norm. Rows are kept once; the rest is a whole `Stream`.
    """

    def __init__(self, halves: tuple[Stream, ...]) -> None:
        self._halves = list(halves)
        self._waiting: tuple[Norm, _Block, RMSNorm | None] | None = None

    def add(
        self,
        norm: Norm,
        block: _Block,
        step: Step,
        keep: torch.Tensor | None = None,
        after: RMSNorm | None = None,
    ) -> AnyStream:
        """As `Stream.add`. The result replaces this stream."""
        self._run_waiting(step, norm, whole=keep is not None)
        if keep is None:
            self._waiting = norm, block, after
            return self
        totals, terms = [], []
        for half in range(2):
            x: Normed = norm(self._halves[half])
            terms.append(block(x, step.halves[half]))
            totals.append(x.total)
            self._advance(1 - half)
        return _added(torch.cat(totals), _cat(terms), keep, after)

    def _run_waiting(self, step: Step, following: Norm, whole: bool) -> None:
        """Run the block that waits, and start its sums, which `following` normalises."""
        if self._waiting is None:
            return
        norm, block, after = self._waiting
        for half in range(2):
            x: Normed = norm(self._halves[half])
            term = block(x, step.halves[half])
            self._advance(1 - half)
            if after is None and isinstance(following, RMSNorm):
                self._halves[half] = Stream(following.start(_value(term), x.total, whole))
            else:
                self._halves[half] = _added(x.total, term, after=after)

    def _advance(self, half: int) -> None:
        term = self._halves[half].term
        if isinstance(term, PendingSum):
            term.advance()


AnyStream = Stream | HalvedStream


def begin(embedded: torch.Tensor, step: Step) -> AnyStream:
    """The stream of a step. embedded: [T, hidden_size], this rank's part of the embeddings."""
    if not step.halves:
        return Stream(embedded)
    parts = embedded.split([len(half.positions) for half in step.halves])
    return HalvedStream(tuple(map(Stream, parts)))


class NoNorm(nn.Module):
    """In place of the norm before a block (OLMo 2): only sums a stream's term over the ranks of `tp`."""

    def __init__(self, tp: TPGroup) -> None:
        super().__init__()
        self.tp = tp

    def forward(self, x: Stream) -> Normed:
        assert not isinstance(x.term, PendingSum), "only an RMSNorm starts a sum"
        term = x.term if x.summed else self.tp.all_reduce(x.term)
        total = term if x.residual is None else term + x.residual
        return Normed.computed(total, total)


class RMSNorm(WeightLayer):
    """Normalise the last dimension, of `size`, by its root mean square and scale it by a weight.

    With a group `tp` of several ranks, it also sums a stream's term over them. offset: added to the weight of
    the checkpoint; the sum is float32, as Gemma computes it.
    """

    weight: torch.Tensor  # [size]

    def __init__(self, size: int, eps: float, tp: TPGroup | None = None, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.tp = tp or TPGroup()
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
        """norm(x). On one rank it is computed by whoever reads it. After a sum in halves its `total` may have
        only this rank's rows."""
        term, residual = x.term, x.residual
        if isinstance(term, PendingSum):
            return Normed.computed(*term.finish())
        if self.tp.size > 1 and not x.summed:
            peer_memory = None if residual is None else self.tp.peer_memory_for(term)
            if residual is not None and peer_memory is not None:
                return Normed.computed(
                    *peer_memory.all_reduce_add_rms_norm(term, residual, self.weight, self.eps)
                )
            term = self.tp.all_reduce(term)
        return Normed(term, residual, self.weight, self.eps)

    def added(self, term: torch.Tensor, total: torch.Tensor) -> Stream:
        """The stream `total` plus the norm of a block's term; a family may compute more."""
        return Stream(self(Stream(term)).tensor(), total, summed=True)

    def start(self, term: torch.Tensor, residual: torch.Tensor, whole: bool) -> PendingSum:
        """Start norm(the sum of `term` over the ranks + residual). At most two may be in progress; see
        `TPGroup.start_sum`."""
        return self.tp.start_sum(term, residual, self.weight, self.eps, whole)


Norm = RMSNorm | NoNorm
