"""The rows of each expert in tiles. Owns no weight.

A pair is a row and one of its experts; its number is row * top_k + j. Pairs are sorted by expert, in a fixed
order, on the device. The host knows only upper bounds, so a CUDA graph can hold all of this.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.compat import await_inputs, jit, next_power_of_2, pdl_options, tl

_PAIRS = 4096  # that a program reads at once
_TILES = 32  # that a program describes at once
_COUNTS = 32  # parts of the counts that are read at once


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
    number: torch.Tensor  # [1] int32, the number of tiles
    rows: int


def max_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """The maximum number of tiles, whatever the routing."""
    return min(num_pairs, (num_pairs + min(num_pairs, num_experts) * (rows - 1)) // rows)


@jit("num_rows", "most_tiles", "num_counts")
def _grouping_kernel(
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
    TILE_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    COUNTS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per expert: finds its pairs, and describes its tiles. counts: [num_counts, E_PADDED], parts
    of the number of pairs of each expert."""
    own = tl.program_id(0)
    columns = tl.arange(0, E_PADDED)
    await_inputs(USE_PDL)
    totals = tl.zeros((E_PADDED,), dtype=tl.int32)
    for first in range(0, num_counts, COUNTS):
        parts = first + tl.arange(0, COUNTS)
        cells = parts[:, None] * E_PADDED + columns[None, :]
        totals += tl.sum(tl.load(counts_ptr + cells, mask=(parts < num_counts)[:, None], other=0), axis=0)
    tiles = (totals + TILE_ROWS - 1) // TILE_ROWS
    start = tl.sum(tl.where(columns < own, totals, 0), axis=0)
    end = start + tl.sum(tl.where(columns == own, totals, 0), axis=0)
    first_tile = tl.sum(tl.where(columns < own, tiles, 0), axis=0)
    count = tl.sum(tiles, axis=0)
    if own == 0:
        tl.store(count_ptr, count)
    for first in range(0, tl.cdiv(num_rows, TILE_ROWS), TILES):  # an expert has a row at most once
        within = first + tl.arange(0, TILES)
        mask = start + within * TILE_ROWS < end
        tl.store(experts_ptr + first_tile + within, own + within * 0, mask=mask)
        tl.store(starts_ptr + first_tile + within, start + within * TILE_ROWS, mask=mask)
        tl.store(ends_ptr + first_tile + within, end + within * 0, mask=mask)
    for first in range(own * TILES, most_tiles, tl.num_programs(0) * TILES):  # after the last tile
        unused = first + tl.arange(0, TILES)
        mask = (unused >= count) & (unused < most_tiles)
        tl.store(experts_ptr + unused, unused * 0, mask=mask)
        tl.store(starts_ptr + unused, unused * 0, mask=mask)
        tl.store(ends_ptr + unused, unused * 0, mask=mask)
    place = start
    num_pairs = num_rows * TOP_K
    for first in range(0, num_pairs, PAIRS):
        pairs = first + tl.arange(0, PAIRS)
        here = (tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) == own).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(here, axis=0) - 1, pairs, mask=here > 0)
        place += tl.sum(here, axis=0)


def group_triton(chosen: Chosen, counts: torch.Tensor, tiles: ExpertTiles, num_experts: int) -> None:
    """Fill `tiles`. counts: [P, E_PADDED] int32, parts of the number of pairs of each expert."""
    num_rows, top_k = chosen.ids.shape
    pairs = min(_PAIRS, max(2, next_power_of_2(num_rows * top_k)))
    _grouping_kernel[(num_experts,)](
        chosen.ids,
        counts,
        *tiles[1:6],
        num_rows,
        len(tiles.experts),
        len(counts),
        TOP_K=top_k,
        E_PADDED=counts.shape[1],
        TILE_ROWS=tiles.rows,
        PAIRS=pairs,
        TILES=_TILES,
        COUNTS=_COUNTS,
        num_warps=8 if pairs > 1024 else 4,
        **pdl_options(counts),
    )


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
    tiles.number.fill_(last)
    return tiles
