"""KVGroup: attention layers that share the blocks of a sequence, and the policy that says which it keeps.
Room: which sequences fit into the KV cache.

The tables of a batch and the layout of the KV cache hold a tuple of groups; a layer knows its group's number.
Most models have one group. Owns no block; what is free is known to the `BlockManager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


class KVPolicy:
    """Which blocks of a sequence the layers of a group read. This one: all, until the sequence ends.

    Another policy is a class in its door.
    """

    keeps_all = True  # False: `BlockManager.extend` gives blocks before each step, and frees those not read

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


@dataclass(frozen=True)
class Room:
    """Which sequences fit: the size of the KV cache, and the longest sequence."""

    num_blocks: int  # blocks of a lone group, or slabs, which groups share
    block_size: int
    asked: int  # max_model_len before the size of the KV cache lowers it
    longest: int | None = None  # up to which the user can raise max_model_len; None: its current value
    cache_options: str = "num_kvcache_blocks or gpu_memory_utilization"  # to make the cache larger, in errors
    groups: tuple[KVGroup, ...] = ONE_GROUP
    chunk: int = 1  # most new tokens of a step

    @cached_property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together."""
        return longest_in(self.groups, self.asked, self.num_blocks, self.block_size, self.chunk)

    def check_fits(self, length: int, more: int = 1) -> None:
        """Raise ValueError, with the fix, if there is no room for a prompt of `length` tokens and `more`
        drawn ones. -1: the prompt's last token is scored and not computed, so it needs no room."""
        limit, longest = self.max_model_len, self.asked if self.longest is None else self.longest
        if length + more <= limit:
            return
        why, raises = f"max_model_len={limit}", []
        if limit < self.asked:
            why = f"the KV cache has {self.num_blocks} blocks of {self.block_size} tokens"
            raises.append(self.cache_options)
        if length + more > self.asked:
            raises.append(f"max_model_len (up to {longest})")
        can_be_raised = length + more <= longest
        if not can_be_raised:
            why += f", and the model's own limit is {longest}"
        fix = f", or raise {' and '.join(raises)}" if can_be_raised else ""
        raise ValueError(
            f"the prompt has {length} tokens, and at most {limit - more} "
            f"{'leave room for one more' if more > 0 else 'fit'} ({why}); shorten it{fix}"
        )
