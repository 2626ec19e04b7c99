"""BlockPool: the free and used blocks of the KV cache, in one memory for all groups of layers.

Each group has blocks of its own. Knows no sequence and no token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, Protocol, TypeVar


class Content(Protocol):
    """What is cached in a block."""

    @property
    def is_full(self) -> bool: ...


C = TypeVar("C", bound=Content)


class BlockPool(Generic[C]):
    """Free and used blocks, with a reference count each, and what is cached in them.

    The memory consists of slabs. A slab holds `per_slab` blocks of one group of layers, and changes its group
    when it is free. Blocks are numbered group after group; block i lies in slab i % num_slabs. In a table a
    block has its number within its group, without `offsets` of the group. With one group whose `per_slab` is
    1 a slab is a block.

    Free slabs are reused in this order: those in which nothing is cached, blocks of which only a part is
    cached, the others; the last two by when they were used last.
    """

    def __init__(self, num_slabs: int, per_slab: Sequence[int], forget: Callable[[C], None]) -> None:
        """per_slab: of each group. forget: called with the content of a cached block that is reused."""
        self.num_slabs, self.per_slab = num_slabs, tuple(per_slab)
        self.offsets = [num_slabs * each for each in accumulate(per_slab, initial=0)]
        self._is_plain = self.per_slab == (1,)
        self._group_of = [group for group, parts in enumerate(per_slab) for _ in range(parts)]
        self._forget = forget
        self.ref_counts = [0] * self.offsets[-1]
        self.content: list[C | None] = [None] * self.offsets[-1]
        self._num_used = [0] * num_slabs  # used blocks of each slab
        # Slabs without a used block, and each group's free blocks of the other slabs; all in order of reuse.
        self.free_slabs: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slabs))
        self.free_parts: list[OrderedDict[int, None]] = [OrderedDict() for _ in per_slab]
        # Free slabs that are a block whose content is not full, if a slab is a block.
        self._free_partial: OrderedDict[int, None] = OrderedDict()

    @property
    def usage(self) -> float:
        """The share of the memory that sequences hold, 0 to 1."""
        parts = sum(len(free) / each for free, each in zip(self.free_parts, self.per_slab, strict=True))
        return 1 - (len(self.free_slabs) + parts) / self.num_slabs

    def slabs_for(self, blocks: Sequence[int], revived: Sequence[int] = ()) -> int:
        """The free slabs that so many new blocks of each group take, and `revived`, free cached blocks."""
        total = 0
        for group, (new, parts) in enumerate(zip(blocks, self.per_slab, strict=True)):
            free = self.free_parts[group]
            own = [block for block in revived if self.group_of(block) == group]
            opened = [block for block in own if block not in free]
            pinned = len({block % self.num_slabs for block in opened})
            left = len(free) - (len(own) - len(opened)) + pinned * parts - len(opened)
            total += pinned - (-max(0, new - left) // parts)
        return total

    def group_of(self, block: int) -> int:
        return self._group_of[block // self.num_slabs]

    def take(self, group: int = 0, spread: bool = False) -> int:
        """Take the next free block of a group and forget what is cached in it.

        spread: rather open an empty slab than forget something, while half of the slabs are free.
        """
        free = self.free_parts[group]
        if free and not (spread and self.content[next(iter(free))] is not None and self._has_empty()):
            block, _ = free.popitem(last=False)
        else:
            block = self._next_slab()
            if not self._is_plain:
                block = self._open(block, group)
        self._clear(block)
        self._use(block)
        return block

    def share(self, block: int) -> None:
        """Count one more owner of a cached block, which may be free."""
        if self.ref_counts[block]:
            self.ref_counts[block] += 1
            return
        group = self.group_of(block)
        if block in self.free_parts[group]:
            del self.free_parts[group][block]
        else:
            slab = block % self.num_slabs
            del self.free_slabs[slab]
            self._free_partial.pop(slab, None)
            if not self._is_plain:
                self._open(slab, group, block)
        self._use(block)

    def drop(self, block: int) -> None:
        """Count one owner less. A block without any is free; if nothing is cached in it, it is reused before
        all that are cached."""
        self.ref_counts[block] -= 1
        assert self.ref_counts[block] >= 0
        if self.ref_counts[block]:
            return
        content = self.content[block]
        slab, cached = block % self.num_slabs, content is not None
        self._num_used[slab] -= 1
        if not self._is_plain:
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
        self.free_slabs[slab] = None  # the last one
        if not cached:
            self.free_slabs.move_to_end(slab, last=False)
        if self._is_plain and content is not None and not content.is_full:
            self._free_partial[slab] = None

    def reset(self) -> None:
        """Forget all content; no block is used."""
        self.content = [None] * len(self.content)
        self._free_partial.clear()

    def _next_slab(self) -> int:
        """Take the slab to reuse out of the free ones."""
        slab, _ = self.free_slabs.popitem(last=False)  # those without content come first
        if self._free_partial and self.content[slab] is not None:
            partial, _ = self._free_partial.popitem(last=False)
            if partial != slab:
                self.free_slabs[slab] = None
                self.free_slabs.move_to_end(slab, last=False)
                del self.free_slabs[partial]
            return partial
        return slab

    def _has_empty(self) -> bool:
        """Whether nothing is cached in the slab to reuse next, and half of all are free."""
        if 2 * len(self.free_slabs) < self.num_slabs:
            return False
        slab = next(iter(self.free_slabs))
        return all(content is None for content in self.content[slab :: self.num_slabs])

    def _parts_of(self, slab: int, group: int) -> range:
        return range(self.offsets[group] + slab, self.offsets[group + 1], self.num_slabs)

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
        self._num_used[block % self.num_slabs] += 1

    def _clear(self, block: int) -> None:
        content = self.content[block]
        if content is not None:
            self._forget(content)
            self.content[block] = None
