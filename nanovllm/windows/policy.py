"""The policy of layers whose tokens attend to a window: a block that has left it is freed."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.kv_group import KVPolicy


@dataclass(frozen=True, slots=True)
class Window(KVPolicy):
    """A block is kept while a later token reads it."""

    keeps_all = False

    reach: int  # the positions, back from a token and with its own, that any of the layers may read

    def first_read(self, position: int, block_size: int) -> int:
        return max(0, position + 1 - self.reach) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        whole = -(-num_tokens // block_size)
        return min(whole, (self.reach + chunk - 2) // block_size + 2)
