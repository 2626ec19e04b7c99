"""Room: which sequences fit into the KV cache. Owns no block; what is free is known to the `BlockManager`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nanovllm.kv_group import ONE_GROUP, KVGroup, longest_in


@dataclass(frozen=True)
class Room:
    """Which sequences fit: the size of the KV cache, and the longest sequence."""

    num_blocks: int  # slabs of the `BlockPool`
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
