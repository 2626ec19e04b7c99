"""BlockManager: which sequences own each KV cache block, and which cached K/V a new sequence takes.

Knows token ids and block numbers, never K/V itself. Blocks are allocated and freed at planning time, while
launched steps may still write to them. This is safe, because the device runs steps in the order of their
plans. So an earlier step's writes to a block land before its next owner's first write. And tokens become
findable only when the step that computes them is planned, so no later step writes to their cells.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from nanovllm.batch import PADDING
from nanovllm.plan.prefix_tree import NO_CHAIN, CachedBlock, PrefixTree
from nanovllm.plan.sequence import Room, Sequence

Piece = tuple[int, int, int]  # cells of a block: the block, the first cell, the number of cells

# The cached K/V of a prompt's beginning: full blocks, to be shared; a block whose first cells continue them,
# and how many, to be copied.
Found = tuple[list[int], int, int]


class BlockPool:
    """The free and used blocks, with a reference count each, and what is cached in them. Knows no sequence.

    Free blocks are reused in this order: those in which nothing is cached, blocks of which only a part is
    cached, the others; the last two by when they were used last.
    """

    def __init__(self, num_blocks: int, forget: Callable[[Any], None]) -> None:
        """forget: called with the content of a cached block that is reused."""
        self.num_blocks = num_blocks
        self._forget = forget
        self.ref_counts = [0] * num_blocks
        self.content: list[CachedBlock | None] = [None] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in order of reuse
        self._free_partial: OrderedDict[int, None] = OrderedDict()  # those whose content is not full

    @property
    def usage(self) -> float:
        """The share of the memory that sequences hold, 0 to 1."""
        return 1 - len(self.free) / self.num_blocks

    def take(self) -> int:
        """Take the next free block and forget what is cached in it."""
        block = self._next_free()
        content = self.content[block]
        if content is not None:
            self._forget(content)
            self.content[block] = None
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more owner of a cached block, which may be free."""
        if not self.ref_counts[block]:
            del self.free[block]
            self._free_partial.pop(block, None)
        self.ref_counts[block] += 1

    def drop(self, block: int) -> None:
        """Count one owner less. A block without any is free; if nothing is cached in it, it is reused before
        all that are cached."""
        count = self.ref_counts[block] = self.ref_counts[block] - 1
        assert count >= 0
        if count:
            return
        self.free[block] = None  # the last one
        content = self.content[block]
        if content is None:
            self.free.move_to_end(block, last=False)
        elif content.chain == NO_CHAIN:
            self._free_partial[block] = None

    def reset(self) -> None:
        """Forget all content; no block is used."""
        self.content = [None] * len(self.content)
        self._free_partial.clear()

    def _next_free(self) -> int:
        """Take the block to reuse out of the free ones."""
        block, _ = self.free.popitem(last=False)  # those without content come first
        if self._free_partial and self.content[block] is not None:
            partial, _ = self._free_partial.popitem(last=False)
            if partial != block:
                self.free[block] = None
                self.free.move_to_end(block, last=False)
                del self.free[partial]
            return partial
        return block


class BlockManager:
    """The blocks of sequences, and a prefix cache.

    Full blocks are shared, and the first cells of any cached block are copied to a new one. So a prompt is
    computed from the token on where it parts from all that are cached. A freed block stays findable until it
    is reused.

    This one serves a single group of layers that keeps all blocks. Several groups, and policies that free
    blocks of running sequences, have another manager in their door, found in `BLOCKS` of `doors.py`.
    """

    grid = 1  # a step computes the tokens of a prompt up to a multiple of it, or all
    coming: Collection[Sequence] = ()  # the waiting sequences, the next one first
    keeps_all = True  # False: `extend` gives blocks before each step of a prompt, and frees those not read

    def __init__(self, room: Room, enable_prefix_caching: bool = True, share_outputs: bool = True) -> None:
        """share_outputs: the last block of a sequence that ends stays findable with its output."""
        self.num_blocks, self.block_size = room.num_blocks, room.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._tree = PrefixTree()
        self.pool = self._make_pool(room)
        self._share_outputs = share_outputs
        # Of the step being planned: what is copied to each block of a group, from where; the owned sources.
        self._copied: list[dict[int, list[Piece]]] = [{} for _ in room.groups]
        self._pinned: list[int] = []
        self.num_cached_tokens = 0  # total tokens that allocations found in the prefix cache

    def _make_pool(self, room: Room) -> BlockPool:
        return BlockPool(room.num_blocks, self._tree.remove)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- the blocks of a sequence ------------------------------------------------------------------------

    def allocate(self, seq: Sequence, spare: int = 0) -> bool:
        """Give `seq`, which owns no blocks, blocks for all its tokens, from the prefix cache if possible.

        Sets its block tables and `num_computed_tokens` (at least one token is left to compute). Returns False
        and changes nothing if fewer than `spare` blocks would stay free.
        """
        pool, needed = self.pool, self.blocks_for(seq.num_known_tokens)
        found = self._find_prefix(seq)
        # If there is room for each block, and the source of a copy, nothing more is asked.
        fitting = found if needed + 1 + spare <= len(pool.free) else self._fitting(seq, found, spare)
        if fitting is None:
            return False
        table, source, cells = fitting
        self._begin(seq, table, cells)
        for block in table:
            pool.share(block)
        if cells:  # owned until the step is planned, because its stores come before its copies
            pool.share(source)
            self._pinned.append(source)
        take = pool.take
        table += [take() for _ in range(len(table), needed)]
        if cells:
            self._copy(self._copied[0], source, table[seq.num_hashed_blocks], cells)
        seq.tables = [table]
        seq.capacity = needed * self.block_size
        return True

    def _begin(self, seq: Sequence, hits: list[int], cells: int) -> None:
        """What of `seq` is computed and findable when it is admitted."""
        seq.chain = self._chain_of(hits[-1]) if hits else seq.root
        seq.num_hashed_blocks = len(hits)
        seq.num_computed_tokens = len(hits) * self.block_size + cells
        self.num_cached_tokens += seq.num_computed_tokens

    def _fitting(self, seq: Sequence, found: Found, spare: int) -> Found | None:
        """As much of what is found as leaves `spare` blocks free; None if there is too little room."""
        for each in (found, (found[0], PADDING, 0)):  # owning the source of a copy may take the last one
            if self._fits(seq, each, spare):
                return each
        return None

    def _fits(self, seq: Sequence, found: Found, spare: int) -> bool:
        """Whether `spare` blocks stay free when `seq` gets blocks for all its tokens after those found."""
        hits, source, cells = found
        used = [*hits, source] if cells else hits
        revived = sum([self.pool.ref_counts[block] == 0 for block in used])
        needed = self.blocks_for(seq.num_known_tokens) - len(hits) + revived
        return needed + spare <= len(self.pool.free)

    def take_copies(self) -> tuple[np.ndarray, ...]:
        """The copies of the step being planned, as in `Batch`. Call it once all its sequences have their
        blocks."""
        if not self._pinned:
            return ()
        for block in self._pinned:
            self.pool.drop(block)
        copies = [
            [(source, to, first, cells) for to, pieces in copied.items() for source, first, cells in pieces]
            for copied in self._copied
        ]
        self._pinned, self._copied = [], [{} for _ in self._copied]
        return tuple([np.array(each, np.int32) for each in copies])

    @staticmethod
    def _copy(copied: dict[int, list[Piece]], source: int, target: int, cells: int) -> None:
        """Let the step being planned copy the first cells of a block. Those that it copies to `source` itself
        come from where they are: no cell is source and target in one step."""
        pieces, start = [], 0
        for block, first, count in copied.get(source, ()):
            if first < cells:
                pieces.append((block, first, min(count, cells - first)))
                start = first + count
        if start < cells:
            pieces.append((source, start, cells - start))
        copied[target] = pieces

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Add blocks for the first `num_tokens`, those after `num_computed_tokens` in this step, and free
        those that no later token reads. Returns False and adds nothing if too few are free."""
        table, needed = seq.tables[0], self.blocks_for(num_tokens)
        if needed - len(table) > len(self.pool.free):
            return False
        table += [self.pool.take() for _ in range(len(table), needed)]
        seq.capacity = len(table) * self.block_size
        return True

    def num_coming(self, seq: Sequence) -> int:
        """The most blocks that a sequence takes after those it has, or after `allocate`."""
        num_blocks = len(seq.tables[0]) if seq.tables else self.blocks_for(seq.num_known_tokens)
        return self.blocks_for(seq.max_tokens_total) - num_blocks

    def release(self, seq: Sequence) -> None:
        """Free the blocks that no token from `num_computed_tokens` on reads, unless `keeps_all`."""

    def free(self, seq: Sequence) -> None:
        """Free the sequence's blocks. Its last blocks are reused first, because prefixes are shared more
        often."""
        if self._share_outputs:
            self.register(seq, rest=True)
        self._drop_all(seq)
        seq.tables = []
        seq.capacity = seq.num_computed_tokens = 0
        seq.num_hashed_blocks = 0
        seq.chain = seq.root

    def _drop_all(self, seq: Sequence) -> None:
        drop = self.pool.drop
        for block in reversed(seq.tables[0]):
            drop(block)

    # -- the prefix cache --------------------------------------------------------------------------------

    def register(self, seq: Sequence, rest: bool = False) -> None:
        """Make the sequence's full blocks findable, if their tokens are known and their K/V is computed by
        the step being planned or an earlier one. rest: also the first cells of the block after them."""
        if not self.enable_prefix_caching:
            return
        size, computed = self.block_size, min(seq.num_known_tokens, seq.num_computed_tokens)
        num_full = computed // size
        while seq.num_hashed_blocks < num_full and seq.chain is not None:
            index = seq.num_hashed_blocks
            block = seq.tables[0][index]
            if block == PADDING:  # freed before its tokens were known: nothing follows it
                seq.chain = None
                return
            tokens = seq.token_bytes(index * size, (index + 1) * size)
            if self.pool.content[block] is not None:
                self._forget_partial(block)
            added = self._tree.add_full(block, seq.chain, tokens)
            seq.chain = None if added is None else added.chain
            self._keep(seq, index, added)
            seq.num_hashed_blocks += 1
        start = num_full * size
        if not rest or start == computed or seq.chain is None:
            return
        block, tokens = seq.tables[0][num_full], seq.token_bytes(start, computed)
        known = self.pool.content[block]
        if known is None:
            self._keep(seq, num_full, self._tree.add_partial(block, seq.chain, tokens))
        elif known.tokens != tokens:
            self._keep(seq, num_full, self._tree.extend(known, tokens))

    def _keep(self, seq: Sequence, index: int, added: CachedBlock | None) -> None:
        """Note what the tree added for a sequence's block: nothing, this block, or an equal one."""
        block = seq.tables[0][index]
        self.pool.content[block] = added if added is not None and added.block == block else None

    def reset(self) -> bool:
        """Empty the prefix cache and return True. While a sequence owns a block, do nothing, return False."""
        if len(self.pool.free) < self.num_blocks:
            return False
        self._tree.clear()
        self.pool.reset()
        return True

    def _chain_of(self, block: int) -> int:
        content = self.pool.content[block]
        assert content is not None, "a hit is cached"
        return content.chain

    def _find_prefix(self, seq: Sequence) -> Found:
        """The cached K/V of the sequence's prefix, without its last token and without tokens whose hidden
        state is needed."""
        if not (self.enable_prefix_caching and self.pool.free):
            return [], PADDING, 0
        size, parent, find = self.block_size, seq.root, self._tree.find
        hits: list[int] = []
        most = seq.num_known_tokens - 1
        if seq.extras is not None:
            most = seq.extras.most_cached(most)
        for start in range(0, most // size * size, size):
            known = find(parent, seq.token_bytes(start, start + size))
            if known is None:
                break
            hits.append(known.block)
            parent = known.chain
        return self._with_cells(seq, hits, parent, most)

    def _with_cells(self, seq: Sequence, hits: list[int], parent: int, most: int) -> Found:
        """These leading blocks, and the block that has most of the tokens after them."""
        start = len(hits) * self.block_size
        tokens = seq.token_bytes(start, min(most, start + self.block_size))
        nearest, cells = self._tree.nearest(parent, tokens)
        return (hits, PADDING, 0) if nearest is None else (hits, nearest.block, cells)

    def _forget_partial(self, block: int) -> None:
        """Forget the first cells of a block, of which more becomes findable."""
        known = self.pool.content[block]
        if known is not None and not known.is_full:
            self._tree.remove(known)
            self.pool.content[block] = None
