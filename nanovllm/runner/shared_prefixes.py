"""Which sequences of a batch begin in the same blocks, so that decode reads what they share once for several.

Plain NumPy on the batch's block tables. Knows when that pays; reads nothing of what is shared.
"""

from __future__ import annotations

import numpy as np

from nanovllm.batch import Batch
from nanovllm.kernels.decode_attention import CHUNK, HEAD_TILE

MIN_SHARED_TOKENS = 16384  # to be read less in a step, before a second pass over the batch pays
SharedRows = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray
]  # the fields of SharedPrefixes, on the host
SHARED_FIELDS = ("shared_members", "shared_lens", "shared_skips", "shared_units")


class SharedPrefixFinder:
    """Finds what the sequences of each decode step had better read once, and remembers it for the next."""

    def __init__(self, block_size: int, group: int, tile: int) -> None:
        """group: query heads of a KV head; tile: as many of them as read what is shared together."""
        self._block_size = block_size
        self._group = group
        self._tile = tile
        self._last: tuple[tuple[int, ...], np.ndarray, SharedRows | None] | None = None
        self.nothing = _no_rows(0, tile // group)

    def find(self, batch: Batch) -> SharedRows | None:
        """What to read once for several rows of a decode step; None if that is too little to pay.

        Found anew when the batch is made of other sequences, or these lie in other blocks; else the last
        result holds.
        """
        tables = batch.block_tables
        if self._last is not None:
            seq_ids, blocks, found = self._last
            if seq_ids == batch.seq_ids and np.array_equal(tables[:, : blocks.shape[1]], blocks):
                return found
        found, num_blocks = None, 1
        if len(np.unique(tables[:, 0])) < len(tables):
            found = find_shared_prefixes(
                tables, batch.context_lens, self._block_size, self._group, self._tile
            )
        if found is not None:
            _, lens, skips, _ = found
            num_blocks = -(-int(lens.max()) // self._block_size)
            if int(skips.sum() - lens.sum()) < MIN_SHARED_TOKENS:
                found = None
        self._last = batch.seq_ids, tables[:, :num_blocks].copy(), found
        return found


def find_shared_prefixes(
    block_tables: np.ndarray, context_lens: np.ndarray, block_size: int, group: int, tile: int = HEAD_TILE
) -> SharedRows | None:
    """The fields of `SharedPrefixes` for block_tables [S, W] and context_lens [S]; None if nothing is shared.

    `group` is the number of query heads of a KV head. A unit is as many sequences as fit into a tile of
    `tile` query heads, so None too if only one fits. There are S // 2 units at most: that much is
    returned, and how many of them there are. A unit shares whole chunks, and each of its sequences has tokens
    past them.
    """
    count, per_unit = len(context_lens), tile // group
    members, lens, skips, units = _no_rows(count, per_unit)
    if per_unit < 2 or count < 2:
        return None
    tables = np.ascontiguousarray(block_tables)
    order = np.argsort(tables.view(np.dtype((np.void, tables.strides[0]))).ravel(), kind="stable")
    # What neighbours in this order have in common, in tokens, is a bound for each two of them.
    equal = np.cumprod(tables[order[1:]] == tables[order[:-1]], axis=1).sum(axis=1) * block_size
    own = np.maximum(context_lens[order] - 1, 0)
    common = np.minimum(np.minimum(own[1:], own[:-1]), equal) // CHUNK * CHUNK
    start = 0
    while start < count - 1:
        end, shared = start + 1, int(common[start])
        while end < count and end - start < per_unit and min(shared, common[end - 1]) * 2 > shared:
            shared = min(shared, int(common[end - 1]))
            end += 1
        if end - start > 1:
            rows, unit = order[start:end], units[0]
            members[unit, : len(rows)] = rows
            lens[unit] = shared
            skips[rows] = shared
            units += 1
        start = end
    return (members, lens, skips, units) if units else None


def pad_shared_prefixes(found: SharedRows, rows: int) -> dict[str, np.ndarray]:
    """The inputs that name what is shared, for a step that is padded to `rows` rows."""
    padded = (
        np.full((rows // 2, found[0].shape[1]), -1, np.int32),
        np.zeros(rows // 2, np.int32),
        np.zeros(rows, np.int32),
        np.zeros(1, np.int32),
    )
    for whole, part in zip(padded, found, strict=True):
        whole[: len(part)] = part
    return dict(zip(SHARED_FIELDS, padded, strict=True))


def _no_rows(count: int, per_unit: int) -> SharedRows:
    """What `find_shared_prefixes` returns for `count` rows, without any unit."""
    members = np.full((count // 2, max(per_unit, 1)), -1, np.int32)
    return members, np.zeros(count // 2, np.int32), np.zeros(count, np.int32), np.zeros(1, np.int32)
