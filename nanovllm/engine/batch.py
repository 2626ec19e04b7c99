"""Batch and SampleOutput: all that crosses between the plan tower and the compute tower, both ways.

Plain NumPy values that nobody changes once they are made; positions and slots are derived from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanovllm.sampling_params import ALL_GREEDY, SamplingBatch

LAST_SAMPLED = -1  # as a token id: the token last sampled in this sequence's slot, known to the device only
NOT_FINITE = -1  # as a sampled id: the row's logits held NaN or infinity


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of S sequences and T tokens: all that a rank needs, nothing that it may change."""

    seq_ids: tuple[int, ...]
    slots: np.ndarray  # [S] int32, a stable row for each running sequence
    token_ids: np.ndarray  # [T] int32, flat; LAST_SAMPLED where only the device knows
    query_lens: np.ndarray  # [S] int32, how many of the T tokens each sequence brings
    context_lens: np.ndarray  # [S] int32, cached + new tokens
    block_tables: np.ndarray  # [S, W] int32, padded with -1
    samples: np.ndarray  # [S] bool: this chunk reaches the end of the sequence
    sampling: SamplingBatch

    @property
    def is_decode(self) -> bool:
        """Every sequence brings exactly one token."""
        return len(self.token_ids) == len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class BatchPart:
    """Some of a batch's tokens, those that follow each other: the rows they belong to, and their lengths."""

    rows: slice
    query_lens: np.ndarray  # as in Batch, of these tokens alone
    context_lens: np.ndarray


def halves(batch: Batch) -> tuple[BatchPart, BatchPart]:
    """Cut a batch of two tokens or more in the middle of its tokens; one sequence may be in both halves."""
    ends = np.cumsum(batch.query_lens)
    cut = int(ends[-1]) // 2
    row = int(np.searchsorted(ends, cut))  # has the last token of the first half
    left = int(ends[row]) - cut  # of its tokens, for the second half
    first = slice(0, row + 1)
    query_lens, context_lens = batch.query_lens[first].copy(), batch.context_lens[first].copy()
    query_lens[-1] -= left
    context_lens[-1] -= left
    second = slice(row if left else row + 1, len(ends))
    second_lens = batch.query_lens[second].copy()
    if left:
        second_lens[0] = left
    return BatchPart(first, query_lens, context_lens), BatchPart(
        second, second_lens, batch.context_lens[second]
    )


@dataclass(frozen=True, slots=True, eq=False)
class SampleOutput:
    """The tokens of one step."""

    token_ids: (
        np.ndarray
    )  # [S] int64; NOT_FINITE for a failed row; no meaning where the batch samples nothing


_NOTHING = np.empty(0, np.int32)
EMPTY_BATCH = Batch(
    seq_ids=(),
    slots=_NOTHING,
    token_ids=_NOTHING,
    query_lens=_NOTHING,
    context_lens=_NOTHING,
    block_tables=_NOTHING.reshape(0, 1),
    samples=_NOTHING.astype(np.bool_),
    sampling=ALL_GREEDY,
)
