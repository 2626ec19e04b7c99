"""BlockPool: the free and used blocks of the KV cache, in one memory for two kinds of layers.

If some layers have a window and others do not, each kind has its own blocks. Knows no sequence and no token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Content(Protocol):
    """What is cached in a block."""

    @property
    def is_full(self) -> bool: ...


C = TypeVar("C", bound=Content)


class BlockPool(Generic[C]):
    """Free and used blocks, with a reference count each, and what is cached in them.

    The memory consists of slabs. A slab holds one block of the layers with a window or `parts` blocks of the
    other layers, never both kinds at once. Block i of the others lies in slab i % num_slabs; the block with a
    window of slab i has the number i + parts * num_slabs here. With one kind of layers a slab is a block.

    Free slabs are reused in this order: those in which nothing is cached, blocks of which only a part is
    cached, the others; the last two by when they were used last.
    """

    def __init__(self, num_slabs: int, parts: int, two_kinds: bool, forget: Callable[[C], None]) -> None:
        """forget: called with the content of a cached block that is reused."""
        self.num_slabs, self.parts = num_slabs, parts
        self.first_windowed = num_slabs * parts
        size = self.first_windowed + (num_slabs if two_kinds else 0)
        self._two_kinds = two_kinds
        self._forget = forget
        self.ref_counts = [0] * size
        self.content: list[C | None] = [None] * size
        self._num_used = [0] * num_slabs  # used blocks of each slab
        # Slabs without a used block, and free blocks of the other slabs; both in order of reuse.
        self.free_slabs: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slabs))
        self.free_parts: OrderedDict[int, None] = OrderedDict()
        # Free slabs that are a block whose content is not full. There are none with two kinds of layers.
        self._free_partial: OrderedDict[int, None] = OrderedDict()

    @property
    def usage(self) -> float:
        """The share of the memory that sequences hold, 0 to 1."""
        return 1 - (len(self.free_slabs) + len(self.free_parts) / self.parts) / self.num_slabs

    def slabs_for(self, blocks: int, windowed: int = 0, revived: list[int] | None = None) -> int:
        """The free slabs that so many new blocks of both kinds take, and `revived`, free cached blocks of
        layers without a window."""
        revived = revived or []
        opened = [block % self.num_slabs for block in revived if block not in self.free_parts]
        pinned = len(set(opened))
        left = len(self.free_parts) - (len(revived) - len(opened)) + pinned * self.parts - len(opened)
        return windowed + pinned + -(-max(0, blocks - left) // self.parts)

    def take(self, windowed: bool = False) -> int:
        """Take the next free block and forget what is cached in it."""
        if self.free_parts and not windowed:
            block, _ = self.free_parts.popitem(last=False)
        else:
            block = self._open(self._next_slab(), windowed)
        self._clear(block)
        self._use(block)
        return block

    def share(self, block: int) -> None:
        """Count one more owner of a cached block, which may be free."""
        if self.ref_counts[block]:
            self.ref_counts[block] += 1
            return
        if block in self.free_parts:
            del self.free_parts[block]
        else:
            slab = block % self.num_slabs
            del self.free_slabs[slab]
            self._free_partial.pop(slab, None)
            self._open(slab, block >= self.first_windowed, block)
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
        if self._num_used[slab]:
            self.free_parts[block] = None
            self.free_parts.move_to_end(block, last=cached)
            return
        for part in self._parts_of(slab) if self.parts > 1 else ():
            if part != block and block < self.first_windowed:
                del self.free_parts[part]
                cached = cached or self.content[part] is not None
        self.free_slabs[slab] = None  # the last one
        if not cached:
            self.free_slabs.move_to_end(slab, last=False)
        if content is not None and not content.is_full:
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

    def _parts_of(self, slab: int) -> range:
        return range(slab, self.first_windowed, self.num_slabs)

    def _open(self, slab: int, windowed: bool, wanted: int | None = None) -> int:
        """Use a free slab for one kind of blocks; return `wanted`, or a block of that kind. Its other blocks
        of the same kind are free."""
        if self.parts == 1 and not self._two_kinds:
            return slab
        if windowed:
            for part in self._parts_of(slab):
                self._clear(part)
            return self.first_windowed + slab
        if self._two_kinds:
            self._clear(self.first_windowed + slab)
        parts = self._parts_of(slab)
        block = min(parts, key=lambda part: self.content[part] is not None) if wanted is None else wanted
        for part in parts:
            if part != block:
                self.free_parts[part] = None
                self.free_parts.move_to_end(part, last=self.content[part] is not None)
        return block

    def _use(self, block: int) -> None:
        self.ref_counts[block] = 1
        self._num_used[block % self.num_slabs] += 1

    def _clear(self, block: int) -> None:
        content = self.content[block]
        if content is not None:
            self._forget(content)
            self.content[block] = None
