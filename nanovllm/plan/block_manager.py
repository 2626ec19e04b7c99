"""BlockManager: which sequences own each KV cache block, and which cached K/V a new sequence takes.

Knows token ids and block numbers, never K/V itself. Blocks are allocated and freed at planning time, while
launched steps may still write to them. This is safe, because the device runs steps in the order of their
plans. So an earlier step's writes to a block land before its next owner's first write. And tokens become
findable only when the step that computes them is planned, so no later step writes to their cells.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nanovllm.batch import PADDING
from nanovllm.plan.pool import BlockPool
from nanovllm.plan.prefix_tree import ROOT, CachedBlock, PrefixTree
from nanovllm.plan.room import Windows
from nanovllm.plan.sequence import Sequence

Piece = tuple[int, int, int]  # cells of a block: the block, the first cell, the number of cells


class Found(NamedTuple):
    """The cached K/V of a prompt's beginning."""

    blocks: list[int]  # full blocks, to be shared; of two kinds, those of the layers without a window
    source: int = PADDING  # a block whose first cells continue them
    cells: int = 0  # how many, to be copied


class BlockManager:
    """The blocks of sequences, and a prefix cache.

    Full blocks are shared, and the first cells of any cached block are copied to a new one. So a prompt is
    computed from the token on where it parts from all that are cached. Models with windows only share.

    A freed block stays findable until it is reused. In a table PADDING stands for a block that has left every
    window and was freed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        windows: Windows | None = None,
        chunk: int = 1,
        share_outputs: bool = True,
    ) -> None:
        """num_blocks: with two kinds of layers, slabs of the `BlockPool`. chunk: most new tokens of a
        step. share_outputs: the last block of a sequence that ends stays findable with its output."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.windows, self._chunk = windows, chunk
        parts = 1 if windows is None else windows.parts or 1
        # Whether there are layers of two kinds, each with blocks of its own; if not, whether all have windows
        self.two_kinds = windows is not None and windows.parts is not None
        self._all_windowed = windows is not None and not self.two_kinds
        self.pool = BlockPool[CachedBlock](num_blocks, parts, self.two_kinds, self._forget)
        self._share_outputs = share_outputs
        self._tree = PrefixTree()
        self._windowed: dict[int, int] = {}  # chain id -> block of the layers with a window, of two kinds
        # Of the step being planned: what is copied to each block, from where; and the owned sources.
        self._copied: dict[int, list[Piece]] = {}
        self._pinned: list[int] = []
        self.num_cached_tokens = 0  # total tokens that allocations found in the prefix cache

    @property
    def usage(self) -> float:
        """The share of the blocks that sequences hold, 0 to 1."""
        return self.pool.usage

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, seq: Sequence, spare: int = 0) -> bool:
        """Give `seq`, which owns no blocks, blocks for all its tokens, from the prefix cache if possible.

        Sets its block tables and `num_computed_tokens` (at least one token is left to compute). Returns False
        and changes nothing if fewer than `spare` blocks would stay free. For layers with a window there is
        room, but `extend` gives the blocks before each step of the prompt.
        """
        assert not seq.block_table
        pool = self.pool
        found = self._find_prefix(seq) if pool.free_slabs else Found([])
        if not self._fits(seq, found, spare):
            found = Found(found.blocks)  # owning the source of a copy may take the last free block
            if found.blocks and pool.usage == 0 and not self._fits(seq, found, spare):
                found = Found([])  # cached blocks may lie in more slabs than new ones take
            if not self._fits(seq, found, spare):
                return False
        hits, source, cells = found
        count = len(hits)
        seq.chain = self._chain_of(hits[-1]) if hits else ROOT
        if self.windows is not None:
            self._take_windowed(seq, hits)
        for block in hits:
            if block != PADDING:
                pool.share(block)
        if cells:  # owned until the step is planned, because its stores come before its copies
            pool.share(source)
            self._pinned.append(source)
        seq.block_table = hits
        if not self._all_windowed:
            for _ in range(count, self.blocks_for(seq.num_tokens)):
                hits.append(pool.take())
        if cells:
            self._copy(source, hits[count], cells)
        seq.num_computed_tokens = count * self.block_size + cells
        self.num_cached_tokens += seq.num_computed_tokens
        seq.num_hashed_blocks = count
        return True

    def _take_windowed(self, seq: Sequence, hits: list[int]) -> None:
        """Give `seq` the cached blocks of layers with a window; leave out of `hits` those that have left it,
        if all layers have one."""
        first = self._first_kept(len(hits) * self.block_size)
        if self._all_windowed:
            hits[:first] = [PADDING] * first
            return
        kept = [self._windowed[self._chain_of(block)] for block in hits[first:]]
        seq.window_table = [PADDING] * first + [block - self.pool.first_windowed for block in kept]
        for block in kept:
            self.pool.share(block)

    def take_copies(self) -> np.ndarray | None:
        """The copies of the step being planned, as in `Batch`; None if there are none. Call it once all its
        sequences have their blocks."""
        if not self._pinned:
            return None
        for block in self._pinned:
            self.pool.drop(block)
        copies = [
            (source, target, first, cells)
            for target, pieces in self._copied.items()
            for source, first, cells in pieces
        ]
        self._pinned, self._copied = [], {}
        return np.array(copies, np.int32)

    def grow(self, seq: Sequence) -> bool:
        """Add blocks for all of the sequence's tokens, and free those that have left every window. Returns
        False and adds nothing if there are too few free blocks."""
        return self.extend(seq, seq.num_tokens)

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """`grow` for the first `num_tokens` tokens, those after `num_computed_tokens` in this step."""
        self.release(seq)
        needed = self.blocks_for(num_tokens)
        missing = max(0, needed - len(seq.block_table))
        windowed = needed - len(seq.window_table) if self.two_kinds else 0
        if self.pool.slabs_for(missing, windowed) > len(self.pool.free_slabs):
            return False
        seq.block_table.extend([self.pool.take() for _ in range(missing)])
        first = self.pool.first_windowed
        seq.window_table.extend([self.pool.take(windowed=True) - first for _ in range(windowed)])
        return True

    def release(self, seq: Sequence) -> None:
        """Free the blocks that no token from `num_computed_tokens` on reads, in layers with a window."""
        if self.windows is None:
            return
        table = seq.window_table if self.two_kinds else seq.block_table
        index = min(self._first_kept(seq.num_computed_tokens), len(table)) - 1
        offset = self.pool.first_windowed if self.two_kinds else 0
        while index >= 0 and table[index] != PADDING:  # all before a freed one are free
            self.pool.drop(table[index] + offset)
            table[index] = PADDING
            index -= 1

    def free(self, seq: Sequence) -> None:
        """Free the sequence's blocks. Its last blocks are reused first, because prefixes are shared more
        often."""
        if self._share_outputs and self.windows is None:
            self.register(seq, rest=True)
        drop = self.pool.drop
        for table, offset in ((seq.window_table, self.pool.first_windowed), (seq.block_table, 0)):
            for block in reversed(table):
                if block != PADDING:
                    drop(block + offset)
        seq.block_table, seq.window_table = [], []
        seq.num_computed_tokens = 0
        seq.num_hashed_blocks = 0
        seq.chain = ROOT

    def register(self, seq: Sequence, rest: bool = False) -> None:
        """Make the sequence's full blocks findable, if their tokens are known and their K/V is computed by
        the step being planned or an earlier one. rest: also the first cells of the block after them."""
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        num_full = min(len(seq.token_ids), seq.num_computed_tokens) // size
        while seq.num_hashed_blocks < num_full and seq.chain is not None:
            index = seq.num_hashed_blocks
            block = seq.block_table[index]
            if block == PADDING:  # freed before its tokens were known: nothing follows it
                seq.chain = None
                return
            tokens = seq.token_bytes(index * size, (index + 1) * size)
            if self.pool.content[block] is not None:
                self._forget_partial(block)
            added = self._tree.add_full(block, seq.chain, tokens)
            if added is not None and added.block == block:
                self.pool.content[block] = added
            seq.chain = None if added is None else added.chain
            if self.two_kinds and seq.chain is not None:
                self._register_windowed(seq.window_table[index], seq.chain)
            seq.num_hashed_blocks += 1
        if rest and seq.chain is not None and self.windows is None:
            self._register_rest(seq, seq.chain, num_full * size)

    def _register_rest(self, seq: Sequence, chain: int, start: int) -> None:
        """Make the known and computed tokens from `start` on findable, which are less than a block."""
        end = min(len(seq.token_ids), seq.num_computed_tokens)
        if start == end:
            return
        block, tokens = seq.block_table[seq.num_hashed_blocks], seq.token_bytes(start, end)
        known = self.pool.content[block]
        if known is None:
            self.pool.content[block] = self._tree.add_partial(block, chain, tokens)
        elif known.tokens != tokens:
            self.pool.content[block] = self._tree.extend(known, tokens)

    def reset(self) -> bool:
        """Empty the prefix cache and return True. While a sequence owns a block, do nothing, return False."""
        if len(self.pool.free_slabs) < self.num_blocks:
            return False
        self._tree.clear()
        self._windowed.clear()
        self.pool.reset()
        return True

    def _first_kept(self, position: int) -> int:
        """The first block that layers with a window read for the token at `position`, or a later one."""
        return 0 if self.windows is None else self.windows.first_read(position, self.block_size)

    def _chain_of(self, block: int) -> int:
        content = self.pool.content[block]
        assert content is not None, "a hit is cached"
        return content.chain

    def _fits(self, seq: Sequence, found: Found, spare: int) -> bool:
        """Whether `spare` blocks stay free when `seq` gets blocks for all its tokens after those found, and
        at the step of its prompt that needs the most."""
        hits = found.blocks
        needed, windowed, pool = self.blocks_for(seq.num_tokens), 0, self.pool
        if 2 * needed + 1 + spare <= len(pool.free_slabs):
            return True  # even if each block of both kinds, and the source of a copy, takes a slab of its own
        missing, revived = needed - len(hits), hits
        if self.windows is not None:
            first = self._first_kept(len(hits) * self.block_size)
            most = self.windows.most_blocks(seq.num_tokens, self.block_size, self._chunk)
            kept = (
                [self._windowed[self._chain_of(b)] for b in hits[first:]] if self.two_kinds else hits[first:]
            )
            shared = sum(pool.ref_counts[block] > 0 for block in kept)
            windowed = min(most, needed - first - shared)  # with the revived ones
        if self._all_windowed:
            missing, revived = 0, []
        if found.cells:
            revived = [*revived, found.source]
        revived = [block for block in revived if pool.ref_counts[block] == 0]
        return pool.slabs_for(missing, windowed, revived) + spare <= len(pool.free_slabs)

    def _find_prefix(self, seq: Sequence) -> Found:
        """The cached K/V of the sequence's prefix, without its last token and without tokens whose hidden
        state is needed."""
        if not self.enable_prefix_caching:
            return Found([])
        size, parent = self.block_size, ROOT
        hits: list[int] = []
        most = len(seq.token_ids) - 1
        if seq.next_wanted is not None:
            most = min(most, seq.next_wanted)
        for index in range(most // size):
            known = self._tree.find(parent, seq.token_bytes(index * size, (index + 1) * size))
            if known is None:
                break
            hits.append(known.block)
            parent = known.chain
        if self.windows is not None:
            return Found(hits[: self._num_windowed(hits)] if self.two_kinds else hits)
        start = len(hits) * size
        nearest, cells = self._tree.nearest(parent, seq.token_bytes(start, min(most, start + size)))
        return Found(hits) if nearest is None else Found(hits, nearest.block, cells)

    def _num_windowed(self, hits: list[int]) -> int:
        """The most of these leading blocks after which the layers with a window find all that they read."""
        found = [self._chain_of(block) in self._windowed for block in hits]
        missing = -1  # the last block before `count` that is not cached for these layers
        most = 0
        for count in range(1, len(hits) + 1):
            if not found[count - 1]:
                missing = count - 1
            if missing < self._first_kept(count * self.block_size):
                most = count
        return most

    def _copy(self, source: int, target: int, cells: int) -> None:
        """Let the step being planned copy the first cells of a block. Those that it copies to `source` itself
        come from where they are: no cell is source and target in one step."""
        pieces, start = [], 0
        for block, first, count in self._copied.get(source, ()):
            if first < cells:
                pieces.append((block, first, min(count, cells - first)))
                start = first + count
        if start < cells:
            pieces.append((source, start, cells - start))
        self._copied[target] = pieces

    def _register_windowed(self, block: int, chain: int) -> None:
        """Make the block of the layers with a window findable, unless it was freed or one is known."""
        number = block + self.pool.first_windowed
        if block != PADDING and chain not in self._windowed and self.pool.content[number] is None:
            self._windowed[chain] = number
            self.pool.content[number] = CachedBlock(number, chain)

    def _forget_partial(self, block: int) -> None:
        """Forget the first cells of a block, of which more becomes findable."""
        known = self.pool.content[block]
        if known is not None and not known.is_full:
            self._tree.remove(known)
            self.pool.content[block] = None

    def _forget(self, content: CachedBlock) -> None:
        """A cached block is reused."""
        if content.tokens:
            self._tree.remove(content)
        else:
            del self._windowed[content.chain]
