"""Which sequences of a batch begin in the same blocks, so that decode reads what they share once for several.

Plain NumPy on the batch's block tables. Never decides whether that pays.
"""

from __future__ import annotations

import numpy as np

from nanovllm.kernels.decode_attention import CHUNK, HEAD_TILE


def find_shared_prefixes(
    block_tables: np.ndarray, context_lens: np.ndarray, block_size: int, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """The fields of `SharedPrefixes` for block_tables [S, W] and context_lens [S]; None if nothing is shared.

    `group` is the number of query heads of a KV head. A unit is as many sequences as fit into one tile of
    query heads, so None too if only one fits. There are S // 2 units at most, which is how many are returned,
    the last ones with length 0. A unit shares whole chunks, and each of its sequences has tokens past them.
    """
    count, per_unit = len(context_lens), HEAD_TILE // group
    members, lens, skips = no_shared_prefixes(count, group)
    if per_unit < 2 or count < 2:
        return None
    tables = np.ascontiguousarray(block_tables)
    order = np.argsort(tables.view(np.dtype((np.void, tables.strides[0]))).ravel(), kind="stable")
    # What neighbours in this order have in common, in tokens, is a bound for each two of them.
    equal = np.cumprod(tables[order[1:]] == tables[order[:-1]], axis=1).sum(axis=1) * block_size
    own = np.maximum(context_lens[order] - 1, 0)
    common = np.minimum(np.minimum(own[1:], own[:-1]), equal) // CHUNK * CHUNK
    unit, start = 0, 0
    while start < count - 1:
        end, shared = start + 1, int(common[start])
        while end < count and end - start < per_unit and min(shared, common[end - 1]) * 2 > shared:
            shared = min(shared, int(common[end - 1]))
            end += 1
        if end - start > 1:
            rows = order[start:end]
            members[unit, : len(rows)] = rows
            lens[unit] = shared
            skips[rows] = shared
            unit += 1
        start = end
    return (members, lens, skips) if unit else None


def no_shared_prefixes(count: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `find_shared_prefixes` returns for `count` rows, without any unit."""
    members = np.full((count // 2, max(HEAD_TILE // group, 1)), -1, np.int32)
    return members, np.zeros(count // 2, np.int32), np.zeros(count, np.int32)
