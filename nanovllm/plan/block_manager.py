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
from nanovllm.kv_group import ONE_GROUP, KVGroup
from nanovllm.plan.pool import BlockPool
from nanovllm.plan.prefix_tree import ROOT, CachedBlock, PrefixTree
from nanovllm.plan.sequence import Sequence

Piece = tuple[int, int, int]  # cells of a block: the block, the first cell, the number of cells


class Found(NamedTuple):
    """The cached K/V of a prompt's beginning, as blocks of the first group."""

    blocks: list[int]  # full blocks, to be shared
    source: int = PADDING  # a block whose first cells continue them
    cells: int = 0  # how many, to be copied


class Twin(NamedTuple):
    """What a block of a later group holds: the K/V, in the layers of that group, of a block of the first."""

    block: int
    first: int  # that block
    group: int
    is_full: bool


class BlockManager:
    """The blocks of sequences, and a prefix cache.

    Full blocks are shared, and the first cells of any cached block are copied to a new one. So a prompt is
    computed from the token on where it parts from all that are cached. Each group of layers has blocks of its
    own; a block of the first group has a twin in each other group. A hit needs the twins of what is read.

    A freed block stays findable until it is reused. In a table PADDING stands for a block that was freed
    because no later token reads it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
        chunk: int = 1,
        share_outputs: bool = True,
    ) -> None:
        """num_blocks: slabs of the `BlockPool`. chunk: most new tokens of a step. share_outputs: the last
        block of a sequence that ends stays findable with its output."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups, self._chunk = groups, chunk
        self.keeps_all = all(each.policy.keeps_all for each in groups)  # else see `extend`
        self.pool = BlockPool[CachedBlock | Twin](num_blocks, [g.per_slab for g in groups], self._forget)
        self._offsets = self.pool.offsets[:-1]
        self._share_outputs = share_outputs
        self._tree = PrefixTree()
        # The twins in each group by their block in the first one; none are noted for the first itself.
        self._twins: list[dict[int, int]] = [{} for _ in groups]
        self._has_twins = len(groups) > 1
        # Of the step being planned: what is copied to each block of a group, from where; the owned sources.
        self._copied: list[dict[int, list[Piece]]] = [{} for _ in groups]
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
        and changes nothing if fewer than `spare` blocks would stay free. In groups that do not keep all there
        is room, but `extend` gives the blocks before each step of the prompt.
        """
        assert not seq.tables
        found = self._find_prefix(seq) if self.pool.free_slabs else Found([])
        # Whether there is room even if each block, and the source of a copy, takes a slab of its own
        needed = self.blocks_for(seq.num_tokens)
        roomy = (needed + 1) * len(self.groups) + spare <= len(self.pool.free_slabs)
        if not (roomy or self._fits(seq, found, spare)):
            found = Found(found.blocks)  # owning the source of a copy may take the last free block
            if found.blocks and self.pool.usage == 0 and not self._fits(seq, found, spare):
                found = Found([])  # cached blocks may lie in more slabs than new ones take
            if not self._fits(seq, found, spare):
                return False
        hits, source, cells = found
        count = len(hits)
        seq.chain = self._chain_of(hits[-1]) if hits else ROOT
        seq.num_computed_tokens = count * self.block_size + cells
        share, take, sources = self.pool.share, self.pool.take, []
        for group, offset in enumerate(self._offsets):
            first, kept = self._kept(seq.num_computed_tokens, hits, group)
            for block in kept:
                share(block)
            own = kept if offset == first == 0 else [PADDING] * first + [block - offset for block in kept]
            seq.tables.append(own)
            if cells:  # owned until the step is planned, because its stores come before its copies
                sources.append(self._twins[group][source] if group else source)
                share(sources[-1])
        self._pinned += sources
        for group, table in enumerate(seq.tables):
            most = needed if self.groups[group].policy.keeps_all else count + (cells > 0)
            offset = self._offsets[group]
            table.extend([take(group, roomy) - offset for _ in range(count, most)])
            if cells:
                self._copy(self._copied[group], sources[group] - offset, table[count], cells)
        seq.capacity = len(seq.tables[0]) * self.block_size
        self.num_cached_tokens += seq.num_computed_tokens
        seq.num_hashed_blocks = count
        return True

    def _kept(self, position: int, hits: list[int], group: int) -> tuple[int, list[int]]:
        """The first block of these leading ones that the token at `position` or a later one reads in a group,
        and that and the following ones there."""
        policy, twins = self.groups[group].policy, self._twins[group]
        if policy.keeps_all and group == 0:
            return 0, hits
        first = min(policy.first_read(position, self.block_size), len(hits))
        return first, [twins[block] for block in hits[first:]] if group else hits[first:]

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
        self._pinned, self._copied = [], [{} for _ in self.groups]
        return tuple([np.array(each, np.int32) for each in copies])

    def grow(self, seq: Sequence) -> bool:
        """Add blocks for all of the sequence's tokens, and free those that no later token reads. Returns
        False and adds nothing if there are too few free blocks."""
        return self.extend(seq, seq.num_tokens)

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """`grow` for the first `num_tokens` tokens, those after `num_computed_tokens` in this step."""
        self.release(seq)
        needed = self.blocks_for(num_tokens)
        new = [max(0, needed - len(table)) for table in seq.tables]
        if self.pool.slabs_for(new) > len(self.pool.free_slabs):
            return False
        for group, table in enumerate(seq.tables):
            offset = self._offsets[group]
            table.extend([self.pool.take(group, spread=True) - offset for _ in range(new[group])])
        seq.capacity = len(seq.tables[0]) * self.block_size
        return True

    def release(self, seq: Sequence) -> None:
        """Free the blocks that no token from `num_computed_tokens` on reads."""
        if self.keeps_all:
            return
        for group, table, offset in zip(self.groups, seq.tables, self.pool.offsets, strict=False):
            first = group.policy.first_read(seq.num_computed_tokens, self.block_size)
            index = min(first, len(table)) - 1
            while index >= 0 and table[index] != PADDING:  # all before a freed one are free
                self.pool.drop(table[index] + offset)
                table[index] = PADDING
                index -= 1

    def free(self, seq: Sequence) -> None:
        """Free the sequence's blocks. Its last blocks are reused first, because prefixes are shared more
        often."""
        if self._share_outputs:
            self.register(seq, rest=True)
        drop = self.pool.drop
        for group in reversed(range(len(seq.tables))):
            offset = self._offsets[group]
            for block in reversed(seq.tables[group]):
                if block != PADDING:
                    drop(block + offset)
        seq.tables = []
        seq.capacity = seq.num_computed_tokens = 0
        seq.num_hashed_blocks = 0
        seq.chain = ROOT

    def register(self, seq: Sequence, rest: bool = False) -> None:
        """Make the sequence's full blocks findable, if their tokens are known and their K/V is computed by
        the step being planned or an earlier one. rest: also the first cells of the block after them."""
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        num_full = min(seq.num_known_tokens, seq.num_computed_tokens) // size
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
            if added is not None and added.block == block:
                self.pool.content[block] = added
            seq.chain = None if added is None else added.chain
            if self._has_twins and added is not None:
                self._register_twins(added, seq, index)
            seq.num_hashed_blocks += 1
        if rest and seq.chain is not None:
            self._register_rest(seq, seq.chain, num_full * size)

    def _register_rest(self, seq: Sequence, chain: int, start: int) -> None:
        """Make the known and computed tokens from `start` on findable, which are less than a block."""
        end = min(seq.num_known_tokens, seq.num_computed_tokens)
        if start == end:
            return
        index = seq.num_hashed_blocks
        block, tokens = seq.tables[0][index], seq.token_bytes(start, end)
        known = self._node_of(block)
        if known is None:
            added = self._tree.add_partial(block, chain, tokens)
        elif known.tokens != tokens:
            added = self._tree.extend(known, tokens)
        else:
            return
        self.pool.content[block] = added
        if not self._has_twins:
            return
        if added is None:
            self._forget_twins(block)
        else:
            self._register_twins(added, seq, index)

    def _register_twins(self, added: CachedBlock, seq: Sequence, index: int) -> None:
        """Make a sequence's blocks of later groups findable with their block of the first group, unless they
        were freed or others are known."""
        for group in range(1, len(self.groups)):
            own = seq.tables[group][index]
            number = own + self.pool.offsets[group]
            if own != PADDING and added.block not in self._twins[group] and self.pool.content[number] is None:
                self._twins[group][added.block] = number
                self.pool.content[number] = Twin(number, added.block, group, added.is_full)

    def reset(self) -> bool:
        """Empty the prefix cache and return True. While a sequence owns a block, do nothing, return False."""
        if len(self.pool.free_slabs) < self.num_blocks:
            return False
        self._tree.clear()
        for twins in self._twins:
            twins.clear()
        self.pool.reset()
        return True

    def _node_of(self, block: int) -> CachedBlock | None:
        """What a block of the first group holds."""
        content = self.pool.content[block]
        assert not isinstance(content, Twin), "a twin is in another group"
        return content

    def _chain_of(self, block: int) -> int:
        content = self._node_of(block)
        assert content is not None, "a hit is cached"
        return content.chain

    def _fits(self, seq: Sequence, found: Found, spare: int) -> bool:
        """Whether `spare` blocks stay free when `seq` gets blocks for all its tokens after those found, and
        at the step of its prompt that needs the most."""
        hits, size, pool = found.blocks, self.block_size, self.pool
        needed = self.blocks_for(seq.num_tokens)
        new: list[int] = []
        revived: list[int] = []
        for group, each in enumerate(self.groups):
            first, kept = self._kept(len(hits) * size + found.cells, hits, group)
            own = [block for block in kept if pool.ref_counts[block] == 0]
            most = min(each.policy.most_blocks(seq.num_tokens, size, self._chunk), needed - first)
            new.append(max(0, min(most, needed - first - len(kept) + len(own)) - len(own)))
            if found.cells:
                source = self._twins[group][found.source] if group else found.source
                own += [source] if pool.ref_counts[source] == 0 else []
            revived += own
        return pool.slabs_for(new, revived) + spare <= len(pool.free_slabs)

    def _find_prefix(self, seq: Sequence) -> Found:
        """The cached K/V of the sequence's prefix, without its last token and without tokens whose hidden
        state is needed."""
        if not self.enable_prefix_caching:
            return Found([])
        size, parent = self.block_size, ROOT
        hits: list[int] = []
        most = seq.num_known_tokens - 1
        if seq.next_wanted is not None:
            most = min(most, seq.next_wanted)
        for index in range(most // size):
            known = self._tree.find(parent, seq.token_bytes(index * size, (index + 1) * size))
            if known is None:
                break
            hits.append(known.block)
            parent = known.chain
        if self._has_twins:
            hits = hits[: self._num_readable(hits)]
            parent = self._chain_of(hits[-1]) if hits else ROOT
        start = len(hits) * size
        nearest, cells = self._tree.nearest(parent, seq.token_bytes(start, min(most, start + size)))
        if nearest is None:
            return Found(hits)
        if self._has_twins and any(nearest.block not in twins for twins in self._twins[1:]):
            return Found(hits)
        return Found(hits, nearest.block, cells)

    def _num_readable(self, hits: list[int]) -> int:
        """The most of these leading blocks after which each group finds all that it reads."""
        most = len(hits)
        for group, twins in enumerate(self._twins[1:], 1):
            first_read, missing, readable = self.groups[group].policy.first_read, -1, 0
            for count in range(1, most + 1):
                if hits[count - 1] not in twins:
                    missing = count - 1  # the last one before `count`
                if missing < first_read(count * self.block_size, self.block_size):
                    readable = count
            most = readable
        return most

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

    def _forget_partial(self, block: int) -> None:
        """Forget the first cells of a block, of which more becomes findable."""
        known = self._node_of(block)
        if known is not None and not known.is_full:
            self._tree.remove(known)
            self.pool.content[block] = None
            self._forget_twins(block)

    def _forget_twins(self, block: int) -> None:
        for twins in self._twins[1:]:
            twin = twins.pop(block, None)
            if twin is not None:
                self.pool.content[twin] = None

    def _forget(self, content: CachedBlock | Twin) -> None:
        """A cached block is reused."""
        if isinstance(content, Twin):
            del self._twins[content.group][content.first]
        else:
            self._tree.remove(content)
            self._forget_twins(content.block)
