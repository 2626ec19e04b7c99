"""Checks and times the kernels of a mixture of experts, with a sweep of their tiles, on one GPU.

    python -m tools.bench experts                  # about 80 seconds on an H100
    python -m tools.bench experts --decode --shapes 30B-A3B Gemma-4 35B-A3B       # decode steps alone

Each kernel is compared with its twin first. Then one line for each product, shape and number of tokens: the
best tile, its time, TB/s of the experts that are read and TFLOP/s, and what cuBLAS takes for as many rows of
one weight. With --output FILE the whole sweep goes to a file. Weights take turns, so that none is in the L2
cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple, TextIO

import torch

from nanovllm.moe.kernels.gemv import GemvChoice, expert_gemv_triton
from nanovllm.moe.kernels.grouped_matmul import (
    ExpertChoice,
    ExpertTile,
    choose_experts,
    experts_triton,
    fitted,
    grouped_triton,
    sum_experts_triton,
)
from nanovllm.moe.kernels.reference import experts_reference
from nanovllm.moe.kernels.routing import route_reference, route_triton
from nanovllm.moe.kernels.tiles import ExpertTiles

BYTES_PER_S = {"NVIDIA H200": 4.58e12}  # that a GPU reads; others: as an H100
H100_BYTES_PER_S = 3.13e12
WORKERS = 12  # processes that compile


class Shape(NamedTuple):
    name: str
    hidden: int
    width: int
    experts: int
    top_k: int


A3B = Shape("30B-A3B", 2048, 768, 128, 8)
MIXTRAL = Shape("8x7B", 4096, 14336, 8, 2)
GEMMA4 = Shape("Gemma-4", 2816, 704, 128, 8)  # 26B-A4B
QWEN35 = Shape("35B-A3B", 2048, 512, 256, 8)
SHAPES = {shape.name: shape for shape in (A3B, GEMMA4, QWEN35)}
FEW = (1, 2)
DECODE = (16, 64, 131, 256)
PREFILL = (4096, 8192, 16384)

DECODE_TILES = [
    (rows, ExpertTile(64, k, stages, swap=True))
    for rows in (16, 32)
    for k, stages in ((64, 4), (64, 6), (64, 8), (128, 2), (128, 3), (128, 4), (128, 5), (256, 2), (256, 3))
]
DECODE_TILES += [
    (rows, ExpertTile(*tile))
    for rows, *tile in (
        (16, 128, 64, 4, 4, True),
        (16, 128, 128, 3, 4, True),
        (32, 128, 64, 4, 4, True),
        (32, 128, 64, 4, 8, True),
        (32, 128, 128, 3, 8, True),
        (64, 64, 64, 5, 4, False),
        (64, 128, 64, 4, 4, False),
    )
]
PREFILL_TILES = [
    (rows, ExpertTile(*tile))
    for rows, *tile in (
        (64, 128, 64, 4, 4),
        (128, 64, 64, 5, 4),
        (128, 64, 64, 4, 8),
        (128, 128, 64, 4, 8),
        (128, 256, 64, 4, 8),
    )
]
CHECKED = [DECODE_TILES[8], DECODE_TILES[14], DECODE_TILES[-2], PREFILL_TILES[1], PREFILL_TILES[3]]
ODD = [Shape("odd", 64, 40, 10, 3), Shape("small", 256, 96, 128, 8), Shape("two", 128, 72, 8, 2)]
GEMV = [GemvChoice(*each) for each in product((4096, 8192), (2048, 4096), (4,), (4, 8))]


class Case:
    """Random weights in several sets, and the rows of a step."""

    def __init__(self, shape: Shape, tokens: int, sets: int = 2) -> None:
        torch.manual_seed(tokens)
        h, w, e = shape.hidden, shape.width, shape.experts
        self.shape, self.tokens = shape, tokens
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.x = torch.randn(tokens, h, **options)
        self.logits = torch.randn(tokens, e, **options)
        self.weights = _weights(h, w, e, sets)

    def tiles(self, rows: int) -> ExpertTiles:
        tiles = route_triton(self.logits, self.shape.top_k, True, None, rows)[1]
        assert tiles is not None
        return tiles

    @property
    def touched(self) -> int:
        return len(self.tiles(16).chosen.ids.unique())


_MADE: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}


def _weights(h: int, w: int, e: int, sets: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if (h, w, e, sets) not in _MADE:
        _MADE.clear()
        _MADE[h, w, e, sets] = [
            (
                torch.empty(e, 2 * w, h, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02),
                torch.empty(e, h, w, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02),
            )
            for _ in range(sets)
        ]
    return _MADE[h, w, e, sets]


def seconds(calls: list[Callable[[], Any]], replays: int = 3) -> float:
    """The median time of one of `calls`, in a CUDA graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(replays):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]) / 1e3 / len(calls))
    del kept
    return statistics.median(times)


def check(log: TextIO) -> None:
    """Compare every kernel with its twin, and the bits of all tiles. RuntimeError if any failed."""
    failed: list[str] = []
    for shape, tokens in product(ODD, (1, 3, 97, 256)):
        case = Case(shape, tokens)
        slots = torch.arange(tokens, dtype=torch.int32, device="cuda")
        if tokens > 2:
            slots[tokens // 2 : tokens // 2 + 2] = -1
            case.x[slots < 0] = torch.nan
            case.logits[slots < 0] = torch.nan
        (gate_up, down), rows_ids = case.weights[0], {}
        for rows in (16, 32, 64, 128):
            found, tiles = route_triton(case.logits, shape.top_k, True, slots, rows)
            twin, twin_tiles = route_reference(case.logits, shape.top_k, True, slots, rows)
            assert tiles is not None
            assert twin_tiles is not None
            assert torch.equal(found.ids, twin.ids), "ids"
            torch.testing.assert_close(found.weights, twin.weights)
            live = int((found.ids >= 0).sum())
            assert torch.equal(tiles.order[:live], twin_tiles.order[:live]), "order"
            for name in ("experts", "starts", "ends", "number"):
                assert torch.equal(getattr(tiles, name), getattr(twin_tiles, name)), name
            rows_ids[rows] = tiles
        expected = experts_reference(case.x.float(), gate_up.float(), down.float(), twin)
        first = None
        for rows, tile in CHECKED:
            choice = checked(rows, tile, case)
            try:
                out = experts_triton(case.x, gate_up, down, rows_ids[rows], choice)
            except Exception as error:
                failed.append(f"{shape.name} {tokens} {rows} {tile}: {str(error)[-300:]}")
                continue
            scale = expected.abs().max()
            if not ((out.float() - expected).abs().max() < 0.02 * scale + 1e-5).item():
                failed.append(f"{shape.name} {tokens} rows, {rows} {tile}: wrong values")
            first = out if first is None else first
            if not torch.equal(first, out):
                failed.append(f"{shape.name} {tokens} rows, {rows} {tile}: other bits")
        if tokens <= 3:
            out = expert_gemv_triton(case.x, gate_up, down, found)
            if not ((out.float() - expected).abs().max() < 0.02 * expected.abs().max() + 1e-5).item():
                failed.append(f"{shape.name} {tokens} few rows: wrong values")
    print(*failed, sep="\n", file=log)
    if failed:
        raise RuntimeError(f"{len(failed)} checks: {failed[0]}; {failed[-1]}")


def checked(rows: int, tile: ExpertTile, case: Case) -> ExpertChoice:
    return ExpertChoice(rows, *(fitted(tile, rows, gated, case.x.device) for gated in (True, False)))


def attempt(call: Callable[[], float], what: str, log: TextIO) -> float:
    """The time of a configuration; infinite if it fails."""
    try:
        return call()
    except Exception as error:
        print(f"FAILED {what}: {type(error).__name__} {str(error)[-300:]}", file=log)
        return float("inf")


def first_product(case: Case, rows: int, tile: ExpertTile, gather: bool = True) -> list[Callable[[], Any]]:
    tiles = case.tiles(rows)
    x = case.x if gather else case.x[(tiles.order.clamp(0) // case.shape.top_k).long()]
    options = {"is_gated": True, "gather": gather, "scatter": False}
    return [partial(grouped_triton, x, gate_up, tiles, tile, **options) for gate_up, _ in case.weights]


def second_product(case: Case, rows: int, tile: ExpertTile) -> list[Callable[[], Any]]:
    tiles = case.tiles(rows)
    inner = case.x.new_empty(len(tiles.order), case.shape.width).normal_()
    options = {"is_gated": False, "gather": False, "scatter": True}
    return [partial(grouped_triton, inner, down, tiles, tile, **options) for _, down in case.weights]


def candidates(case: Case) -> Iterator[tuple[str, str, int, ExpertTile, list[Callable[[], Any]]]]:
    """Each product with each tile: its name, the tile's text, and its calls."""
    large = case.tokens > DECODE[-1]
    for rows, each in PREFILL_TILES if large else DECODE_TILES:
        for name, make, gated in (
            ("gate_up", first_product, True),
            ("down", second_product, False),
            *((("gate_up of copied rows", partial(first_product, gather=False), True),) if large else ()),
        ):
            if gated and each.columns == 256:
                continue
            tile = fitted(each, rows, gated, case.x.device)
            yield name, f"{rows} rows, {tuple(tile)}", rows, tile, make(case, rows, tile)


def compile_part(shapes: list[tuple[Shape, bool]], index: int) -> None:
    """Compile a part of all configurations, in a process of its own; the results are in Triton's cache."""
    for shape, large in shapes:
        case = Case(shape, 512 if large else 4, sets=1)
        every = [calls[0] for *_, calls in candidates(case)]
        if shape in ODD:
            every = [
                partial(experts_triton, case.x, *case.weights[0], case.tiles(choice.rows), choice)
                for choice in (checked(*each, case) for each in CHECKED)
            ]
        for call in every[index::WORKERS]:
            with suppress(Exception):
                call()


def compile_all(shapes: list[tuple[Shape, bool]]) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        jobs = [pool.submit(compile_part, shapes, index) for index in range(WORKERS)]
        for job in jobs:
            if (error := job.exception()) is not None:
                print(f"compiling: {error}")


def line(case: Case, what: str, took: float, share: float, more: str, log: TextIO) -> None:
    """share: of the three matrices of an expert that are read."""
    s = case.shape
    size = share * 3 * s.hidden * s.width
    bus = BYTES_PER_S.get(torch.cuda.get_device_name(), H100_BYTES_PER_S)
    num_bytes, flops = 2 * size * case.touched, 2 * size * case.tokens * s.top_k
    text = (
        f"{s.name:8s} T={case.tokens:<6d}{what:24s}{took * 1e6:9.1f} us  {num_bytes / took / 1e12:5.2f} TB/s "
        f"({num_bytes / bus / took:4.0%} of {bus / 1e12})  {flops / took / 1e12:6.1f} TFLOP/s"
        f"  {more}"
    )
    print(text)
    print(text, file=log, flush=True)


def sweep(case: Case, log: TextIO) -> None:
    """The best tile of each product, and the best pair of them with the same rows."""
    best: dict[tuple[str, int], tuple[float, str, ExpertTile]] = {}
    for name, text, rows, tile, calls in candidates(case):
        took = attempt(partial(seconds, calls), f"{name} {text}", log)
        print(f"  {case.shape.name} T={case.tokens} {name} {text}: {took * 1e6:.1f} us", file=log)
        best[name, rows] = min(best.get((name, rows), (float("inf"), "", tile)), (took, text, tile))
    names = dict.fromkeys(name for name, _ in best)
    for name in names:
        took, text, _ = min(value for (each, _), value in best.items() if each == name)
        line(case, name, took, 1 / 3 if name == "down" else 2 / 3, text, log)
    both = {rows: best["gate_up", rows][0] + best["down", rows][0] for _, rows in best}
    rows = min(both, key=both.__getitem__)
    choice = ExpertChoice(rows, best["gate_up", rows][2], best["down", rows][2])
    layer(case, choice, f"best: {rows} rows, {tuple(choice.gate_up)}, {tuple(choice.down)}", log)


def layer(case: Case, choice: ExpertChoice, text: str, log: TextIO) -> None:
    """Routing, both products and the sum."""

    def run(gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return experts_triton(case.x, gate_up, down, case.tiles(choice.rows), choice)

    took = attempt(lambda: seconds([partial(run, *each) for each in case.weights]), text, log)
    line(case, "all", took, 1.0, text, log)


def others(case: Case, log: TextIO) -> None:
    """What routing, the sum, cuBLAS and torch's grouped product take."""
    s, tiles = case.shape, case.tiles(64)
    pairs = len(tiles.order)
    products = case.x.new_empty(pairs, s.hidden).normal_()
    gate_up = case.weights[0][0]
    rows = case.x.new_empty(pairs, s.hidden).normal_()
    dense = [partial(torch.mm, rows, each[0].T) for each, _ in case.weights]
    times = {
        "routing": seconds([partial(case.tiles, 64)] * 4),
        "sum": seconds([partial(sum_experts_triton, products, tiles.chosen)] * 4),
        "cuBLAS, one expert": attempt(lambda: seconds(dense), "cuBLAS", log),
    }
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is not None:
        ends = torch.bincount(tiles.chosen.ids.flatten(), minlength=s.experts).cumsum(0).int()
        calls = [partial(grouped, rows, each.transpose(1, 2), offs=ends) for each, _ in case.weights]
        times["torch._grouped_mm"] = attempt(lambda: seconds(calls), "torch._grouped_mm", log)
    flops = 2 * pairs * gate_up[0].numel()
    text = ", ".join(
        f"{name} {took * 1e6:.1f} us"
        + (f" ({flops / took / 1e12:.0f} TFLOP/s)" if name not in ("routing", "sum") else "")
        for name, took in times.items()
    )
    print(f"{s.name:8s} T={case.tokens:<6d}{text}")
    print(text, file=log, flush=True)


def few(case: Case, log: TextIO) -> None:
    """The path of one and two rows."""
    chosen, _ = route_triton(case.logits, case.shape.top_k, True)
    found = {}
    for choice in GEMV:
        calls = [partial(expert_gemv_triton, case.x, *each, chosen, choice=choice) for each in case.weights]
        found[choice] = attempt(partial(seconds, calls), str(choice), log)
        print(f"  T={case.tokens} {choice}: {found[choice] * 1e6:.1f} us", file=log)
    choice = min(found, key=found.__getitem__)
    line(case, "few rows", found[choice], 1.0, str(tuple(choice)), log)
    as_chosen(case, log, "in tiles")


def as_chosen(case: Case, log: TextIO, what: str = "as chosen") -> None:
    pairs = case.tokens * case.shape.top_k
    choice = choose_experts(pairs, case.shape.experts, case.x.dtype, case.x.device)
    layer(case, choice, f"{what}: {choice.rows} rows", log)


def guarded(measure: Callable[[Case, TextIO], None], shape: Shape, tokens: int, log: TextIO) -> None:
    """Measure; go on after an error."""
    try:
        measure(Case(shape, tokens), log)
    except Exception as error:
        print(f"FAILED {measure.__name__} T={tokens}: {type(error).__name__} {str(error)[-300:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the kernels of experts, on a GPU.")
    parser.add_argument("--output", default=os.devnull, help="a file for the whole sweep")
    parser.add_argument("--decode", action="store_true", help="the steps of 16 to 256 rows alone, unchecked")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[A3B.name], help="with --decode")
    args, began = parser.parse_args(), perf_counter()
    with open(args.output, "w") as log:
        print(torch.cuda.get_device_name(), torch.__version__)
        if args.decode:
            shapes = [SHAPES[name] for name in args.shapes]
            compile_all([(shape, False) for shape in shapes])
            print(f"compiled in {perf_counter() - began:.0f} s")
            for shape, tokens in product(shapes, DECODE):
                guarded(sweep, shape, tokens, log)
                guarded(as_chosen, shape, tokens, log)
            return
        compile_all([(A3B, False), (A3B, True), *((shape, False) for shape in ODD)])
        print(f"compiled in {perf_counter() - began:.0f} s")
        try:
            check(log)
            print(f"every kernel equals its twin, {perf_counter() - began:.0f} s")
        except Exception as error:
            print(f"CHECK FAILED: {type(error).__name__} {str(error)[-1000:]}")
        for tokens in FEW:
            guarded(few, A3B, tokens, log)
        for tokens in (*DECODE, *PREFILL):
            guarded(sweep, A3B, tokens, log)
            guarded(as_chosen, A3B, tokens, log)
            if tokens in (64, 256, 4096, 16384):
                guarded(others, A3B, tokens, log)
        for tokens in (256, 4096):
            guarded(as_chosen, MIXTRAL, tokens, log)
        print(f"{perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
