"""Which experts each row goes to, and the rows of each expert in tiles. Owns no weight.

A pair is a row and one of its experts; its number is row * top_k + j. Pairs are sorted by expert, in a fixed
order, on the device. The host knows only upper bounds, so a CUDA graph can hold all of this.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.compat import await_inputs, by_device, jit, next_power_of_2, pdl_options, tl

_LOWEST = -3.0e38  # NaN and -inf count as this logit, so that every row gets top_k different experts
# Rows of a program. Up to _FEW rows one program does all; more programs share the work, but each reads the
# counts of all, which costs little while there are at most 128.
_FEW, _SOME, _MANY = 64, 16, 128
_PAIRS = 64  # pairs that are placed at once
_TILES = 64  # tiles that are described at once


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
def _choose(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    num_rows: int,
    first_row: tl.tensor,
    NORMALISED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    LOWEST: tl.constexpr,
) -> tl.tensor:
    """Choose the experts of a tile of rows: top_k times the largest logit, the lowest id among equals. Return
    the number of rows of each expert, [E_PADDED]."""
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, E_PADDED)
    live = rows < num_rows
    mask = live[:, None] & (columns < E)[None, :]
    cells = rows.to(tl.int64)[:, None] * E + columns[None, :]
    logits = tl.load(logits_ptr + cells, mask=mask, other=float("-inf")).to(tl.float32)
    if slots_ptr is not None:
        live = live & (tl.load(slots_ptr + rows, mask=live, other=-1) >= 0)
    scores = tl.where(mask, tl.where(logits > LOWEST, logits, LOWEST), float("-inf"))
    top = tl.max(scores, axis=1)
    places = tl.arange(0, TOP_K_PADDED)
    weights = tl.zeros((ROWS, TOP_K_PADDED), dtype=tl.float32)
    ids = tl.full((ROWS, TOP_K_PADDED), -1, dtype=tl.int32)
    counts = tl.zeros((E_PADDED,), dtype=tl.int32)
    # A row with NaN has weights of NaN, as its softmax has.
    total = tl.sum(tl.where(mask, tl.exp(logits - top[:, None]), 0.0), axis=1)
    for j in tl.static_range(TOP_K):
        best = tl.max(scores, axis=1)
        expert = tl.min(tl.where(scores == best[:, None], columns[None, :], E_PADDED), axis=1)
        here = columns[None, :] == expert[:, None]
        scores = tl.where(here, float("-inf"), scores)
        counts += tl.sum((here & live[:, None]).to(tl.int32), axis=0)
        at = (places == j)[None, :]
        weights = tl.where(at, tl.exp(best - top)[:, None], weights)
        ids = tl.where(at & live[:, None], expert[:, None].to(tl.int32), ids)
    if NORMALISED:
        total = tl.where(total > 0, tl.sum(weights, axis=1), total)
    weights = tl.where(live[:, None], weights / total[:, None], 0.0)
    pairs = rows[:, None] * TOP_K + places[None, :]
    exists = (rows < num_rows)[:, None] & (places < TOP_K)[None, :]
    tl.store(ids_ptr + pairs, ids, mask=exists)
    tl.store(weights_ptr + pairs, weights, mask=exists)
    return counts


@jit()
def _place(
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
def _describe_tiles(
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


@jit("num_rows", "most_tiles")
def _routing_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    count_ptr: tl.tensor,
    num_rows: int,
    most_tiles: int,
    NORMALISED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    LOWEST: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Chooses the experts of ROWS rows. With tiles, one program groups all pairs as well, several write their
    counts for `_grouping_kernel`."""
    first_row = tl.program_id(0) * ROWS
    await_inputs(USE_PDL)
    counts = _choose(
        logits_ptr,
        slots_ptr,
        ids_ptr,
        weights_ptr,
        num_rows,
        first_row,
        NORMALISED,
        TOP_K,
        TOP_K_PADDED,
        E,
        E_PADDED,
        ROWS,
        LOWEST,
    )
    if counts_ptr is not None:
        columns = tl.arange(0, E_PADDED)
        tl.store(counts_ptr + tl.program_id(0) * E_PADDED + columns, counts)
    elif order_ptr is not None:
        starts = tl.cumsum(counts, axis=0) - counts
        _describe_tiles(
            counts,
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
        tl.debug_barrier()  # all threads have written their ids
        _place(ids_ptr, order_ptr, 0, num_rows * TOP_K, starts, E_PADDED, ROWS * TOP_K, PAIRS)


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
    _describe_tiles(
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
    _place(ids_ptr, order_ptr, first_pair, num_rows * TOP_K, starts + before, E_PADDED, ROWS * TOP_K, PAIRS)


def _rows_of_program(num_rows: int) -> int:
    if num_rows <= _FEW:
        return next_power_of_2(max(num_rows, 1))
    return _SOME if num_rows <= 128 * _SOME else _MANY


def route_triton(
    logits: torch.Tensor,
    top_k: int,
    normalised: bool,
    slots: torch.Tensor | None = None,
    tile_rows: int | None = None,
) -> tuple[Chosen, ExpertTiles | None]:
    """Return the top_k experts of each row of logits [T, E], and with `tile_rows` their pairs in tiles.

    The softmax is in float32. Among equal logits the lowest ids win. normalised: the weights of a row add up
    to 1; else they are its probabilities among all experts. slots: [T]; a row with a negative one is padding
    and is routed nowhere. One launch; with tiles and more than 64 rows, two.
    """
    num_rows, experts = logits.shape
    assert logits.is_contiguous()
    device, pairs = logits.device, num_rows * top_k
    ids = torch.empty((num_rows, top_k), dtype=torch.int32, device=device)
    chosen = Chosen(ids, torch.empty((num_rows, top_k), dtype=torch.float32, device=device))
    rows, padded = _rows_of_program(num_rows), max(2, next_power_of_2(experts))
    programs = -(-num_rows // rows)
    tiles = None if tile_rows is None else _empty_tiles(chosen, experts, tile_rows)
    table = (None,) * 5 if tiles is None else tiles[1:6]
    counts = None
    if tiles is not None and programs > 1:
        counts = torch.empty((programs, padded), dtype=torch.int32, device=device)
    if num_rows == 0:
        if tiles is not None:
            tiles.count.zero_()
        return chosen, tiles
    most = 0 if tiles is None else len(tiles.experts)
    sizes = {
        "TOP_K": top_k,
        "E_PADDED": padded,
        "ROWS": rows,
        "TILE_ROWS": tile_rows or 1,
        "PAIRS": min(_PAIRS, max(2, next_power_of_2(pairs))),
        "TILES": _TILES,
        "num_warps": 4 if rows <= _SOME else 8,
    }
    _routing_kernel[(programs,)](
        logits,
        slots,
        ids,
        chosen.weights,
        counts,
        *table,
        num_rows,
        most,
        NORMALISED=normalised,
        TOP_K_PADDED=next_power_of_2(top_k),
        E=experts,
        LOWEST=_LOWEST,
        **sizes,
        **pdl_options(logits),
    )
    if counts is not None:
        _grouping_kernel[(programs,)](
            ids, counts, *table, num_rows, most, programs, COUNTS=16, **sizes, **pdl_options(logits)
        )
    return chosen, tiles


def _empty_tiles(chosen: Chosen, num_experts: int, rows: int) -> ExpertTiles:
    pairs = chosen.ids.numel()
    most = max_tiles(pairs, num_experts, rows)
    parts = chosen.ids.new_empty(pairs + 3 * most + 1).split([pairs, most, most, most, 1])
    order, experts, starts, ends, count = parts
    return ExpertTiles(chosen, order, experts, starts, ends, count, rows)


def route_reference(
    logits: torch.Tensor,
    top_k: int,
    normalised: bool,
    slots: torch.Tensor | None = None,
    tile_rows: int | None = None,
) -> tuple[Chosen, ExpertTiles | None]:
    """`route` in plain torch."""
    scores = logits.float()
    order = torch.where(scores > _LOWEST, scores, _LOWEST).sort(dim=-1, descending=True, stable=True)
    ids = order.indices[:, :top_k]
    weights = scores.softmax(-1).gather(1, ids)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if slots is not None:
        padding = (slots < 0)[:, None]
        ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    chosen = Chosen(ids.int(), weights)
    return chosen, None if tile_rows is None else _tiles_reference(chosen, logits.shape[1], tile_rows)


def _tiles_reference(chosen: Chosen, num_experts: int, rows: int) -> ExpertTiles:
    flat = chosen.ids.flatten()
    tiles = _empty_tiles(chosen, num_experts, rows)
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


route = by_device(route_triton, route_reference)


class Routing:
    """The experts of T rows, chosen late and once: when the method that multiplies them knows its tiles."""

    __slots__ = ("_chosen", "logits", "normalised", "slots", "top_k")

    def __init__(
        self, logits: torch.Tensor, top_k: int, normalised: bool, slots: torch.Tensor | None = None
    ) -> None:
        """As the arguments of `route`."""
        self.logits, self.slots = logits, slots
        self.top_k, self.normalised = top_k, normalised
        self._chosen: Chosen | None = None

    @property
    def num_pairs(self) -> int:
        return len(self.logits) * self.top_k

    def chosen(self) -> Chosen:
        """The experts of each row."""
        if self._chosen is None:
            self._chosen, _ = route(self.logits, self.top_k, self.normalised, self.slots)
        return self._chosen

    def tiles(self, rows: int) -> ExpertTiles:
        """The pairs in tiles of `rows`."""
        self._chosen, tiles = route(self.logits, self.top_k, self.normalised, self.slots, rows)
        assert tiles is not None
        return tiles
