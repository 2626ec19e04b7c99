"""BlockManager: who owns which KV cache block, and which blocks hold a prompt beginning that can be shared.

Knows token ids and block numbers, never K/V itself. Blocks are handed out and taken back at planning time,
while launched steps may still be writing. That is safe by one rule: the device runs steps in the order in
which they were planned, so whatever an earlier step still writes into a block lands before its next owner's
first write, and a block becomes shareable only when a step is planned that fills it, so that no later step
will ever write it again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import xxhash

from nanovllm.plan.sequence import Sequence

ROOT = 0  # the chain id of the empty beginning


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """The content of a full block: its tokens after its parent's. A chain id is never given twice."""

    key: int
    chain: int
    parent: int
    tokens: bytes


def block_key(parent: int, tokens: bytes) -> int:
    """Hash a block's tokens chained to its parent (xxHash64)."""
    return xxhash.xxh64_intdigest(tokens, seed=parent)


class BlockManager:
    """Blocks with reference counts, and a prefix cache over full blocks.

    A hit is confirmed by comparing the tokens and the parent's chain id, so two prompts whose hashes collide
    never share. A freed block stays findable until it is needed, least recently used first.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        # Next to be reused first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._content: list[CachedBlock | None] = [None] * num_blocks
        self._by_key: dict[int, int] = {}  # block_key -> block
        self._next_chain = ROOT + 1
        self.num_cached_tokens = 0  # that allocations found in the prefix cache, ever

    @property
    def usage(self) -> float:
        """The share of the blocks that sequences hold, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, seq: Sequence, spare: int = 0) -> bool:
        """Give `seq`, which owns nothing, the blocks of all its tokens, shared where the prefix cache allows.

        Sets its block table and `num_computed_tokens` (at least one token is left to compute). Returns False
        and changes nothing when fewer than `spare` blocks would stay free.
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
        """Make room for all of the sequence's tokens. Returns False and changes nothing when blocks are
        short."""
        missing = self.blocks_for(seq.num_tokens) - len(seq.block_table)
        if missing > len(self._free):
            return False
        seq.block_table.extend(self._take() for _ in range(missing))
        return True

    def free(self, seq: Sequence) -> None:
        """Take back the sequence's blocks. The last ones are reused first: a beginning is worth more than an
        end."""
        for block in reversed(seq.block_table):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._content[block] is None:  # nothing to lose: reuse it before any cached one
                    self._free.move_to_end(block, last=False)
        seq.block_table = []
        seq.num_computed_tokens = 0
        seq.num_hashed_blocks = 0
        seq.chain = ROOT

    def register(self, seq: Sequence) -> None:
        """Make the sequence's full blocks findable, as far as tokens are known and their K/V is computed by
        the step that is being planned, or was before."""
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
        """Make what blocks hold unfindable. False, and nothing is done, while a sequence owns one."""
        if len(self._free) < self.num_blocks:
            return False
        self._by_key.clear()
        self._content = [None] * self.num_blocks
        return True

    def _find_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks that hold the sequence's beginning, before its last token and before the first
        whose hidden state is wanted."""
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
        """Make `block` findable and return its chain id: an equal block's if there is one, None on a
        collision."""
        key = block_key(parent, tokens)
        if key in self._by_key:
            known = self._content[self._by_key[key]]
            assert known is not None
            return known.chain if known.parent == parent and known.tokens == tokens else None
        content = CachedBlock(key, self._next_chain, parent, tokens)
        self._next_chain += 1
        self._by_key[key] = block
        self._content[block] = content
        return content.chain

    def _take(self) -> int:
        """Take the next free block, forgetting what it held."""
        block, _ = self._free.popitem(last=False)
        content = self._content[block]
        if content is not None:
            del self._by_key[content.key]
            self._content[block] = None
        self._ref_counts[block] = 1
        return block
