"""Checks of the kernels of experts for any device: each against its twin, and against one row at a time.

Rows that are routed nowhere hold NaN in every check.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tensors import F32, assert_near, randn

from nanovllm.kernels.activation import Activation
from nanovllm.moe.kernels.gemv import GemvChoice, expert_gemv_triton
from nanovllm.moe.kernels.grouped_matmul import (
    PLAIN_MLP,
    ExpertChoice,
    ExpertMLP,
    ExpertTile,
    experts_triton,
    grouped_triton,
)
from nanovllm.moe.kernels.placement import ExpertPlacement
from nanovllm.moe.kernels.reference import experts_reference
from nanovllm.moe.kernels.routing import route_reference, route_triton
from nanovllm.moe.kernels.tiles import Chosen, ExpertTiles, max_tiles

SWAPPED = ExpertChoice(16, ExpertTile(64, 64, 2, swap=True), ExpertTile(64, 32, 3, swap=True))
WIDE = ExpertChoice(64, ExpertTile(32, 32, 2, 8), ExpertTile(64, 64, 2, 8))


class Sizes(NamedTuple):
    experts: int = 10
    top_k: int = 3
    hidden: int = 32
    width: int = 24
    clamped: bool = False  # with biases, and SwiGLU as in gpt-oss


def slots_of(rows: int, device: str, padding: int = 2) -> torch.Tensor:
    """Cache slots of `rows` rows; the last ones are padding, but for the first row."""
    slots = torch.arange(rows, dtype=torch.int32)
    slots[max(1, rows - padding) :] = -1
    return slots.to(device)


def check_routing(
    rows: int,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str,
    tile_rows: int,
    placement: ExpertPlacement | None = None,
) -> None:
    """Experts, weights, places and tiles; some rows have equal logits, one NaN. placement: of one rank."""
    place = placement or ExpertPlacement.all(sizes.experts)
    logits = randn(rows, sizes.experts, dtype=dtype, device=device)
    logits[rows // 2 :] = logits[rows // 2 :].round()
    slots = slots_of(rows, device)
    logits[slots < 0] = torch.nan
    if rows > 8:
        logits[5, 1] = torch.nan
        logits[6, :2] = -torch.inf
    for normalised in (True, False):
        arguments = logits, sizes.top_k, normalised, slots, tile_rows, None, placement
        (chosen, tiles), (twin, twin_tiles) = route_triton(*arguments), route_reference(*arguments)
        assert tiles is not None
        assert twin_tiles is not None
        assert torch.equal(chosen.ids, twin.ids)
        torch.testing.assert_close(chosen.weights, twin.weights, equal_nan=True)
        check_tiles(tiles, place.count)
        live = int((chosen.ids >= 0).sum())
        assert torch.equal(tiles.order[:live], twin_tiles.order[:live])
        for name in ("experts", "starts", "ends", "number"):
            assert torch.equal(getattr(tiles, name), getattr(twin_tiles, name)), name
        again, none = route_triton(logits, sizes.top_k, normalised, slots, placement=placement)
        assert none is None
        assert torch.equal(again.ids, chosen.ids)
    exact = logits.double().softmax(-1)
    for row in range(min(rows, 5)):
        if slots[row] >= 0:
            order = sorted(range(sizes.experts), key=lambda e: (-float(logits[row, e]), e))
            best = [expert if expert in place.own else None for expert in order[: sizes.top_k]]
            numbers = [-1 if expert is None else expert - place.first for expert in best]
            shares = [0.0 if expert is None else float(exact[row, expert]) for expert in best]
            assert chosen.ids[row].tolist() == numbers
            torch.testing.assert_close(chosen.weights[row].cpu(), torch.tensor(shares))


def check_tiles(tiles: ExpertTiles, num_experts: int) -> None:
    """Every pair that goes to an expert is in one tile, of this expert; pairs of an expert ascend."""
    ids = tiles.chosen.ids.flatten().tolist()
    count = int(tiles.number)
    assert count <= len(tiles.experts) == max_tiles(len(ids), num_experts, tiles.rows)
    seen: dict[int, list[int]] = {}
    for expert, start, end in zip(*(part[:count].tolist() for part in tiles[2:5]), strict=True):
        pairs = tiles.order[start : min(end, start + tiles.rows)].tolist()
        assert pairs
        seen.setdefault(expert, []).extend(pairs)
    for expert in range(num_experts):
        assert seen.get(expert, []) == [pair for pair, each in enumerate(ids) if each == expert]


def make_mlp(sizes: Sizes, dtype: torch.dtype, device: str, padding: int = 8) -> ExpertMLP:
    """For weights whose last `padding` rows of gate and of up, and columns of down, have no biases."""
    if not sizes.clamped:
        return PLAIN_MLP
    width = 2 * (sizes.width - padding)
    gate_up = 4 * randn(sizes.experts, width, dtype=dtype, device=device, seed=4)  # some are clamped
    down = randn(sizes.experts, sizes.hidden, dtype=dtype, device=device, seed=5)
    return ExpertMLP(Activation.CLAMPED, gate_up, down)


def exact_inner(inner: torch.Tensor, mlp: ExpertMLP, expert: int) -> torch.Tensor:
    """The activation of an expert's first products [2I] in float64."""
    gate, up = inner.chunk(2)
    if mlp.gate_up_bias is None:
        return gate * torch.sigmoid(gate) * up
    biases = mlp.gate_up_bias[expert].double().chunk(2)
    missing = len(gate) - len(biases[0])
    gate, up = (x + torch.nn.functional.pad(b, (0, missing)) for x, b in zip((gate, up), biases, strict=True))
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


def exact_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: Chosen, mlp: ExpertMLP = PLAIN_MLP
) -> torch.Tensor:
    """One row and one expert at a time, in float64."""
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64, device=x.device)
    for row, ids in enumerate(chosen.ids.tolist()):
        for j, expert in enumerate(ids):
            if expert >= 0:
                inner = exact_inner(gate_up[expert].double() @ x[row].double(), mlp, expert)
                product = down[expert].double() @ inner
                product += 0 if mlp.down_bias is None else mlp.down_bias[expert].double()
                out[row] += chosen.weights[row, j].double() * product
    return out


def make_experts(rows: int, sizes: Sizes, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """x, gate_up, down and logits."""
    x = randn(rows, sizes.hidden, dtype=dtype, device=device)
    gate_up = 0.2 * randn(sizes.experts, 2 * sizes.width, sizes.hidden, dtype=dtype, device=device, seed=1)
    down = 0.2 * randn(sizes.experts, sizes.hidden, sizes.width, dtype=dtype, device=device, seed=2)
    return x, gate_up, down, randn(rows, sizes.experts, dtype=dtype, device=device, seed=3)


def check_experts(
    rows: int,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str,
    choice: ExpertChoice,
    only: tuple[int, ...] | None = None,
) -> None:
    """only: the experts that any row goes to."""
    x, gate_up, down, logits = make_experts(rows, sizes, dtype, device)
    if only is not None:
        away = torch.ones(sizes.experts, dtype=torch.bool, device=device)
        away[list(only)] = False
        logits[:, away] = -1000.0
    slots = slots_of(rows, device)
    x[slots < 0] = torch.nan
    chosen, tiles = route_triton(logits, sizes.top_k, True, slots, choice.rows)
    assert tiles is not None
    mlp = make_mlp(sizes, dtype, device)
    expected = exact_experts(x, gate_up, down, chosen, mlp)
    out = experts_triton(x, gate_up, down, tiles, choice, mlp)
    assert_near(out, expected)
    assert not out[slots < 0].any()
    assert_near(experts_reference(x, gate_up, down, chosen, mlp), expected)
    if rows <= 2:
        few = GemvChoice(256, 256)
        assert_near(expert_gemv_triton(x, gate_up, down, chosen, mlp, few), expected)
    copied = x[(tiles.order.clamp(0, rows * sizes.top_k - 1) // sizes.top_k).long()]
    options: dict[str, Any] = {"is_gated": True, "scatter": False, "mlp": mlp}
    live = int((chosen.ids >= 0).sum())
    both = (
        grouped_triton(each, gate_up, tiles, choice.gate_up, gather=gather, **options)[:live]
        for each, gather in ((x, True), (copied, False))
    )
    assert torch.equal(*both)


def check_parts(
    rows: int, sizes: Sizes, ranks: int, dtype: torch.dtype, device: str, choice: ExpertChoice
) -> None:
    """The parts of ranks with whole experts sum to the result of all experts, and each is that of its own."""
    x, gate_up, down, logits = make_experts(rows, sizes, dtype, device)
    mlp, totals = make_mlp(sizes, dtype, device), []
    whole, _ = route_triton(logits, sizes.top_k, True)
    for rank in range(ranks):
        place = ExpertPlacement.of_rank(sizes.experts, rank, ranks)
        own = slice(place.first, place.own.stop)
        chosen, tiles = route_triton(logits, sizes.top_k, True, None, choice.rows, placement=place)
        assert tiles is not None
        part = (
            mlp
            if mlp.down_bias is None
            else mlp._replace(
                gate_up_bias=mlp.gate_up_bias[own].contiguous(), down_bias=mlp.down_bias[own].contiguous()
            )
        )
        mine = gate_up[own].contiguous(), down[own].contiguous()
        expected = exact_experts(x, *mine, chosen, part)
        totals.append(expected)
        assert_near(experts_triton(x, *mine, tiles, choice, part), expected)
        assert_near(experts_reference(x, *mine, chosen, part), expected)
        if rows <= 2:
            assert_near(expert_gemv_triton(x, *mine, chosen, part, GemvChoice(256, 256)), expected)
    torch.testing.assert_close(sum(totals), exact_experts(x, gate_up, down, whole, mlp))


def check_rows_are_independent(
    counts: list[int], sizes: Sizes, dtype: torch.dtype, device: str, choices: list[ExpertChoice]
) -> None:
    """The bits of a row are the same in every batch and with every tile."""
    most = max(counts)
    x, gate_up, down, logits = make_experts(most, sizes, dtype, device)
    mlp = make_mlp(sizes, dtype, device)
    first = None
    for choice in choices:
        for rows in counts:
            _, tiles = route_triton(logits[:rows].contiguous(), sizes.top_k, True, None, choice.rows)
            assert tiles is not None
            out = experts_triton(x[:rows], gate_up, down, tiles, choice, mlp)
            first = out if first is None else first
            shared = min(len(first), rows)
            assert torch.equal(out[:shared], first[:shared]), (choice, rows)
            first = out if rows > len(first) else first


def check_no_rows(sizes: Sizes, device: str, choice: ExpertChoice) -> None:
    x, gate_up, down, logits = make_experts(0, sizes, F32, device)
    _, tiles = route_triton(logits, sizes.top_k, True, None, choice.rows)
    assert tiles is not None
    assert experts_triton(x, gate_up, down, tiles, choice).shape == (0, sizes.hidden)


def check_chosen(experts: int, top_k: int, device: str) -> None:
    """Of logits that a `SigmoidRouter` gives, softmax routing takes just the chosen, with their shares."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(5, experts, generator=generator).topk(top_k, 1).indices
    scores = F.logsigmoid(30 * torch.randn(5, top_k, generator=generator))
    logits = torch.full((5, experts), -1e30).scatter_(1, ids, scores)
    chosen, _ = route_triton(logits.to(device), top_k, True)
    found = torch.zeros(5, experts).scatter_(1, chosen.ids.long().cpu(), chosen.weights.cpu())
    torch.testing.assert_close(found, logits.softmax(1))
    assert torch.equal(chosen.ids.long().cpu().sort(1).values, ids.sort(1).values)
