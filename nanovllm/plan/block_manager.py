"""BlockManager: which sequences own each KV cache block, and which blocks hold a prefix that can be shared.

Knows token ids and block numbers, never K/V itself. Blocks are allocated and freed at planning time, while
launched steps may still write to them. This is safe, because the device runs steps in the order of their
plans. So an earlier step's writes to a block land before its next owner's first write. And a block becomes
shareable only when the step that fills it is planned, so no later step writes to it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import xxhash

from nanovllm.plan.sequence import Sequence

ROOT = 0  # the chain id of the empty prefix


@dataclass(frozen=True, slots=True)
class _CachedBlock:
    """The content of a full block: its tokens, and its parent in the chain. Chain ids are never reused."""

    key: int
    chain: int
    parent: int
    tokens: bytes


def block_key(parent: int, tokens: bytes) -> int:
    """Hash a block's tokens, seeded with its parent's chain id (xxHash64)."""
    return xxhash.xxh64_intdigest(tokens, seed=parent)


class BlockManager:
    """Blocks with reference counts, and a prefix cache over full blocks.

    A hit counts only if the tokens and the parent's chain id are equal, so a hash collision never shares
    blocks. A freed block stays findable until it is reused, in least-recently-used order.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        # In order of reuse.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._content: list[_CachedBlock | None] = [None] * num_blocks
        self._by_key: dict[int, int] = {}  # block_key -> block
        self._next_chain = ROOT + 1
        self.num_cached_tokens = 0  # total tokens that allocations found in the prefix cache

    @property
    def usage(self) -> float:
        """The share of the blocks that sequences hold, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, seq: Sequence, spare: int = 0) -> bool:
        """Give `seq`, which owns no blocks, blocks for all its tokens, from the prefix cache if possible.

        Sets its block table and `num_computed_tokens` (at least one token is left to compute). Returns False
        and changes nothing if fewer than `spare` blocks would stay free.
        """
        assert not seq.block_table
        needed = self.blocks_for(seq.num_tokens)
        hits = self._find_prefix(seq) if self._free else []
        num_revived = sum(self._ref_counts[block] == 0 for block in hits)
        if needed - len(hits) + num_revived + spare > len(self._free):
            return False
        for block in hits:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
        seq.block_table = hits + [self._take() for _ in range(needed - len(hits))]
        seq.num_computed_tokens = len(hits) * self.block_size
        self.num_cached_tokens += seq.num_computed_tokens
        seq.num_hashed_blocks = len(hits)
        content = self._content[hits[-1]] if hits else None
        seq.chain = content.chain if content else ROOT
        return True

    def grow(self, seq: Sequence) -> bool:
        """Add blocks for all of the sequence's tokens. Returns False and changes nothing if there are too few
        free blocks."""
        missing = self.blocks_for(seq.num_tokens) - len(seq.block_table)
        if missing > len(self._free):
            return False
        seq.block_table.extend(self._take() for _ in range(missing))
        return True

    def free(self, seq: Sequence) -> None:
        """Free the sequence's blocks. Its last blocks are reused first, because prefixes are shared more
        often."""
        for block in reversed(seq.block_table):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._content[block] is None:  # not cached: reuse it before all cached blocks
                    self._free.move_to_end(block, last=False)
        seq.block_table = []
        seq.num_computed_tokens = 0
        seq.num_hashed_blocks = 0
        seq.chain = ROOT

    def register(self, seq: Sequence) -> None:
        """Make the sequence's full blocks findable, if their tokens are known and their K/V is computed by
        the step being planned or an earlier one."""
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        num_full = min(len(seq.token_ids), seq.num_computed_tokens) // size
        while seq.num_hashed_blocks < num_full and seq.chain is not None:
            index = seq.num_hashed_blocks
            tokens = seq.token_bytes(index * size, (index + 1) * size)
            seq.chain = self._register_block(seq.block_table[index], seq.chain, tokens)
            seq.num_hashed_blocks += 1

    def reset(self) -> bool:
        """Empty the prefix cache and return True. While a sequence owns a block, do nothing, return False."""
        if len(self._free) < self.num_blocks:
            return False
        self._by_key.clear()
        self._content = [None] * self.num_blocks
        return True

    def _find_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks of the sequence's prefix, without its last token and without tokens whose hidden
        state is needed."""
        if not self.enable_prefix_caching:
            return []
        size, parent = self.block_size, ROOT
        hits: list[int] = []
        most = len(seq.token_ids) - 1
        if seq.next_wanted is not None:
            most = min(most, seq.next_wanted)
        for index in range(most // size):
            tokens = seq.token_bytes(index * size, (index + 1) * size)
            block = self._by_key.get(block_key(parent, tokens))
            if block is None:
                break
            content = self._content[block]
            if content is None or content.parent != parent or content.tokens != tokens:
                break
            hits.append(block)
            parent = content.chain
        return hits

    def _register_block(self, block: int, parent: int, tokens: bytes) -> int | None:
        """Make `block` findable and return its chain id; if an equal block is cached, return that one's id.
        None on a hash collision."""
        key = block_key(parent, tokens)
        if key in self._by_key:
            known = self._content[self._by_key[key]]
            assert known is not None
            return known.chain if known.parent == parent and known.tokens == tokens else None
        content = _CachedBlock(key, self._next_chain, parent, tokens)
        self._next_chain += 1
        self._by_key[key] = block
        self._content[block] = content
        return content.chain

    def _take(self) -> int:
        """Take the next free block and remove its content from the prefix cache."""
        block, _ = self._free.popitem(last=False)
        content = self._content[block]
        if content is not None:
            del self._by_key[content.key]
            self._content[block] = None
        self._ref_counts[block] = 1
        return block
