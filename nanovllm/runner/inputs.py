"""StepInputs: all inputs of one step, as NumPy arrays on the host and as tensors on the device.

Computes positions, cache slots and prefix sums from a `Batch`. Copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Generic

import numpy as np

from nanovllm.attention.base import PrefillRanges, SharedPrefixes, StepColumns
from nanovllm.batch import NO_SLOT, A, Batch, Column, SamplingColumns, prefix_sum
from nanovllm.runner.overlap import halves


@dataclass(frozen=True, eq=False)
class StepInputs(Generic[A]):
    """One step of S sequences and T tokens. Token ids and slots are int64, as torch's indexing requires."""

    token_ids: Annotated[A, Column(np.int64, lambda n: (n.tokens,))]  # LAST_SAMPLED: only the device knows it
    token_slots: Annotated[A, Column(np.int64, lambda n: (n.tokens,), NO_SLOT)]  # of each token's sequence
    positions: Annotated[A, Column(np.int32, lambda n: (n.tokens,))]
    sample_slots: Annotated[A, Column(np.int64, lambda n: (n.seqs,), NO_SLOT)]  # where drawn tokens go
    attention: StepColumns[A]
    sampling: SamplingColumns[A]


def prepare_prefill(batch: Batch, block_size: int, in_halves: bool = False) -> StepInputs[np.ndarray]:
    """The inputs of a prefill step."""
    query_lens, context_lens = batch.query_lens, batch.context_lens
    cu_seqlens_q = prefix_sum(query_lens)
    rows = np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)  # [T] the row of each token
    positions = np.arange(len(rows), dtype=np.int32) + (context_lens - query_lens - cu_seqlens_q[:-1])[rows]
    slot_mapping = _slot_mapping(batch, rows, positions, block_size)
    attention = StepColumns(
        slot_mapping=slot_mapping,
        context_lens=context_lens,
        block_tables=batch.block_tables,
        max_seqlen_k=int(context_lens.max()),
        prefill=PrefillRanges(cu_seqlens_q, prefix_sum(context_lens), int(query_lens.max())),
        wanted_rows=wanted_rows(batch),
        halves=halves(batch, slot_mapping) if in_halves else None,
    )
    return _inputs(batch, rows, positions, attention)


def prepare_decode(
    batch: Batch,
    block_size: int,
    shared: SharedPrefixes[np.ndarray] | None = None,
    max_seqlen_k: int | None = None,
) -> StepInputs[np.ndarray]:
    """The inputs of a decode step. max_seqlen_k: an upper bound of context lengths; None: the longest."""
    rows, positions = np.arange(len(batch.slots)), batch.context_lens - np.int32(1)
    attention = StepColumns(
        slot_mapping=_slot_mapping(batch, rows, positions, block_size),
        context_lens=batch.context_lens,
        block_tables=batch.block_tables,
        max_seqlen_k=int(batch.context_lens.max()) if max_seqlen_k is None else max_seqlen_k,
        shared=shared,
    )
    return _inputs(batch, rows, positions, attention)


def last_rows(batch: Batch) -> np.ndarray:
    """The indices int32, ascending, of the tokens that precede a drawn one: the last `draws` tokens of each
    sequence; of a sequence that draws none, the last token."""
    counts = np.maximum(batch.draws, 1)
    starts = prefix_sum(batch.query_lens)[1:] - counts
    return np.repeat(starts - prefix_sum(counts)[:-1], counts) + np.arange(counts.sum(), dtype=np.int32)


def wanted_rows(batch: Batch) -> np.ndarray:
    """The indices [W] int32, ascending, of a prefill step's tokens whose hidden states are needed: those of
    `last_rows`, and the tokens of the step's extras."""
    last, extras = last_rows(batch), batch.extras
    more = [] if extras.scored is None else [extras.scored.wanted.places]
    more += [] if extras.pooled is None else [extras.pooled.places]
    return np.unique(np.concatenate([last, *more])) if more else last


def _slot_mapping(batch: Batch, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """The cache slot of each token's K/V: block * block_size + offset."""
    blocks = batch.block_tables[rows, positions // block_size]
    return blocks * np.int32(block_size) + positions % np.int32(block_size)


def _inputs(
    batch: Batch, rows: np.ndarray, positions: np.ndarray, attention: StepColumns[np.ndarray]
) -> StepInputs[np.ndarray]:
    """rows, positions [T]: the row of each token, and its position in its sequence."""
    return StepInputs(
        token_ids=batch.token_ids,
        token_slots=batch.slots[rows],
        positions=positions,
        sample_slots=np.where(batch.draws > 0, batch.slots, NO_SLOT),
        attention=attention,
        sampling=batch.sampling,
    )
