"""Prefill in two halves, so that the ranks sum one half while they compute the other.

Decides which steps are split, and where. The batch stays one batch; its tokens, positions and cache slots are
staged as usual.
"""

from __future__ import annotations

import numpy as np

from nanovllm.attention.base import AttentionColumns, PrefillRanges
from nanovllm.batch import Batch, StepKind, prefix_sum

OVERLAP_RANKS = (2, 4)  # measured to be faster
OVERLAP_TOKENS = 2048  # minimum tokens of a step that is split
Half = AttentionColumns[np.ndarray]


def rows_of_half(max_num_batched_tokens: int, tp_size: int) -> int:
    """The maximum number of tokens of a half; 0 if no step is split."""
    cut = tp_size in OVERLAP_RANKS and max_num_batched_tokens >= OVERLAP_TOKENS
    return -(-max_num_batched_tokens // 2) if cut else 0


def overlaps(batch: Batch, tp_size: int) -> bool:
    """Whether to compute a step in two halves."""
    large = batch.kind is StepKind.PREFILL and len(batch.token_ids) >= OVERLAP_TOKENS
    return large and tp_size in OVERLAP_RANKS


def halves(batch: Batch, slot_mapping: np.ndarray) -> tuple[Half, Half]:
    """Split a batch of two or more tokens in the middle; one sequence may be in both halves."""
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
    return (
        _half(first, contexts, slot_mapping[:cut], batch.block_tables[: row + 1]),
        _half(second, batch.context_lens[next_row:], slot_mapping[cut:], batch.block_tables[next_row:]),
    )


def _half(
    query_lens: np.ndarray, context_lens: np.ndarray, slot_mapping: np.ndarray, block_tables: np.ndarray
) -> Half:
    return AttentionColumns(
        slot_mapping=slot_mapping,
        context_lens=context_lens,
        block_tables=block_tables,
        max_seqlen_k=int(context_lens.max()),
        prefill=PrefillRanges(prefix_sum(query_lens), prefix_sum(context_lens), int(query_lens.max())),
    )
