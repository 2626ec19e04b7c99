"""KVGroup: attention layers that share the blocks of a sequence, and the policy that says which it keeps.

The tables of a batch and the layout of the KV cache hold a tuple of groups; a layer knows its group's number.
Most models have one group. Owns no block; what is free is known to the `BlockManager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class KVPolicy:
    """Which blocks of a sequence the layers of a group read. This one: all, until the sequence ends.

    Another policy is a class in its door.
    """

    keeps_all = True  # False: `BlockManager.extend` gives blocks before each step, and frees those not read
    manager = "groups"  # the line of `BLOCKS` for groups of which this is the last one's policy
    in_parts = True  # whether a prefill step may be computed in parts: as halves, or by graphs

    def first_read(self, position: int, block_size: int) -> int:
        """The first block that the token at `position`, or a later one, reads."""
        return 0

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` has at once, computed `chunk` tokens at a time."""
        return -(-num_tokens // block_size)


ALL_BLOCKS = KVPolicy()


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The layers of a group."""

    policy: KVPolicy = ALL_BLOCKS
    per_slab: int = 1  # how many of its blocks take the memory of a slab, which groups share


ONE_GROUP = (KVGroup(),)


def slabs_of(groups: Sequence[KVGroup], num_tokens: int, block_size: int, chunk: int) -> int:
    """The most slabs that a sequence has at once, if its blocks lie close together."""
    return sum(-(-each.policy.most_blocks(num_tokens, block_size, chunk) // each.per_slab) for each in groups)


def longest_in(groups: Sequence[KVGroup], asked: int, num_slabs: int, block_size: int, chunk: int) -> int:
    """The most tokens of a sequence, up to `asked`, for which so many slabs suffice."""
    low, high = 0, asked
    while low < high:  # bisection: a longer sequence never needs fewer
        middle = (low + high + 1) // 2
        if slabs_of(groups, middle, block_size, chunk) <= num_slabs:
            low = middle
        else:
            high = middle - 1
    return low
