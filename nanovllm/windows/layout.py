"""How layers with a window and the others share the memory of the KV cache. Asks no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from nanovllm.attention.rotary import AttentionSpec
from nanovllm.batch import PADDING, Batch
from nanovllm.kv_group import KVGroup
from nanovllm.runner.memory import CacheLayout
from nanovllm.windows.policy import Window

_MOST_UNUSED = 0.25  # of a block's memory; beyond it all layers keep the blocks of all tokens


@dataclass(frozen=True, slots=True)
class TwoGroups(CacheLayout):
    """Layers without a window, group 0, and with one, group 1, each with blocks of their own.

    Block i of the second group and `per_slab` blocks of the first take the same memory, [:, :, i], a slab of
    the pool. Where layers of both groups have other sizes, blocks have other numbers in layers than in the
    pool: see `blocks_of`.
    """

    pieces: tuple[int, int] = 1, 1  # blocks of each group in a block of a layer of the cache

    def blocks_of(self, numbers: np.ndarray, group: int, slabs: int) -> np.ndarray:
        """Block numbers of the pool as those of each layer of a group; PADDING stays."""
        pieces = np.int32(self.pieces[group])
        if pieces == 1:
            return numbers
        part, slab = np.divmod(numbers, np.int32(slabs))
        inside = (part // pieces * np.int32(slabs) + slab) * pieces + part % pieces
        return np.where(numbers == PADDING, numbers, inside)

    def numbered(self, batch: Batch, slabs: int) -> Batch:
        tables = [self.blocks_of(table, group, slabs) for group, table in enumerate(batch.tables)]
        copies = [self._copies(cells, group, slabs) for group, cells in enumerate(batch.copies)]
        return replace(batch, tables=tuple(tables), copies=tuple(copies))

    def _copies(self, cells: np.ndarray, group: int, slabs: int) -> np.ndarray:
        blocks, places = np.split(cells.reshape(-1, 4), [2], axis=1)
        return np.concatenate([self.blocks_of(blocks, group, slabs), places], axis=1)

    def places(self, slabs: int) -> list[tuple[int, int]]:
        places, seen, span = [], [0, 0], self.cell * slabs
        layers = self.groups[0].per_slab // self.pieces[0]  # of the cache, for each layer without a window
        for size, group in zip(self.sizes, self.group_of, strict=True):
            number = seen[group]
            seen[group] += size > 0
            if group == 0:
                places.append((number * layers * span, layers * span))
            else:  # each slab holds `pieces` of them, one after the other
                start = number % self.pieces[1] * size
                places.append((number // self.pieces[1] * span + start, max(0, span - start)))
        return places


def windowed_layout(specs: Sequence[AttentionSpec], block_size: int, tile: int) -> CacheLayout:
    """The layout of layers of which some have a window. tile: `window_tile` of the backend.

    If the layers of a kind differ, or too much memory would be unused, all keep the blocks of all tokens.
    """
    owners = [index if spec.kv_from is None else spec.kv_from for index, spec in enumerate(specs)]
    windows = {
        owner: [spec.window for spec, other in zip(specs, owners, strict=True) if other == owner]
        for owner in owners
    }
    near = {owner for owner, found in windows.items() if None not in found}
    one = CacheLayout.plain(specs)
    if not near:
        return one
    reach = max(window for owner in near for window in windows[owner] if window is not None)
    reach += 0 if block_size % tile == 0 else tile - 1
    windowed = KVGroup(Window(reach))
    others = len(windows) - len(near)
    if not others:
        return replace(one, groups=(windowed,))
    kinds = [{one.sizes[owner] for owner in owners if (owner in near) == kind} for kind in (True, False)]
    if max(map(len, kinds)) > 1:  # a kind whose layers differ has no common block
        return one
    [near_size], [other_size] = kinds
    cell = lcm(near_size, other_size)
    near_layers = -(-len(near) // (cell // near_size))  # of the cache

    def unused(layers: int) -> float:
        return max((layers * cell - len(near) * near_size) / (layers * cell), layers % others / layers)

    layers = min(range(max(near_layers, others), near_layers + others), key=unused)
    if unused(layers) > _MOST_UNUSED:
        return one
    pieces = cell // other_size, cell // near_size
    group_of = tuple(int(owner in near) for owner in owners)
    groups = KVGroup(per_slab=layers // others * pieces[0]), windowed
    own_numbers = pieces != (1, 1)
    return TwoGroups(layers, cell, one.sizes, group_of, groups, own_numbers, pieces)
