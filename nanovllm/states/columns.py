"""Which states a prefill step begins with and keeps, as one column of its inputs."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.batch import Batch, prefix_sum
from nanovllm.states.kernels.packed import Saves


def state_columns(batch: Batch) -> np.ndarray:
    """Of a batch of S sequences with moves of states in its last `copies`, as `StateBlocks.take_copies` gives
    them: [2 * (S + M) + 1] int32, the row that each sequence begins with and the parts of `Saves`."""
    kept, slots, positions, saved = batch.copies[len(batch.tables)].T
    row_of = {slot: row for row, slot in enumerate(batch.slots.tolist())}
    rows = np.array([row_of[slot] for slot in slots.tolist()], np.int32)
    is_read = saved == 0
    sources = batch.slots.copy()
    sources[rows[is_read]] = kept[is_read]
    mine = np.flatnonzero(saved)
    mine = mine[np.lexsort((positions[mine], rows[mine]))]
    starts = prefix_sum(np.bincount(rows[mine], minlength=len(batch.slots)))
    return np.concatenate([sources, starts, positions[mine], kept[mine]])


def unpacked(column: torch.Tensor, sequences: int) -> tuple[torch.Tensor, Saves]:
    """The row that each of so many sequences begins with, and the saves, of that column on the device."""
    count = (len(column) - 1) // 2 - sequences
    sources, starts, positions, rows = column.split([sequences, sequences + 1, count, count])
    return sources, Saves(starts, positions, rows)
