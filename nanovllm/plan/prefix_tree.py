"""PrefixTree: which cached block holds the K/V of given tokens after a given prefix.

It is the tree of all prompts whose K/V is cached, with a node for each block. Knows neither owners nor K/V.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter
from struct import Struct
from typing import NamedTuple

import xxhash

ROOT = 0  # the chain id of the empty prefix; a sequence may have another root, below NO_CHAIN
NO_CHAIN = -1  # of a block that is not full: nothing follows it
TOKEN_BYTES = 4  # of a token id, int32


class CachedBlock(NamedTuple):
    """What a block holds: tokens as int32, after its parent in the chain. Chain ids are never reused."""

    block: int
    chain: int
    parent: int = -1
    tokens: bytes = b""
    place: int = 0  # the `child_key`
    key: int = 0  # of a full block

    @property
    def is_full(self) -> bool:
        return self.chain != NO_CHAIN


def block_key(parent: int, tokens: bytes) -> int:
    """Hash a full block's tokens, seeded with its parent's chain id (xxHash64)."""
    return xxhash.xxh64_intdigest(tokens, seed=parent)


_first_of = Struct("=I").unpack_from


def child_key(parent: int, tokens: bytes) -> int:
    """A number for a parent and the first token after it. Unlike a tuple, garbage collection ignores it."""
    return parent << 32 | _first_of(tokens)[0]


def num_common(tokens: bytes, others: bytes) -> int:
    """How many tokens two sequences of int32 have in common at their beginning."""
    size = min(len(tokens), len(others))
    differs = int.from_bytes(tokens[:size], "big") ^ int.from_bytes(others[:size], "big")
    return (size - (differs.bit_length() + 7) // 8) // TOKEN_BYTES


_tokens_of = attrgetter("tokens")


class PrefixTree:
    """Cached blocks by their content. A block counts only if the tokens and the parent's chain id are equal,
    so a hash collision never gives another block."""

    def __init__(self) -> None:
        self._by_key: dict[int, CachedBlock] = {}  # the full blocks
        # All blocks by parent and first token: a single one, or several in the order of their bytes. The one
        # that has most tokens in common with others is next to the place of these in that order.
        self._children: dict[int, CachedBlock | list[CachedBlock]] = {}
        self._next_chain = ROOT + 1

    def __iter__(self) -> Iterator[CachedBlock]:
        for children in self._children.values():
            yield from children if isinstance(children, list) else (children,)

    def find(self, parent: int, tokens: bytes) -> CachedBlock | None:
        """The full block of these tokens."""
        found = self._by_key.get(block_key(parent, tokens))
        return None if found is None or found.parent != parent or found.tokens != tokens else found

    def nearest(self, parent: int, tokens: bytes) -> tuple[CachedBlock | None, int]:
        """The block that has most of these tokens at its beginning, and how many; None and 0 if none has."""
        children = self._children.get(child_key(parent, tokens)) if tokens else None
        if children is None:
            return None, 0
        if not isinstance(children, list):
            return children, num_common(children.tokens, tokens)
        place = bisect_left(children, tokens, key=_tokens_of)
        near = children[max(place - 1, 0)]
        most = num_common(near.tokens, tokens)
        if 0 < place < len(children):
            longer = TOKEN_BYTES * (most + 1)
            if children[place].tokens[:longer] == tokens[:longer]:
                near = children[place]
                most = num_common(near.tokens, tokens)
        return near, most

    def add_full(self, block: int, parent: int, tokens: bytes) -> CachedBlock | None:
        """Make a full block findable; return it, or an equal one that is known. None on a hash collision."""
        key = block_key(parent, tokens)
        known = self._by_key.get(key)
        if known is not None:
            return known if known.parent == parent and known.tokens == tokens else None
        place = child_key(parent, tokens)
        added = self._by_key[key] = CachedBlock(block, self._next_chain, parent, tokens, place, key)
        self._next_chain += 1
        self._insert(added)
        return added

    def add_partial(self, block: int, parent: int, tokens: bytes) -> CachedBlock | None:
        """Make the first cells of a block findable; None if another block begins with all these tokens."""
        added = CachedBlock(block, NO_CHAIN, parent, tokens, child_key(parent, tokens))
        return added if self._insert(added) else None

    def extend(self, cached: CachedBlock, tokens: bytes) -> CachedBlock | None:
        """Make more cells of a partial block findable, as `add_partial`. tokens: all of the block."""
        block, chain, parent, _, place, _ = cached
        if self._children[place] is cached:
            added = self._children[place] = CachedBlock(block, chain, parent, tokens, place)
            return added
        self.remove(cached)
        return self.add_partial(block, parent, tokens)

    def remove(self, cached: CachedBlock) -> None:
        """Forget a block, whose cells will hold something else."""
        if cached.is_full:
            del self._by_key[cached.key]
        children = self._children[cached.place]
        if isinstance(children, list):
            del children[bisect_left(children, cached.tokens, key=_tokens_of)]
            if len(children) == 1:
                self._children[cached.place] = children[0]
        else:
            del self._children[cached.place]

    def clear(self) -> None:
        self._by_key.clear()
        self._children.clear()

    def _insert(self, added: CachedBlock) -> bool:
        """Add a child to its parent; False if it is not full and another child begins with all its tokens."""
        tokens = added.tokens
        children = self._children.setdefault(added.place, added)
        if children is added:
            return True
        several = children if isinstance(children, list) else [children]
        index = bisect_left(several, tokens, key=_tokens_of)  # of the first one that may begin with them
        if index < len(several) and not added.is_full and several[index].tokens.startswith(tokens):
            return False
        several.insert(index, added)
        self._children[added.place] = several
        return True
