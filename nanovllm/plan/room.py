"""Room: which sequences fit into the KV cache; Windows: how long blocks of layers with a window are kept.

Owns no block; what is free is known to the `BlockManager`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Windows:
    """What the layers with a window need. A block that no later token reads is freed."""

    reach: int  # the positions, back from a token and with its own, that any of these layers may read
    parts: int | None = None  # blocks of the other layers that one of theirs makes; None: all have windows

    def first_read(self, position: int, block_size: int) -> int:
        """The first block that the token at `position`, or a later one, reads."""
        return max(0, position + 1 - self.reach) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` has at once, computed `chunk` tokens at a time."""
        whole = -(-num_tokens // block_size)
        return min(whole, (self.reach + chunk - 2) // block_size + 2)

    def slabs(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most slabs of the `BlockPool` that a sequence has at once, if its blocks lie close together."""
        others = 0 if self.parts is None else -(-num_tokens // (block_size * self.parts))
        return others + self.most_blocks(num_tokens, block_size, chunk)

    def longest(self, asked: int, num_slabs: int, block_size: int, chunk: int) -> int:
        """The most tokens of a sequence, up to `asked`, for which so many slabs suffice."""
        low, high = 0, asked
        while low < high:  # bisection: a longer sequence never needs fewer
            middle = (low + high + 1) // 2
            if self.slabs(middle, block_size, chunk) <= num_slabs:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True)
class Room:
    """Which sequences fit: the size of the KV cache, and the longest sequence."""

    num_blocks: int
    block_size: int
    asked: int  # max_model_len before the size of the KV cache lowers it
    longest: int | None = None  # up to which the user can raise max_model_len; None: its current value
    cache_options: str = "num_kvcache_blocks or gpu_memory_utilization"  # to make the cache larger, in errors
    windows: Windows | None = None  # None: every layer reads all tokens
    chunk: int = 1  # most new tokens of a step

    @cached_property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together."""
        if self.windows is None:
            return min(self.asked, self.num_blocks * self.block_size)
        return self.windows.longest(self.asked, self.num_blocks, self.block_size, self.chunk)

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
