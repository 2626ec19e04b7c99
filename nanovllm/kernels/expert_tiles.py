"""The rows of each expert in tiles. Owns no weight.

A pair is a row and one of its experts; its number is row * top_k + j. Pairs are sorted by expert, in a fixed
order, on the device. The host knows only upper bounds, so a CUDA graph can hold all of this.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.compat import await_inputs, jit, tl

PAIRS = 64  # that a program places at once
TILES = 64  # that a program describes at once
COUNTS = 16  # programs whose counts are read at once


class Chosen(NamedTuple):
    """The experts of T rows."""

    ids: torch.Tensor  # [T, top_k] int32, the likeliest first; -1 in a row that is routed nowhere
    weights: torch.Tensor  # [T, top_k] float32; 0 there


class ExpertTiles(NamedTuple):
    """The pairs of T rows, sorted by expert, in tiles of `rows` pairs; the last tile of an expert may have
    fewer. A place is an index into `order`."""

    chosen: Chosen
    order: torch.Tensor  # [T * top_k] int32, the pair at each place; undefined after the last one
    experts: torch.Tensor  # [M] int32, of each tile; 0 after the last tile
    starts: torch.Tensor  # [M] int32, the first place of each tile
    ends: torch.Tensor  # [M] int32, the place after its expert's last pair; 0 after the last tile
    count: torch.Tensor  # [1] int32, the number of tiles
    rows: int


def max_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """The maximum number of tiles, whatever the routing."""
    return min(num_pairs, (num_pairs + min(num_pairs, num_experts) * (rows - 1)) // rows)


@jit()
def place(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    first_pair: tl.tensor,
    last_pair: tl.tensor,
    base: tl.tensor,
    E_PADDED: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Put the pairs from `first_pair` on at their places. base: [E_PADDED], the next place of each expert."""
    columns = tl.arange(0, E_PADDED)
    for start in range(0, NUM_PAIRS, PAIRS):
        pairs = first_pair + start + tl.arange(0, PAIRS)
        live = (start + tl.arange(0, PAIRS) < NUM_PAIRS) & (pairs < last_pair)
        expert = tl.load(ids_ptr + pairs, mask=live, other=-1)
        here = (expert[:, None] == columns[None, :]).to(tl.int32)
        rank = tl.cumsum(here, axis=0) - 1
        place = tl.sum(here * (rank + base[None, :]), axis=1)
        tl.store(order_ptr + place, pairs, mask=expert >= 0)
        base += tl.sum(here, axis=0)


@jit()
def describe_tiles(
    counts: tl.tensor,
    starts: tl.tensor,
    experts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    count_ptr: tl.tensor,
    most_tiles: int,
    E_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Write the table of tiles; programs share it. counts, starts: [E_PADDED], the number of pairs of each
    expert, and the place of its first one."""
    number = (counts + TILE_ROWS - 1) // TILE_ROWS
    ends = tl.cumsum(number, axis=0)
    columns = tl.arange(0, E_PADDED)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.sum(number, axis=0))
    for first in range(tl.program_id(0) * TILES, most_tiles, tl.num_programs(0) * TILES):
        tiles = first + tl.arange(0, TILES)
        expert = tl.sum((ends[None, :] <= tiles[:, None]).to(tl.int32), axis=1)
        here = (expert[:, None] == columns[None, :]).to(tl.int32)
        within = tiles - tl.sum(here * (ends - number)[None, :], axis=1)
        live = expert < E_PADDED
        mask = tiles < most_tiles
        start = tl.sum(here * starts[None, :], axis=1)
        end = start + tl.sum(here * counts[None, :], axis=1)
        tl.store(experts_ptr + tiles, tl.where(live, expert, 0), mask=mask)
        tl.store(starts_ptr + tiles, tl.where(live, start + within * TILE_ROWS, 0), mask=mask)
        tl.store(ends_ptr + tiles, end, mask=mask)


@jit("num_rows", "most_tiles", "num_counts")
def grouping_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    count_ptr: tl.tensor,
    num_rows: int,
    most_tiles: int,
    num_counts: int,
    TOP_K: tl.constexpr,
    E_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    COUNTS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Places the pairs of ROWS rows. num_counts: the programs of `_routing_kernel`, and of this one."""
    own = tl.program_id(0)
    columns = tl.arange(0, E_PADDED)
    await_inputs(USE_PDL)
    totals = tl.zeros((E_PADDED,), dtype=tl.int32)
    before = tl.zeros((E_PADDED,), dtype=tl.int32)
    for first in range(0, num_counts, COUNTS):
        programs = first + tl.arange(0, COUNTS)
        cells = programs[:, None] * E_PADDED + columns[None, :]
        counts = tl.load(counts_ptr + cells, mask=(programs < num_counts)[:, None], other=0)
        totals += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((programs < own)[:, None], counts, 0), axis=0)
    starts = tl.cumsum(totals, axis=0) - totals
    describe_tiles(
        totals,
        starts,
        experts_ptr,
        starts_ptr,
        ends_ptr,
        count_ptr,
        most_tiles,
        E_PADDED,
        TILE_ROWS,
        TILES,
    )
    first_pair = own * ROWS * TOP_K
    place(ids_ptr, order_ptr, first_pair, num_rows * TOP_K, starts + before, E_PADDED, ROWS * TOP_K, PAIRS)


def empty_tiles(chosen: Chosen, num_experts: int, rows: int) -> ExpertTiles:
    pairs = chosen.ids.numel()
    most = max_tiles(pairs, num_experts, rows)
    parts = chosen.ids.new_empty(pairs + 3 * most + 1).split([pairs, most, most, most, 1])
    order, experts, starts, ends, count = parts
    return ExpertTiles(chosen, order, experts, starts, ends, count, rows)


def tiles_reference(chosen: Chosen, num_experts: int, rows: int) -> ExpertTiles:
    flat = chosen.ids.flatten()
    tiles = empty_tiles(chosen, num_experts, rows)
    live = int((flat >= 0).sum())
    tiles.order[:live] = flat.argsort(stable=True)[len(flat) - live :]
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts)
    number = (counts + rows - 1) // rows
    last = int(number.sum())
    ids = torch.arange(num_experts, device=flat.device).repeat_interleave(number)
    within = torch.arange(last, device=flat.device) - (number.cumsum(0) - number)[ids]
    ends = counts.cumsum(0)
    for column in (tiles.experts, tiles.starts, tiles.ends):
        column.zero_()
    tiles.experts[:last] = ids
    tiles.starts[:last] = (ends - counts)[ids] + within * rows
    tiles.ends[:last] = ends[ids]
    tiles.count.fill_(last)
    return tiles
