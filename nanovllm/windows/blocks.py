"""GroupBlocks: the blocks of sequences in several groups of layers, or under a policy that frees blocks of
running sequences. `SlabPool` has the blocks of all groups in one memory.

Each group has blocks of its own. The prefix tree knows those of the first group; a block has a twin in each
other group, and a prefix hit needs the twins of what is read. In a table PADDING stands for a block that was
freed because no later token reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Row
from itertools import accumulate
from typing import Any, NamedTuple

from nanovllm.batch import PADDING
from nanovllm.plan.block_manager import BlockManager, BlockPool, Found
from nanovllm.plan.prefix_tree import CachedBlock
from nanovllm.plan.sequence import Room, Sequence


class Twin(NamedTuple):
    """What a block of a later group holds: the K/V, in the layers of that group, of a block of the first."""

    block: int
    first: int  # that block
    group: int
    is_full: bool


class SlabPool(BlockPool):
    """The blocks of all groups in one memory, which consists of slabs.

    A slab holds `per_slab` blocks of one group of layers, and changes its group when it is free. Blocks are
    numbered group after group; block i lies in slab i % num_blocks. In a table a block has its number within
    its group, without `offsets` of the group. With one group whose `per_slab` is 1 a slab is a block. `free`
    are the slabs without a used block.

    Free slabs are reused in this order: those in which nothing is cached, the others by when they were used
    last; if a slab is a block, as in `BlockPool`.
    """

    content: list[Any]  # `CachedBlock` or `Twin`

    def __init__(self, num_slabs: int, per_slab: Row[int], forget: Callable[[Any], None]) -> None:
        """per_slab: of each group."""
        super().__init__(num_slabs, forget)
        self.per_slab = tuple(per_slab)
        self.offsets = [num_slabs * each for each in accumulate(per_slab, initial=0)]
        self._is_plain = self.per_slab == (1,)
        self._group_of = [group for group, parts in enumerate(per_slab) for _ in range(parts)]
        self.ref_counts = [0] * self.offsets[-1]
        self.content = [None] * self.offsets[-1]
        self._num_used = [0] * num_slabs  # used blocks of each slab
        # Each group's free blocks of the slabs that have used ones, in order of reuse.
        self.free_parts: list[OrderedDict[int, None]] = [OrderedDict() for _ in per_slab]

    @property
    def usage(self) -> float:
        parts = sum(len(free) / each for free, each in zip(self.free_parts, self.per_slab, strict=True))
        return 1 - (len(self.free) + parts) / self.num_blocks

    def slabs_for(self, blocks: Row[int], revived: Row[int] = ()) -> int:
        """The free slabs that so many new blocks of each group take, and `revived`, free cached blocks."""
        total = 0
        for group, (new, parts) in enumerate(zip(blocks, self.per_slab, strict=True)):
            free = self.free_parts[group]
            own = [block for block in revived if self.group_of(block) == group]
            opened = [block for block in own if block not in free]
            pinned = len({block % self.num_blocks for block in opened})
            left = len(free) - (len(own) - len(opened)) + pinned * parts - len(opened)
            total += pinned - (-max(0, new - left) // parts)
        return total

    def group_of(self, block: int) -> int:
        return self._group_of[block // self.num_blocks]

    def take(self, group: int = 0, spread: bool = False) -> int:
        """Take the next free block of a group and forget what is cached in it.

        spread: rather open an empty slab than forget something, while half of the slabs are free.
        """
        if self._is_plain:
            return super().take()
        free = self.free_parts[group]
        if free and not (spread and self.content[next(iter(free))] is not None and self._has_empty()):
            block, _ = free.popitem(last=False)
        else:
            slab, _ = self.free.popitem(last=False)  # those without content come first
            block = self._open(slab, group)
        self._clear(block)
        self._use(block)
        return block

    def share(self, block: int) -> None:
        if self._is_plain:
            super().share(block)
        elif self.ref_counts[block]:
            self.ref_counts[block] += 1
        else:
            group = self.group_of(block)
            if block in self.free_parts[group]:
                del self.free_parts[group][block]
            else:
                slab = block % self.num_blocks
                del self.free[slab]
                self._open(slab, group, block)
            self._use(block)

    def drop(self, block: int) -> None:
        if self._is_plain:
            super().drop(block)
            return
        self.ref_counts[block] -= 1
        assert self.ref_counts[block] >= 0
        if self.ref_counts[block]:
            return
        slab, cached = block % self.num_blocks, self.content[block] is not None
        self._num_used[slab] -= 1
        group = self.group_of(block)
        free = self.free_parts[group]
        if self._num_used[slab]:
            free[block] = None
            free.move_to_end(block, last=cached)
            return
        for part in self._parts_of(slab, group):
            if part != block:
                del free[part]
                cached = cached or self.content[part] is not None
        self.free[slab] = None  # the last one
        if not cached:
            self.free.move_to_end(slab, last=False)

    def _has_empty(self) -> bool:
        """Whether nothing is cached in the slab to reuse next, and half of all are free."""
        if 2 * len(self.free) < self.num_blocks:
            return False
        slab = next(iter(self.free))
        return all(content is None for content in self.content[slab :: self.num_blocks])

    def _parts_of(self, slab: int, group: int) -> range:
        return range(self.offsets[group] + slab, self.offsets[group + 1], self.num_blocks)

    def _open(self, slab: int, group: int, wanted: int | None = None) -> int:
        """Use a free slab for blocks of one group; return `wanted`, or one of them. The others are free."""
        for other in range(len(self.per_slab)):
            if other != group:
                for part in self._parts_of(slab, other):
                    self._clear(part)
        parts, free = self._parts_of(slab, group), self.free_parts[group]
        block = min(parts, key=lambda part: self.content[part] is not None) if wanted is None else wanted
        for part in parts:
            if part != block:
                free[part] = None
                free.move_to_end(part, last=self.content[part] is not None)
        return block

    def _use(self, block: int) -> None:
        self.ref_counts[block] = 1
        self._num_used[block % self.num_blocks] += 1

    def _clear(self, block: int) -> None:
        content = self.content[block]
        if content is not None:
            self._forget(content)
            self.content[block] = None


class GroupBlocks(BlockManager):
    """As `BlockManager`, for any groups of layers and any policies."""

    pool: SlabPool

    def __init__(self, room: Room, enable_prefix_caching: bool = True, share_outputs: bool = True) -> None:
        super().__init__(room, enable_prefix_caching, share_outputs)
        self.groups, self._chunk = room.groups, room.chunk
        self.keeps_all = all(each.policy.keeps_all for each in room.groups)
        self._offsets = self.pool.offsets[:-1]
        # The twins in each group by their block in the first one; none are noted for the first itself.
        self.twins: list[dict[int, int]] = [{} for _ in room.groups]

    def _make_pool(self, room: Room) -> SlabPool:
        return SlabPool(room.num_blocks, [each.per_slab for each in room.groups], self._forget)

    # -- the blocks of a sequence ------------------------------------------------------------------------

    def allocate(self, seq: Sequence, spare: int = 0) -> bool:
        """In groups that do not keep all there is room, but `extend` gives the blocks before each step of the
        prompt."""
        found = self._find_prefix(seq)
        # Whether there is room even if each block, and the source of a copy, takes a slab of its own
        needed = self.blocks_for(seq.num_known_tokens)
        roomy = (needed + 1) * len(self.groups) + spare <= len(self.pool.free)
        fitting = found if roomy else self._fitting(seq, found, spare)
        if fitting is None:
            return False
        hits, source, cells = fitting
        count, sources = len(hits), []
        self._begin(seq, hits, cells)
        seq.tables = []
        for group, offset in enumerate(self._offsets):
            first, kept = self._kept(seq.num_computed_tokens, hits, group)
            for block in kept:
                self.pool.share(block)
            seq.tables.append([PADDING] * first + [block - offset for block in kept])
            if cells:  # owned until the step is planned, because its stores come before its copies
                sources.append(self.twins[group][source] if group else source)
                self.pool.share(sources[-1])
        self._pinned += sources
        for group, table in enumerate(seq.tables):
            most = needed if self.groups[group].policy.keeps_all else count + (cells > 0)
            offset = self._offsets[group]
            table.extend([self.pool.take(group, roomy) - offset for _ in range(count, most)])
            if cells:
                self._copy(self._copied[group], sources[group] - offset, table[count], cells)
        seq.capacity = len(seq.tables[0]) * self.block_size
        return True

    def _kept(self, position: int, hits: list[int], group: int) -> tuple[int, list[int]]:
        """The first block of these leading ones that the token at `position` or a later one reads in a group,
        and that and the following ones there."""
        first = min(self.groups[group].policy.first_read(position, self.block_size), len(hits))
        return first, [self.twins[group][block] for block in hits[first:]] if group else hits[first:]

    def _fitting(self, seq: Sequence, found: Found, spare: int) -> Found | None:
        fitting = super()._fitting(seq, found, spare)
        nothing: Found = [], PADDING, 0
        if fitting is None and found[0] and self.pool.usage == 0 and self._fits(seq, nothing, spare):
            return nothing  # cached blocks may lie in more slabs than new ones take
        return fitting

    def _fits(self, seq: Sequence, found: Found, spare: int) -> bool:
        """Also at the step of its prompt that needs the most."""
        (hits, source, cells), size, pool = found, self.block_size, self.pool
        needed = self.blocks_for(seq.num_known_tokens)
        new: list[int] = []
        revived: list[int] = []
        for group, each in enumerate(self.groups):
            first, kept = self._kept(len(hits) * size + cells, hits, group)
            own = [block for block in kept if pool.ref_counts[block] == 0]
            most = min(each.policy.most_blocks(seq.num_known_tokens, size, self._chunk), needed - first)
            new.append(max(0, min(most, needed - first - len(kept) + len(own)) - len(own)))
            if cells:
                twin = self.twins[group][source] if group else source
                own += [twin] if pool.ref_counts[twin] == 0 else []
            revived += own
        return pool.slabs_for(new, revived) + spare <= len(pool.free)

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        self.release(seq)
        needed = self.blocks_for(num_tokens)
        new = [max(0, needed - len(table)) for table in seq.tables]
        if self.pool.slabs_for(new) > len(self.pool.free):
            return False
        for group, table in enumerate(seq.tables):
            offset = self._offsets[group]
            table.extend([self.pool.take(group, spread=True) - offset for _ in range(new[group])])
        seq.capacity = len(seq.tables[0]) * self.block_size
        return True

    def num_coming(self, seq: Sequence) -> int:
        """Each may take a slab of its own, also those of groups that free as many."""
        most = self.blocks_for(seq.max_tokens_total) * len(self.groups)
        if seq.tables:
            return most - sum(map(len, seq.tables))
        num_full = sum(each.policy.keeps_all for each in self.groups)
        return most - self.blocks_for(seq.num_known_tokens) * num_full

    def release(self, seq: Sequence) -> None:
        if self.keeps_all:
            return
        for group, table, offset in zip(self.groups, seq.tables, self._offsets, strict=True):
            first = group.policy.first_read(seq.num_computed_tokens, self.block_size)
            index = min(first, len(table)) - 1
            while index >= 0 and table[index] != PADDING:  # all before a freed one are free
                self.pool.drop(table[index] + offset)
                table[index] = PADDING
                index -= 1

    def _drop_all(self, seq: Sequence) -> None:
        for offset, table in reversed([*zip(self._offsets, seq.tables, strict=True)]):
            for block in reversed(table):
                if block != PADDING:
                    self.pool.drop(block + offset)

    # -- the prefix cache --------------------------------------------------------------------------------

    def _keep(self, seq: Sequence, index: int, added: CachedBlock | None) -> None:
        """A sequence's blocks of later groups become findable with its block of the first group, unless they
        were freed or others are known."""
        super()._keep(seq, index, added)
        if added is None:
            self._forget_twins(seq.tables[0][index])
            return
        for group in range(1, len(self.groups)):
            own = seq.tables[group][index]
            number = own + self._offsets[group]
            if own != PADDING and added.block not in self.twins[group] and self.pool.content[number] is None:
                self.twins[group][added.block] = number
                self.pool.content[number] = Twin(number, added.block, group, added.is_full)

    def reset(self) -> bool:
        is_reset = super().reset()
        if is_reset:
            for twins in self.twins:
                twins.clear()
        return is_reset

    def _with_cells(self, seq: Sequence, hits: list[int], parent: int, most: int) -> Found:
        count = self._num_readable(hits)
        if count < len(hits):
            hits = hits[:count]
            parent = self._chain_of(hits[-1]) if hits else seq.root
        found = super()._with_cells(seq, hits, parent, most)
        if found[2] and any(found[1] not in twins for twins in self.twins[1:]):
            return hits, PADDING, 0
        return found

    def _num_readable(self, hits: list[int]) -> int:
        """The most of these leading blocks after which each group finds all that it reads."""
        most = len(hits)
        for group, twins in enumerate(self.twins[1:], 1):
            first_read, missing, readable = self.groups[group].policy.first_read, -1, 0
            for count in range(1, most + 1):
                if hits[count - 1] not in twins:
                    missing = count - 1  # the last one before `count`
                if missing < first_read(count * self.block_size, self.block_size):
                    readable = count
            most = readable
        return most

    def _forget_partial(self, block: int) -> None:
        known = self.pool.content[block]
        super()._forget_partial(block)
        if known is not None and self.pool.content[block] is None:
            self._forget_twins(block)

    def _forget_twins(self, block: int) -> None:
        for twins in self.twins[1:]:
            twin = twins.pop(block, None)
            if twin is not None:
                self.pool.content[twin] = None

    def _forget(self, content: CachedBlock | Twin) -> None:
        if isinstance(content, Twin):
            del self.twins[content.group][content.first]
        else:
            self._tree.remove(content)
            self._forget_twins(content.block)
