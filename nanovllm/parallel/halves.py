"""Prefill in two halves: while the ranks sum one half, they compute the other.

Splits the columns of a step, and runs the stream of its halves. `TPGroup` decides which steps are split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from nanovllm.attention.base import AttentionColumns, GroupColumns
from nanovllm.batch import Batch, StepKind, prefix_sum
from nanovllm.layers.stream import AnyStream, Block, Norm, RMSNorm, Step, Stream, Term, added
from nanovllm.parallel.peer_memory import PendingSum
from nanovllm.quantization.base import Gated, Normed, Product
from nanovllm.runner.inputs import cell_copies

OVERLAP_RANKS = (2, 4)  # measured to be faster
OVERLAP_TOKENS = 2048  # minimum tokens of a step that is split
Half = AttentionColumns[np.ndarray]
StartSum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], PendingSum]


def rows_of_half(max_num_batched_tokens: int, tp_size: int) -> int:
    """The maximum number of tokens of a half; 0 if no step is split."""
    cut = tp_size in OVERLAP_RANKS and max_num_batched_tokens >= OVERLAP_TOKENS
    return -(-max_num_batched_tokens // 2) if cut else 0


def most_whole(max_num_batched_tokens: int, tp_size: int) -> int:
    """The most tokens of a prefill step that is not split."""
    cut = rows_of_half(max_num_batched_tokens, tp_size) > 0
    return OVERLAP_TOKENS - 1 if cut else max_num_batched_tokens


def overlaps(batch: Batch, tp_size: int) -> bool:
    """Whether to compute a step in two halves."""
    large = batch.kind is StepKind.PREFILL and len(batch.token_ids) >= OVERLAP_TOKENS
    return large and tp_size in OVERLAP_RANKS


def halves(batch: Batch, columns: Half) -> tuple[Half, Half]:
    """Split a batch of two or more tokens in the middle; one sequence may be in both halves. columns: those
    of the whole step."""
    own = GroupColumns(columns.slot_mapping, columns.block_tables, columns.copies)
    groups = own, *columns.others
    ends = np.cumsum(batch.query_lens)
    cut = int(ends[-1]) // 2
    row = int(np.searchsorted(ends, cut))  # the row of the last token of the first half
    left = int(ends[row]) - cut  # tokens of this row in the second half
    next_row = row if left else row + 1
    first, second = batch.query_lens[: row + 1].copy(), batch.query_lens[next_row:].copy()
    contexts = batch.context_lens[: row + 1].copy()
    first[-1] -= left
    contexts[-1] -= left
    if left:
        second[0] = left
    begun = [_begun(each, batch.tables[number][: row + 1]) for number, each in enumerate(groups)]
    left_groups = [
        GroupColumns(each.slot_mapping[:cut], each.block_tables[: row + 1], *cell_copies(copies))
        for each, (copies, _) in zip(groups, begun, strict=True)
    ]
    right_groups = [
        GroupColumns(each.slot_mapping[cut:], each.block_tables[next_row:], *cell_copies(copies))
        for each, (_, copies) in zip(groups, begun, strict=True)
    ]
    return _half(first, contexts, left_groups), _half(second, batch.context_lens[next_row:], right_groups)


def _begun(
    group: GroupColumns[np.ndarray], tables: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The copies to blocks of these tables, and the others. A row needs them in the half in which it begins:
    it reads them there first."""
    if group.copies is None:
        return None, None
    is_left = np.isin(group.copies[:, 1], tables)
    return group.copies[is_left], group.copies[~is_left]


def _half(query_lens: np.ndarray, context_lens: np.ndarray, groups: list[GroupColumns[np.ndarray]]) -> Half:
    return AttentionColumns(
        **vars(groups[0]),
        context_lens=context_lens,
        max_seqlen_k=int(context_lens.max()),
        cu_seqlens_q=prefix_sum(query_lens),
        cu_seqlens_k=prefix_sum(context_lens),
        max_seqlen_q=int(query_lens.max()),
        others=tuple(groups[1:]),
    )


def _cat(terms: list[Term]) -> Term:
    products = [term for term in terms if isinstance(term, Product)]
    if len(products) == len(terms):  # of one weight, with the rows of all
        rows = [each.x.tensor() if isinstance(each.x, Gated) else each.x for each in products]
        return replace(products[0], x=torch.cat(rows))
    return torch.cat([*map(value_of, terms)])


def value_of(term: Term) -> torch.Tensor:
    return term.tensor() if isinstance(term, Product) else term


class HalvedStream:
    """A stream in two halves of its rows: the ranks sum one half while they compute the other half.

    This is two-batch overlap, as in DeepSeek-V3's prefill and SGLang. In each layer the first half's K/V is
    stored before the second half reads it. The sum over the ranks contains the norm that follows it, so a
    block waits here until the next one brings its norm. Rows are kept once; the rest is a whole `Stream`.
    """

    def __init__(self, halves: Iterable[Stream], steps: Sequence[Step], start_sum: StartSum) -> None:
        """steps: of each half. start_sum: as in `TPGroup`."""
        self._halves: list[Stream | PendingSum] = list(halves)  # a PendingSum contains its residual
        self._steps = steps
        self._start_sum = start_sum
        self._waiting: tuple[Norm, Block, RMSNorm | None] | None = None

    def add(
        self,
        norm: Norm,
        block: Block,
        step: Step,
        keep: torch.Tensor | None = None,
        after: RMSNorm | None = None,
    ) -> AnyStream:
        """As `Stream.add`. The result replaces this stream."""
        self._run_waiting(norm, whole=keep is not None)
        if keep is None:
            self._waiting = norm, block, after
            return self
        totals, terms = [], []
        for half in range(2):
            x = self._normed(norm, half)
            terms.append(block(x, self._steps[half]))
            totals.append(x.total)
            self._advance(1 - half)
        return added(torch.cat(totals), _cat(terms), keep, after)

    def _normed(self, norm: Norm, half: int) -> Normed:
        """A half's norm. After a sum its `total` may have only this rank's rows."""
        stream = self._halves[half]
        if isinstance(stream, PendingSum):
            return Normed.computed(*stream.finish())
        normed: Normed = norm(stream)
        return normed

    def _run_waiting(self, following: Norm, whole: bool) -> None:
        """Run the block that waits, and start its sums, which `following` normalises."""
        if self._waiting is None:
            return
        norm, block, after = self._waiting
        for half in range(2):
            x = self._normed(norm, half)
            term = block(x, self._steps[half])
            self._advance(1 - half)
            if after is None and isinstance(following, RMSNorm):
                self._halves[half] = self._start_sum(
                    value_of(term), x.total, following.weight, following.eps, whole
                )
            else:
                self._halves[half] = added(x.total, term, after=after)

    def _advance(self, half: int) -> None:
        stream = self._halves[half]
        if isinstance(stream, PendingSum):
            stream.advance()


def begin(embedded: torch.Tensor, step: Step, start_sum: StartSum) -> AnyStream:
    """The stream of a step, in halves if its columns are. Arguments as in `TPGroup.begin` and
    `HalvedStream`."""
    halves = step.halves
    if halves is None:
        return Stream(embedded)
    sizes = [len(half.slot_mapping) for half in halves]
    inputs = [None] * len(halves) if step.layer_inputs is None else step.layer_inputs.split(sizes)
    parts = zip(step.positions.split(sizes), halves, inputs, strict=True)
    steps = [Step(positions, half, layer_inputs) for positions, half, layer_inputs in parts]
    return HalvedStream(map(Stream, embedded.split(sizes)), steps, start_sum)
