"""Products with weights of 4 bits on a GPU: checks every kernel, then times all tiles beside bfloat16.

`python -m tools.bench int4` prints a line for each shape of Qwen3-8B and number of rows; the file of
`--output` gets all timings. Weights come from beyond the L2 cache; times are of calls within a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextvars import copy_context
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from nanovllm.formats.int4.kernels.layout import Int4Weight, dequantise_reference, pack_codes, pack_scales
from nanovllm.formats.int4.kernels.matmul import (
    Int4Tile,
    choose_int4_tile,
    int4_linear_reference,
    int4_linear_triton,
)
from nanovllm.formats.int4.kernels.values import dequantise
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.compat import in_graph, multiprocessors
from nanovllm.quantization.unquantized import UnquantizedLinearMethod

SHAPES = {  # name: outputs, inputs, whether SiLU follows
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (24576, 4096, True),
    "down": (4096, 12288, False),
}
ROWS = (1, 16, 64, 256, 32, 131, 96, 192, 2, 4, 8, 512, 4096)  # what matters most comes first
STAGES = {16: (4, 8), 32: (4, 6), 48: (3, 5)}  # of tiles so high; of higher ones:
FEW_STAGES = (2, 3)
HEIGHTS = (
    *((16, 0), (32, 0), (32, 16), (64, 0), (64, 16), (64, 32)),
    *((128, 0), (128, 16), (128, 32), (128, 64), (256, 0)),
)
SPLITS = (1, 2, 3, 4, 6, 8)
COLD = 160 * 2**20  # bytes of weights that a graph reads
GPU = "cuda"


def tiles() -> Iterator[Int4Tile]:
    """All tiles, unsplit."""
    for (rows, more), (columns, warps) in product(HEIGHTS, ((64, 4), (128, 8))):
        if rows == 256 and columns == 64:
            continue  # four warps have too few registers
        for number, stages in enumerate(STAGES.get(rows + more, FEW_STAGES)):
            yield Int4Tile(rows, columns, more, warps, stages)
            if not number:
                yield Int4Tile(rows, columns, more, warps, stages, tma=False)


def tiles_for(rows: int, n: int, k: int, processors: int) -> Iterator[Int4Tile]:
    for tile in tiles():
        if tile.height >= 2 * max(rows, 16) or -(-rows // tile.height) > 4:
            continue
        for split in SPLITS:
            programs = -(-rows // tile.height) * -(-n // tile.columns) * split
            if split == 1 or (
                programs <= 9 * processors and split * rows * n <= 2**22 and k // 128 >= 4 * split
            ):
                yield tile._replace(split=split)


def random_weight(n: int, k: int, group: int, dtype: torch.dtype, device: str = GPU) -> Int4Weight:
    generator = torch.Generator(device).manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
    shape = -(-(-(-k // 128) * 128) // group), n
    scales = torch.rand(shape, device=device, generator=generator) * 0.01 + 0.002
    zeros = torch.randint(0, 16, shape, device=device, generator=generator)
    return Int4Weight(pack_codes(codes), pack_scales(scales.to(dtype), zeros), k, group)


def compile_one(tile: Int4Tile) -> str | None:
    """Compile a kernel in another process, for the cache of this one."""
    dtype = torch.bfloat16
    try:
        with torch.inference_mode():
            small = random_weight(256, 1024, 128, dtype)
            int4_linear_triton(torch.zeros(1, 1024, dtype=dtype, device=GPU), small, tile=tile)
            torch.cuda.synchronize()
    except Exception as error:
        return f"{tile}: {type(error).__name__}: {str(error)[:300]}"
    return None


def compile_all(seconds: float) -> None:
    work = [tile._replace(split=split) for tile in tiles() for split in (1, 2)]
    workers = min(12, (os.cpu_count() or 2) - 1)
    start = time.time()
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        for error in pool.map(compile_one, work, timeout=seconds):
            if error:
                print("not compiled:", error)
    except TimeoutError:
        print("compiling takes too long; the rest is compiled on use")
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"{len(work)} kernels compiled in {time.time() - start:.0f} s by {workers} processes", flush=True)


def check() -> None:
    """Every tile without and some with bias and residual, and the other kernels; prints what differs."""
    wrong = 0
    weight = random_weight(1008, 1152, 128, torch.bfloat16)
    x = torch.randn(97, 1152, device=GPU).bfloat16()
    wanted = int4_linear_reference(x, weight)
    for tile in tiles():
        for rows in (4, 97):
            each = partial(int4_linear_triton, x[:rows], weight, tile=tile._replace(split=1 + rows % 2))
            wrong += report(f"{rows} rows, {tile}", each, wanted[:rows])
    for dtype, (n, k, group) in (
        (torch.bfloat16, (200, 416, 32)),
        (torch.float16, (328, 704, 64)),
        (torch.bfloat16, (136, 640, 640)),
    ):
        weight = random_weight(n, k, group, dtype)
        exact = dequantise_reference(weight.words, weight, dtype)
        what = f"n {n}, k {k}, group {group}, {dtype}"
        wrong += report(f"dequantise, {what}", partial(dequantise, weight.words, weight, dtype), exact)
        bias = torch.randn(n, device=GPU).to(dtype)
        for rows, tile in ((3, None), (97, Int4Tile(64, 64, stages=3)), (256, Int4Tile(128, 128, 0, 8, 3))):
            x = torch.randn(rows, k, device=GPU).to(dtype)
            residual = torch.randn(rows, n, device=GPU).to(dtype)
            each = partial(int4_linear_triton, x, weight, bias, residual.clone(), tile=tile)
            wrong += report(
                f"{rows} rows, {tile}, {what}", each, int4_linear_reference(x, weight, bias, residual)
            )
    print("all kernels agree with their references" if not wrong else f"{wrong} CHECKS FAILED", flush=True)


def near(out: torch.Tensor, wanted: torch.Tensor) -> bool:
    spread = wanted.float().abs().mean()
    return bool(
        (out.float() - wanted.float()).abs().max() <= 0.02 * wanted.float().abs().max() + 0.02 * spread
    )


def report(what: str, kernel: Callable[[], torch.Tensor], wanted: torch.Tensor) -> bool:
    """Whether a kernel fails or differs."""
    try:
        same = near(kernel(), wanted)
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return True
    if not same:
        print(f"WRONG: {what}", flush=True)
    return not same


@cache
def capture_stream() -> torch.cuda.Stream:
    """One for all captures, because cuBLAS has memory for each stream."""
    return torch.cuda.Stream()


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """The time of a call, within a graph of all of them."""

    def run() -> None:
        in_graph.set(True)
        for call in calls:
            call()

    copy_context().run(run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(capture_stream()):  # not torch.cuda.graph, which collects garbage each time
        graph.capture_begin()
        try:
            copy_context().run(run)
        finally:
            graph.capture_end()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(4):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:]) * 1000 / len(calls)


def timed(calls: list[Callable[[], Any]]) -> float:
    try:
        return microseconds(calls)
    except Exception as error:
        print(type(error).__name__, str(error)[:200], flush=True)
        torch.cuda.synchronize()
        return float("inf")


def bf16_calls(weights: list[torch.Tensor], x: torch.Tensor, silu: bool) -> list[Callable[[], Any]]:
    """As today: `UnquantizedLinearMethod`, and SiLU."""

    def call(weight: torch.Tensor) -> Callable[[], Any]:
        method = UnquantizedLinearMethod()
        method.weight, method.deterministic, method.fuse = weight, False, False
        return lambda: silu_and_mul(method.apply(x)) if silu else method.apply(x)

    return [call(weight) for weight in weights]


def dequantised(x: torch.Tensor, weight: Int4Weight, silu: bool) -> torch.Tensor:
    out = torch.nn.functional.linear(x, dequantise(weight.words, weight, x.dtype))
    return silu_and_mul(out) if silu else out


class Bench:
    """The products of one shape."""

    def __init__(self, name: str, out: Any) -> None:
        self.name, self.out = name, out
        n, k, _ = SHAPES[name]
        self.first = random_weight(n, k, 128, torch.bfloat16)
        self.size = self.first.words.nbytes + self.first.scales.nbytes
        self.copies = [
            Int4Weight(self.first.words.clone(), self.first.scales.clone(), k, 128)
            for _ in range(-(-COLD // self.size))
        ]
        self.dense = [torch.randn(n, k, device=GPU).bfloat16() for _ in range(max(2, COLD // (2 * n * k)))]

    def run(self, rows: int) -> None:
        """Time everything for x of so many rows, and print the best."""
        name, copies, size = self.name, self.copies, self.size
        n, k, silu = SHAPES[name]
        processors = multiprocessors(torch.device(GPU))
        x = torch.randn(rows, k, device=GPU).bfloat16()
        found: dict[str, float] = {"bf16": timed(bf16_calls(self.dense, x, silu))}
        found["dequantise"] = timed([partial(dequantised, x, w, silu) for w in copies[:3]])
        sweep: dict[Int4Tile, float] = {}
        chosen = choose_int4_tile(rows, self.first, processors)
        some = {*tiles_for(rows, n, k, processors), *([chosen] if chosen else [])}
        for tile in some if rows <= 512 else ():
            sweep[tile] = timed([partial(int4_linear_triton, x, w, silu=silu, tile=tile) for w in copies])
        found |= {str(tuple(tile)): us for tile, us in sweep.items()}
        line = f"{name:8}{rows:5} rows: bf16 {found['bf16']:7.1f} us, dequantised {found['dequantise']:7.1f}"
        if sweep:
            best_tile = min(sweep, key=lambda tile: sweep[tile])
            us = sweep[best_tile]
            line += f", tiles {us:6.1f} ({size / us / 1e6:.2f} TB/s, {2e-6 * rows * n * k / us:.0f} TFLOP/s) "
            line += f"{tuple(best_tile)}"
            exact = {tile: us for tile, us in sweep.items() if tile.split == 1}
            best_tile = min(exact, key=lambda tile: exact[tile])
            line += f", deterministic {exact[best_tile]:.1f} {tuple(best_tile)}"
            line += f", chosen {sweep.get(chosen, float('nan')) if chosen else found['dequantise']:.1f}"
        print(line, flush=True)
        torch.cuda.empty_cache()  # the memory of the graphs
        self.out.write(json.dumps({"shape": name, "rows": rows, "us": found}) + "\n")
        self.out.flush()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=90, help="time nothing after this")
    parser.add_argument("--output", type=Path, default=Path("int4.jsonl"), help="a file for all timings")
    options = parser.parse_args()
    start = time.time()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    compile_all(options.seconds / 2)
    with options.output.open("w") as out:
        benches = {name: Bench(name, out) for name in options.shapes}
        for number, rows in enumerate(options.rows):
            for bench in benches.values():
                if time.time() - start < options.seconds:
                    bench.run(rows)
            if number == 0:
                check()
                print(f"checked after {time.time() - start:.0f} s", flush=True)
    print(f"{time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
