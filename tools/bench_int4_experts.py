"""Times the products of experts with weights of 4 bits, with a sweep of their tiles, on one GPU.

    python -m tools.bench int4-experts             # about a minute on an H200

One line for each product, shape and number of tokens: the three best tiles, TB/s of the experts that are
read, and TFLOP/s; then both products with the best tiles of the same rows, with those that are chosen today,
and in bfloat16. Weights take turns, so that none is in the L2 cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from nanovllm.formats.int4.kernels.experts import choose_int4_experts, fitted_int4, int4_expert_gemv_triton
from nanovllm.formats.int4.kernels.layout import BLOCK, MXFP4, Int4Experts
from nanovllm.moe.kernels.grouped_matmul import (
    ExpertChoice,
    ExpertTile,
    choose_experts,
    experts_triton,
    grouped_triton,
)
from nanovllm.moe.kernels.routing import route_triton
from nanovllm.moe.kernels.tiles import ExpertTiles
from tools.bench_experts import A3B, WORKERS, Shape, attempt, seconds

GPT_OSS = Shape("gpt-oss", 2880, 2880, 32, 4)
BYTES = 0.5 + 1 / 32  # of a weight with its share of a scale, in MXFP4 and in groups of 128
SHAPES = ((GPT_OSS, MXFP4), (A3B, 128))
TOKENS = (1, 2, 4, 16, 64, 131, 256, 512, 1024, 4096, 16384)
TILES = [
    (rows, ExpertTile(columns, BLOCK, stages, warps, swap=True))
    for rows in (16, 32, 64, 128)
    for columns in (64, 128)
    for stages in (2, 3, 4, 5)
    for warps in (4, 8)
    if rows * columns < 16384 or warps == 8
]
TILES += [
    (rows, ExpertTile(128, BLOCK, 3, swap=True, registers=registers))
    for rows in (16, 32, 64)
    for registers in (128, 168)
]


class Weights(NamedTuple):
    """Of all experts: gate with up, and down."""

    gate_up: Int4Experts
    down: Int4Experts


def random_weight(experts: int, n: int, k: int, group: int) -> Int4Experts:
    weight = Int4Experts.empty(experts, n, k, group, torch.device("cuda"))
    weight.words.random_(-(2**15), 2**15)
    weight.scales.fill_(-0x0909090A if group == MXFP4 else -0x3CF7C400)  # 2 ** -7; 0.0078 and -(128 + 8)
    return weight


class Case:
    """The rows of a step, and weights in several sets."""

    def __init__(self, shape: Shape, group: int, tokens: int, sets: int = 3) -> None:
        torch.manual_seed(tokens)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.shape, self.group, self.tokens = shape, group, tokens
        self.x = torch.randn(tokens, shape.hidden, **options)
        self.logits = torch.randn(tokens, shape.experts, **options)
        h, w, e = shape.hidden, shape.width, shape.experts
        self.weights = [
            Weights(random_weight(e, 2 * w, h, group), random_weight(e, h, w, group)) for _ in range(sets)
        ]

    def dense(self, tiles: ExpertTiles, choice: ExpertChoice) -> list[Callable[[], Any]]:
        """Both products with weights in bfloat16."""
        e, h, w = self.shape.experts, self.shape.hidden, self.shape.width
        made = [[self.x.new_empty(e, *each).normal_(0, 0.02) for each in ((2 * w, h), (h, w))] for _ in "12"]
        return [partial(experts_triton, self.x, each[0], each[1], tiles, choice) for each in made]

    def tiles(self, rows: int) -> ExpertTiles:
        tiles = route_triton(self.logits, self.shape.top_k, True, None, rows)[1]
        assert tiles is not None
        return tiles

    def first(self, tiles: ExpertTiles, tile: ExpertTile) -> list[Callable[[], Any]]:
        options: dict[str, Any] = {"is_gated": True, "gather": True, "scatter": False}
        return [
            partial(grouped_triton, self.x, each.gate_up, tiles, tile, **options) for each in self.weights
        ]

    def second(self, tiles: ExpertTiles, tile: ExpertTile) -> list[Callable[[], Any]]:
        inner = self.x.new_empty(len(tiles.order), self.shape.width).normal_()
        options: dict[str, Any] = {"is_gated": False, "gather": False, "scatter": True}
        return [partial(grouped_triton, inner, each.down, tiles, tile, **options) for each in self.weights]


def candidates(case: Case) -> Iterator[tuple[str, int, ExpertTile, list[Callable[[], Any]]]]:
    pairs = case.tokens * case.shape.top_k / case.shape.experts  # of an expert
    for rows, tile in TILES:
        if not min(pairs / 4, 128) <= rows <= max(16, 8 * pairs):
            continue
        tiles, seen = case.tiles(rows), set()
        for gated, name, make in ((True, "gate_up", case.first), (False, "down", case.second)):
            fitted = fitted_int4(tile, rows, gated, case.x.device)
            if fitted.stages == tile.stages and (name, fitted) not in seen:
                seen.add((name, fitted))
                yield name, rows, fitted, make(tiles, fitted)


def compile_part(index: int) -> None:
    """Compile a part of all kernels, in a process of its own; they come to be in Triton's cache."""
    for shape, group in SHAPES:
        every = [calls[0] for *_, calls in candidates(Case(shape, group, 512, 1))]
        for call in every[index::WORKERS]:
            try:
                call()
            except Exception as error:
                print(f"compiling: {type(error).__name__} {str(error)[-200:]}")


def line(case: Case, what: str, took: float, share: float, more: str) -> None:
    """share: of the three matrices of an expert that are read."""
    s = case.shape
    size = share * 3 * s.hidden * s.width
    touched = len(case.tiles(16).chosen.ids.unique())
    num_bytes = size * touched * BYTES
    print(
        f"{s.name:8s} T={case.tokens:<6d}{what:18s}{took * 1e6:9.1f} us {num_bytes / took / 1e12:5.2f} TB/s "
        f"{2 * size * case.tokens * s.top_k / took / 1e12:6.1f} TFLOP/s  {more}",
        flush=True,
    )


def both(case: Case, choice: ExpertChoice) -> list[Callable[[], Any]]:
    tiles = case.tiles(choice.rows)
    return [partial(experts_triton, case.x, *each, tiles, choice) for each in case.weights]


def described(tile: ExpertTile) -> str:
    """Columns, K of a step, stages and warps; the most registers, if they are bounded."""
    bound = "" if tile.registers is None else f" of {tile.registers} registers"
    return f"{tuple(tile)[:4]}{bound}"


def sweep(case: Case) -> None:
    """The three best tiles of each product, and the best pair of them with the same rows."""
    found: dict[str, list[tuple[float, int, ExpertTile]]] = {"gate_up": [], "down": []}
    for name, rows, tile, calls in candidates(case):
        took = attempt(partial(seconds, calls), f"{name} {rows} {tile}", sys.stdout)
        found[name].append((took, rows, tile))
    for name, every in found.items():
        every.sort(key=lambda each: each[0])
        best = ", ".join(f"{rows} {described(tile)} {took * 1e6:.1f}" for took, rows, tile in every[:3])
        line(case, name, every[0][0], 1 / 3 if name == "down" else 2 / 3, best)
    pairs = []
    for rows in {rows for _, rows, _ in found["gate_up"]}:
        first, second = (
            next(each for each in every if each[1] == rows) for every in (found["gate_up"], found["down"])
        )
        pairs.append((first[0] + second[0], ExpertChoice(rows, first[2], second[2])))
    best_pairs = sorted(pairs, key=lambda each: each[0])
    for took, choice in best_pairs[:2]:
        print(f"    {took * 1e6:.1f} us: {choice.rows} {described(choice.gate_up)} {described(choice.down)}")
    s, device = case.shape, case.x.device
    chosen = choose_int4_experts(case.tokens * s.top_k, s.experts, device)
    took = attempt(lambda: seconds(both(case, chosen)), "as chosen", sys.stdout)
    line(case, "as chosen", took, 1.0, f"{chosen.rows} {described(chosen.gate_up)} {described(chosen.down)}")
    if chosen.gate_up.swap:
        choice = choose_experts(case.tokens * s.top_k, s.experts, case.x.dtype, device)
        took = attempt(lambda: seconds(both(case, choice)), "dequantised", sys.stdout)
        line(case, "dequantised first", took, 1.0, "")
    dense = choose_experts(case.tokens * s.top_k, s.experts, case.x.dtype, device)
    calls = case.dense(case.tiles(dense.rows), dense)
    line(case, "bfloat16", attempt(lambda: seconds(calls), "bfloat16", sys.stdout), 1.0, "")
    if case.tokens <= 2:
        ids = route_triton(case.logits, s.top_k, True)[0]
        calls = [partial(int4_expert_gemv_triton, case.x, *each, ids) for each in case.weights]
        line(case, "few rows", attempt(lambda: seconds(calls), "few rows", sys.stdout), 1.0, "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the products of experts in 4 bits, on a GPU.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(compile_part, index) for index in range(WORKERS)]:
            if (error := job.exception()) is not None:
                print(f"compiling: {error}")
    for shape, group in SHAPES:
        for tokens in args.tokens:
            sweep(Case(shape, group, tokens))


if __name__ == "__main__":
    main()
