"""The rows of each expert in tiles, and what an expert computes besides its products. Owns no weight.

A pair is a row and one of its experts; its number is row * top_k + j. Pairs are sorted by expert, in a fixed
order, on the device. The host knows only upper bounds, so a CUDA graph can hold all of this.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.activation import Activation
from nanovllm.kernels.compat import await_inputs, jit, pdl_options, tl

_PAIRS = 4096  # that a program reads at once
_LENGTHS = (512, 4096, 8192)  # up to so many pairs each program reads all of them
_TILES = 32  # that a program describes at once
_COUNTS = 32  # parts of the counts that are read at once


class ExpertMLP(NamedTuple):
    """What an expert computes besides its products: down(act(gate) * up)."""

    activation: Activation = Activation.SILU
    # Of the dtype of the weights, contiguous; None: there is none. The width I may be less than the
    # weights', whose other rows are padding.
    gate_up_bias: torch.Tensor | None = None  # [E, 2I], of gate, then of up
    down_bias: torch.Tensor | None = None  # [E, H]

    @property
    def width(self) -> int:
        """I; 0 without the bias."""
        return 0 if self.gate_up_bias is None else self.gate_up_bias.shape[1] // 2

    @property
    def is_plain(self) -> bool:
        """Whether it is SiLU without biases."""
        return self.activation is Activation.SILU and self.gate_up_bias is None and self.down_bias is None


PLAIN_MLP = ExpertMLP()


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


@jit()
def _place(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    expert: tl.tensor,
    place: tl.tensor,
    first_pair: tl.tensor,
    last_pair: tl.tensor,
    LENGTH: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Put an expert's pairs of [first_pair, min(first_pair + LENGTH, last_pair)) at `place` and after it."""
    for start in range(0, LENGTH, PAIRS):
        pairs = first_pair + start + tl.arange(0, PAIRS)
        mask = (pairs < last_pair) & (start + tl.arange(0, PAIRS) < LENGTH)
        here = (tl.load(ids_ptr + pairs, mask=mask, other=-1) == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(here, axis=0) - 1, pairs, mask=here > 0)
        place += tl.sum(here, axis=0)


@jit("num_rows")
def _placing_kernel(
    ids_ptr: tl.tensor,
    places_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    num_rows: int,
    TOP_K: tl.constexpr,
    E_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per expert and PARTS parts of ROWS rows each: puts the expert's pairs at their places."""
    own, first_part = tl.program_id(0), tl.program_id(1) * PARTS
    await_inputs(USE_PDL)
    place = tl.load(starts_ptr + own) + tl.load(places_ptr + first_part * E_PADDED + own)
    first, last = first_part * ROWS * TOP_K, num_rows * TOP_K
    _place(ids_ptr, order_ptr, own, place, first, last, PARTS * ROWS * TOP_K, PAIRS)


@jit("num_rows", "most_tiles", "num_counts")
def _grouping_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    places_ptr: tl.tensor,
    first_places_ptr: tl.tensor,
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
    LENGTH: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    COUNTS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per expert: describes its tiles and finds its pairs. counts: [num_counts, E_PADDED], parts
    of the number of pairs of each expert.

    places [num_counts, E_PADDED], first_places [E_PADDED]: if given, they get the place of each part's first
    pair, from the expert's first place on, and this place; `_placing_kernel` then finds the pairs.
    """
    own = tl.program_id(0)
    columns = tl.arange(0, E_PADDED)
    await_inputs(USE_PDL)
    totals = tl.zeros((E_PADDED,), dtype=tl.int32)
    for first in range(0, num_counts, COUNTS):
        parts = first + tl.arange(0, COUNTS)
        cells = parts[:, None] * E_PADDED + columns[None, :]
        counts = tl.load(counts_ptr + cells, mask=(parts < num_counts)[:, None], other=0)
        if places_ptr is not None:
            pairs_of_parts = tl.sum(tl.where((columns == own)[None, :], counts, 0), axis=1)
            before = tl.sum(tl.where(columns == own, totals, 0), axis=0)
            places = before + tl.cumsum(pairs_of_parts, axis=0) - pairs_of_parts
            tl.store(places_ptr + parts * E_PADDED + own, places, mask=parts < num_counts)
        totals += tl.sum(counts, axis=0)
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
    if places_ptr is not None:
        tl.store(first_places_ptr + own, start)
    else:
        _place(ids_ptr, order_ptr, own, start, 0, num_rows * TOP_K, LENGTH, PAIRS)


def group_triton(
    chosen: Chosen, counts: torch.Tensor, tiles: ExpertTiles, num_experts: int, rows: int
) -> None:
    """Fill `tiles`. counts: [P, E_PADDED] int32, the number of pairs of each expert in parts of `rows` rows.
    One launch, for many rows two."""
    num_rows, top_k = chosen.ids.shape
    (parts, padded), num_pairs = counts.shape, num_rows * top_k
    length = next((each for each in _LENGTHS if num_pairs <= each), 0)
    alone = length > 0
    pairs = min(_PAIRS, length) if alone else _PAIRS
    places = None if alone else counts.new_empty(parts + 1, padded)
    warps = 8 if pairs > 1024 else 4
    _grouping_kernel[(num_experts,)](
        chosen.ids,
        counts,
        places,
        None if places is None else places[parts],
        *tiles[1:6],
        num_rows,
        len(tiles.experts),
        parts,
        TOP_K=top_k,
        E_PADDED=padded,
        TILE_ROWS=tiles.rows,
        LENGTH=length,
        PAIRS=pairs,
        TILES=_TILES,
        COUNTS=_COUNTS,
        num_warps=warps,
        **pdl_options(counts),
    )
    if places is not None:
        together = max(1, pairs // (rows * top_k))
        _placing_kernel[(num_experts, -(-parts // together))](
            chosen.ids,
            places,
            places[parts],
            tiles.order,
            num_rows,
            TOP_K=top_k,
            E_PADDED=padded,
            ROWS=rows,
            PARTS=together,
            PAIRS=pairs,
            num_warps=warps,
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
