"""Shared-prefix grouping: finds sequences that begin with the same blocks, so that decode reads these once.

Plain NumPy on the batch's block tables. Decides when grouping pays; reads no K/V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from nanovllm.attention.base import SharedPrefixes
from nanovllm.batch import PADDING, Batch
from nanovllm.kernels.decode_attention import CHUNK, LONG_PREFIX, SharedUnit, least_chunk
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.protocols import SharedRows

MIN_SHARED_TOKENS = 16384  # saved reads in a step from which a second pass over the batch pays


class SharedPrefixFinder:
    """Finds the shared prefixes of each decode step, and caches them for the next step."""

    def __init__(
        self,
        block_size: int,
        unit: SharedUnit,
        max_num_seqs: int,
        least_chunk: Callable[[int], int] = lambda sequences: 1,
    ) -> None:
        """least_chunk: number of sequences of a step -> minimum positions per partial result."""
        self._block_size = block_size
        self._unit = unit
        self._least_chunk = least_chunk
        self._last: tuple[tuple[int, ...], np.ndarray, SharedRows | None] | None = None
        nothing = no_shared_prefixes(0, unit)
        chunks = [unit.positions, CHUNK]
        while chunks[-1] < least_chunk(max_num_seqs):
            chunks.append(2 * chunks[-1])
        self.nothing = {chunk: replace(nothing, chunk=chunk) for chunk in chunks}

    def find(self, batch: Batch) -> SharedRows | None:
        """The prefixes to read once for several rows of a decode step; None if grouping does not pay.

        Returns the last result while the batch has the same sequences in the same blocks.
        """
        tables = batch.tables[0]
        if self._last is not None:
            seq_ids, blocks, found = self._last
            if seq_ids == batch.seq_ids and np.array_equal(tables[:, : blocks.shape[1]], blocks):
                return found
        found, num_blocks = None, 1
        if len(np.unique(tables[:, 0])) < len(tables):
            found = find_shared_prefixes(tables, batch.context_lens, self._block_size, self._unit)
        if found is not None:
            num_blocks = -(-int(found.lens.max()) // self._block_size)
            found = self._in_whole_chunks(found)
            if int(found.skips.sum() - found.lens.sum()) < MIN_SHARED_TOKENS:
                found = None
        self._last = batch.seq_ids, tables[:, :num_blocks].copy(), found
        return found

    def _in_whole_chunks(self, found: SharedRows) -> SharedRows:
        shortest = int(found.lens[: int(found.units[0])].min())
        chunk = CHUNK if shortest >= LONG_PREFIX else self._unit.positions
        chunk = max(chunk, self._least_chunk(len(found.skips)))
        lens, skips = found.lens // chunk * chunk, found.skips // chunk * chunk
        return replace(found, chunk=chunk, lens=lens, skips=skips)


def make_finder(runner: ModelRunner, unit: SharedUnit) -> SharedPrefixFinder:
    """The finder for the steps of a runner."""
    max_num_seqs = runner.config.max_num_seqs
    if runner.config.deterministic:
        return SharedPrefixFinder(runner.block_size, unit, max_num_seqs)
    least = partial(least_chunk, runner.spec.num_heads, runner.spec.head_dim, runner.max_model_len)
    return SharedPrefixFinder(runner.block_size, unit, max_num_seqs, least)


def find_shared_prefixes(
    block_tables: np.ndarray, context_lens: np.ndarray, block_size: int, unit: SharedUnit
) -> SharedRows | None:
    """The prefixes that rows with block_tables [S, W] and context_lens [S] share; None if there are none.

    Up to `unit.sequences` sequences form a unit; None too if that is one. The result has room for S // 2
    units, the maximum, and the number of actual units. A unit shares a multiple of `unit.positions` tokens,
    and each of its sequences has more tokens than these.
    """
    count = len(context_lens)
    found = no_shared_prefixes(count, unit)
    if unit.sequences < 2 or count < 2:
        return None
    tables = np.ascontiguousarray(block_tables)
    order = np.argsort(tables.view(np.dtype((np.void, tables.strides[0]))).ravel(), kind="stable")
    # Common tokens of neighbours in this order; the minimum over a range bounds every pair in it.
    equal = np.cumprod(tables[order[1:]] == tables[order[:-1]], axis=1).sum(axis=1) * block_size
    own = np.maximum(context_lens[order] - 1, 0)
    common = np.minimum(np.minimum(own[1:], own[:-1]), equal) // unit.positions * unit.positions
    start = 0
    while start < count - 1:
        end, shared = start + 1, int(common[start])
        while end < count and end - start < unit.sequences and min(shared, common[end - 1]) * 2 > shared:
            shared = min(shared, int(common[end - 1]))
            end += 1
        if end - start > 1:
            rows, index = order[start:end], int(found.units[0])
            found.members[index, : len(rows)] = rows
            found.lens[index] = shared
            found.skips[rows] = shared
            found.units[0] += 1
        start = end
    return found if found.units[0] else None


def no_shared_prefixes(count: int, unit: SharedUnit) -> SharedRows:
    """An empty result of `find_shared_prefixes` for `count` sequences, without units."""
    return SharedPrefixes(
        members=np.full((count // 2, unit.sequences), PADDING, np.int32),
        lens=np.zeros(count // 2, np.int32),
        skips=np.zeros(count, np.int32),
        units=np.zeros(1, np.int32),
        chunk=unit.positions,
    )
