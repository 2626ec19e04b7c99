"""Which states a prefill step begins with and keeps, as columns of its inputs."""

from __future__ import annotations

import numpy as np

from nanovllm.attention.base import StateColumns
from nanovllm.batch import Batch, prefix_sum


def state_columns(batch: Batch) -> StateColumns[np.ndarray]:
    """Of a batch with moves of states in its last `copies`, as `StateBlocks.take_copies` gives them."""
    kept, slots, positions, saved = batch.copies[len(batch.tables)].T
    row_of = {slot: row for row, slot in enumerate(batch.slots.tolist())}
    rows = np.array([row_of[slot] for slot in slots.tolist()], np.int32)
    is_read = saved == 0
    sources = batch.slots.copy()
    sources[rows[is_read]] = kept[is_read]
    mine = np.flatnonzero(saved)
    mine = mine[np.lexsort((positions[mine], rows[mine]))]
    starts = prefix_sum(np.bincount(rows[mine], minlength=len(batch.slots)))
    return StateColumns(sources, starts, positions[mine], kept[mine])
