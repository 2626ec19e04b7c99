"""Which experts each row goes to: float32 softmax and top-k, together with the tiles of the experts' rows.

Owns no weight.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import await_inputs, by_device, jit, next_power_of_2, pdl_options, tl
from nanovllm.moe.kernels.placement import ExpertPlacement
from nanovllm.moe.kernels.tiles import Chosen, ExpertTiles, empty_tiles, group_triton, tiles_reference

_LOWEST = -3.0e38  # NaN and -inf count as this logit, so that every row gets top_k different experts
_FEW, _MANY = 8, 64  # rows of a program, for up to 1,024 rows and for more


@jit("num_rows")
def _routing_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_rows: int,
    NORMALISED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    FIRST: tl.constexpr,
    OWN: tl.constexpr,
    OWN_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    LOWEST: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per ROWS rows: top_k times the largest logit, the lowest id among equals. counts: for each
    program, the number of its rows that go to each of OWN experts, [OWN_PADDED]. scales: None, or a factor of
    each expert's weight. Pairs with experts outside [FIRST, FIRST + OWN) go nowhere; the others are numbered
    from FIRST on."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, E_PADDED)
    live = rows < num_rows
    mask = live[:, None] & (columns < E)[None, :]
    if slots_ptr is not None:
        live = live & (tl.load(slots_ptr + rows, mask=live, other=-1) >= 0)
    await_inputs(USE_PDL)
    cells = rows.to(tl.int64)[:, None] * E + columns[None, :]
    logits = tl.load(logits_ptr + cells, mask=mask, other=float("-inf")).to(tl.float32)
    scores = tl.where(mask, tl.where(logits > LOWEST, logits, LOWEST), float("-inf"))
    top = tl.max(scores, axis=1)
    places = tl.arange(0, TOP_K_PADDED)
    weights = tl.zeros((ROWS, TOP_K_PADDED), dtype=tl.float32)
    ids = tl.full((ROWS, TOP_K_PADDED), -1, dtype=tl.int32)
    # A row with NaN has weights of NaN, as its softmax has.
    total = tl.sum(tl.where(mask, tl.exp(logits - top[:, None]), 0.0), axis=1)
    for j in tl.static_range(TOP_K):
        best = tl.max(scores, axis=1)
        expert = tl.min(tl.where(scores == best[:, None], columns[None, :], E_PADDED), axis=1)
        scores = tl.where(columns[None, :] == expert[:, None], float("-inf"), scores)
        at = (places == j)[None, :]
        weights = tl.where(at, tl.exp(best - top)[:, None], weights)
        ids = tl.where(at & live[:, None], expert[:, None].to(tl.int32), ids)
    if NORMALISED:
        total = tl.where(total > 0, tl.sum(weights, axis=1), total)
    weights = weights / total[:, None]
    if scales_ptr is not None:
        weights *= tl.load(scales_ptr + ids, mask=ids >= 0, other=0.0)
    weights = tl.where(live[:, None], weights, 0.0)
    if OWN < E:
        here = (ids >= FIRST) & (ids < FIRST + OWN)
        weights = tl.where(here, weights, 0.0)
        ids = tl.where(here, ids - FIRST, -1)
    pairs = rows[:, None] * TOP_K + places[None, :]
    exists = (rows < num_rows)[:, None] & (places < TOP_K)[None, :]
    tl.store(ids_ptr + pairs, ids, mask=exists)
    tl.store(weights_ptr + pairs, weights, mask=exists)
    if counts_ptr is not None:
        taken = (scores == float("-inf")) & live[:, None] & (columns < E)[None, :]
        count = tl.sum(taken.to(tl.int32), axis=0)
        own_counts = counts_ptr + tl.program_id(0) * OWN_PADDED
        if OWN < E:
            tl.store(own_counts + columns - FIRST, count, mask=(columns >= FIRST) & (columns < FIRST + OWN))
            own = tl.arange(0, OWN_PADDED)
            tl.store(own_counts + own, own * 0, mask=own >= OWN)
        else:
            tl.store(own_counts + columns, count)


def _rows_of_program(num_rows: int) -> int:
    return _FEW if num_rows <= 1024 else _MANY


def route_triton(
    logits: torch.Tensor,
    top_k: int,
    normalised: bool,
    slots: torch.Tensor | None = None,
    tile_rows: int | None = None,
    scales: torch.Tensor | None = None,
    placement: ExpertPlacement | None = None,
) -> tuple[Chosen, ExpertTiles | None]:
    """Return the top_k experts of each row of logits [T, E], and with `tile_rows` their pairs in tiles.

    The softmax is in float32. Among equal logits the lowest ids win. normalised: the weights of a row add up
    to 1; else they are its probabilities among all experts. slots: [T]; a row with a negative one is padding
    and is routed nowhere. scales: [E] float32, of the experts, by which their weights are then multiplied.
    placement: the experts of this rank, None for all; pairs with others are then routed nowhere, and the ids
    are the rank's own.
    One launch; with tiles two, for many rows three.
    """
    num_rows, experts = logits.shape
    place = placement or ExpertPlacement.all(experts)
    assert logits.is_contiguous()
    ids = torch.empty((num_rows, top_k), dtype=torch.int32, device=logits.device)
    chosen = Chosen(ids, torch.empty((num_rows, top_k), dtype=torch.float32, device=logits.device))
    tiles = None if tile_rows is None else empty_tiles(chosen, place.count, tile_rows)
    if num_rows == 0:
        if tiles is not None:
            tiles.number.zero_()
        return chosen, tiles
    rows = _rows_of_program(num_rows)
    programs = -(-num_rows // rows)
    padded, own_padded = (max(2, next_power_of_2(count)) for count in (experts, place.count))
    counts = None if tiles is None else ids.new_empty(programs, own_padded)
    _routing_kernel[(programs,)](
        logits,
        slots,
        chosen.ids,
        chosen.weights,
        counts,
        scales,
        num_rows,
        NORMALISED=normalised,
        TOP_K=top_k,
        TOP_K_PADDED=next_power_of_2(top_k),
        E=experts,
        E_PADDED=padded,
        FIRST=place.first,
        OWN=place.count,
        OWN_PADDED=own_padded,
        ROWS=rows,
        LOWEST=_LOWEST,
        num_warps=4 if rows == _FEW else 8,
        **pdl_options(logits),
    )
    if tiles is not None and counts is not None:
        group_triton(chosen, counts, tiles, place.count, rows)
    return chosen, tiles


def route_reference(
    logits: torch.Tensor,
    top_k: int,
    normalised: bool,
    slots: torch.Tensor | None = None,
    tile_rows: int | None = None,
    scales: torch.Tensor | None = None,
    placement: ExpertPlacement | None = None,
) -> tuple[Chosen, ExpertTiles | None]:
    """`route` in plain torch."""
    scores = logits.float()
    order = torch.where(scores > _LOWEST, scores, _LOWEST).sort(dim=-1, descending=True, stable=True)
    ids = order.indices[:, :top_k]
    weights = scores.softmax(-1).gather(1, ids)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if scales is not None:
        weights = weights * scales[ids]
    if slots is not None:
        padding = (slots < 0)[:, None]
        ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    place = placement or ExpertPlacement.all(logits.shape[1])
    if not place.is_all:
        others = (ids < place.first) | (ids >= place.own.stop)
        ids, weights = (ids - place.first).masked_fill(others, -1), weights.masked_fill(others, 0.0)
    chosen = Chosen(ids.int(), weights)
    return chosen, None if tile_rows is None else tiles_reference(chosen, place.count, tile_rows)


route = by_device(route_triton, route_reference)


class Routing:
    """The experts of T rows, chosen late and once: when the method that multiplies them knows its tiles. Only
    those of `placement`, if there is one."""

    __slots__ = ("_chosen", "logits", "normalised", "placement", "scales", "slots", "top_k")

    def __init__(
        self,
        logits: torch.Tensor,
        top_k: int,
        normalised: bool,
        slots: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        placement: ExpertPlacement | None = None,
    ) -> None:
        """As the arguments of `route`."""
        self.logits, self.slots, self.scales = logits, slots, scales
        self.top_k, self.normalised, self.placement = top_k, normalised, placement
        self._chosen: Chosen | None = None

    def held(self, placement: ExpertPlacement) -> Routing:
        """The same rows on a rank that holds some of the experts; itself if it holds all."""
        if placement.is_all:
            return self
        return Routing(self.logits, self.top_k, self.normalised, self.slots, self.scales, placement)

    @property
    def num_pairs(self) -> int:
        """Pairs of rows and this rank's experts, if all experts are equally likely; it chooses tiles."""
        pairs = len(self.logits) * self.top_k
        return pairs if self.placement is None else -(-pairs * self.placement.count // self.placement.total)

    def chosen(self) -> Chosen:
        """This rank's experts of each row."""
        if self._chosen is None:
            self._chosen, _ = self._route(None)
        return self._chosen

    def tiles(self, rows: int) -> ExpertTiles:
        """The pairs in tiles of `rows`."""
        self._chosen, tiles = self._route(rows)
        assert tiles is not None
        return tiles

    def _route(self, tile_rows: int | None) -> tuple[Chosen, ExpertTiles | None]:
        return route(
            self.logits, self.top_k, self.normalised, self.slots, tile_rows, self.scales, self.placement
        )
