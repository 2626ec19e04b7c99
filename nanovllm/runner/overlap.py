"""Prefill in two halves, so that the ranks sum the one while they compute the other.

Says which steps are cut, and where, and what attention has to know of each half. Plans nothing: a batch stays
one batch, whose tokens, positions and cache slots are staged as ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanovllm.attention.base import AttentionMetadata
from nanovllm.batch import Batch, StepKind, prefix_sum
from nanovllm.runner.staging import StagedFields

OVERLAP_RANKS = (2, 4)  # those measured
OVERLAP_TOKENS = 2048  # the fewest tokens of a step that is cut


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """Half of a batch's tokens: the rows they belong to, and their lengths."""

    rows: slice
    query_lens: np.ndarray  # as in Batch, but of these tokens alone
    context_lens: np.ndarray


def halves(batch: Batch) -> tuple[Half, Half]:
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
    return Half(first, query_lens, context_lens), Half(second, second_lens, batch.context_lens[second])


def rows_of_half(max_num_batched_tokens: int, tp_size: int) -> int:
    """The most tokens of a half; 0 where no step is cut."""
    cut = tp_size in OVERLAP_RANKS and max_num_batched_tokens >= OVERLAP_TOKENS
    return -(-max_num_batched_tokens // 2) if cut else 0


def overlaps(batch: Batch, tp_size: int) -> bool:
    """Whether to compute a step in two halves."""
    large = batch.kind is StepKind.PREFILL and len(batch.token_ids) >= OVERLAP_TOKENS
    return large and tp_size in OVERLAP_RANKS


def halves_arrays(batch: Batch) -> dict[str, np.ndarray]:
    """What is to be staged besides, for `halves_metadata`."""
    arrays = {}
    for index, half in enumerate(halves(batch)):
        arrays[f"cu_seqlens_q {index}"] = prefix_sum(half.query_lens)
        arrays[f"cu_seqlens_k {index}"] = prefix_sum(half.context_lens)
        arrays[f"context_lens {index}"] = half.context_lens
    return arrays


def halves_metadata(
    batch: Batch, inputs: StagedFields, meta: AttentionMetadata
) -> tuple[AttentionMetadata, AttentionMetadata]:
    """The metadata of both halves of the step of `meta`, with the staged `halves_arrays`."""
    parts = halves(batch)
    slots = meta.slot_mapping.split([int(half.query_lens.sum()) for half in parts])
    first, second = (
        AttentionMetadata(
            cu_seqlens_q=inputs[f"cu_seqlens_q {index}"],
            cu_seqlens_k=inputs[f"cu_seqlens_k {index}"],
            max_seqlen_q=int(half.query_lens.max()),
            max_seqlen_k=int(half.context_lens.max()),
            slot_mapping=slots[index],
            context_lens=inputs[f"context_lens {index}"],
            block_tables=meta.block_tables[half.rows],
            is_decode=False,
        )
        for index, half in enumerate(parts)
    )
    return first, second
