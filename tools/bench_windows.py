"""Attention with windows, softcaps and sinks on a GPU: kernels against their twins, launch choices, times.

    python -m tools.bench windows            # everything; --output FILE also writes it to a file
    python -m tools.bench windows --plain    # only full attention, which runs on any commit, to compare two

Decode runs inside a CUDA graph whose calls read different blocks, so that the L2 cache is cold.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from nanovllm.kernels import decode_attention
from nanovllm.kernels.decode_attention import paged_decode_attention_triton
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.prefill_attention import LONG, SHORT, WIDE, Tiles, paged_prefill_attention_triton

PAGE = 256
CACHE_BYTES = 2**32  # of keys, and of values: many times an L2 cache
PROCESSES = 12  # that compile
LINES: list[str] = []


@dataclass(frozen=True)
class Shape:
    """The attention of a layer, in bfloat16."""

    name: str
    q_heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        kind = [f"window {self.window}"] if self.window else ["full"]
        kind += [f"softcap {self.softcap}"] if self.softcap else []
        return f"{self.name} {self.q_heads}/{self.kv_heads}x{self.dim} {', '.join(kind)}"

    def options(self) -> dict[str, Any]:
        """The argument of a kernel that says what is not plain."""
        if self.window is None and self.softcap is None and not self.sinks:
            return {}
        from nanovllm.kernels.paged import Variant

        sinks = torch.randn(self.q_heads, device="cuda", dtype=torch.bfloat16) if self.sinks else None
        return {"variant": Variant(self.window, self.softcap, sinks)}


QWEN3 = Shape("Qwen3", 16, 8, 128)
WIDE_HEADS = Shape("wide heads", 8, 4, 256)
GEMMA3 = Shape("Gemma 3", 8, 4, 256, 1024)
GEMMA2 = Shape("Gemma 2", 8, 4, 256, 4096, 50.0)
GPT_OSS = Shape("gpt-oss", 64, 8, 64, 128, None, True)
GPT_OSS_FULL = replace(GPT_OSS, window=None)
MISTRAL = Shape("Mistral", 32, 8, 128, 4096)
TABLE = [QWEN3, WIDE_HEADS, GEMMA3, GPT_OSS_FULL, GPT_OSS]
# (block_n, warps, stages) of decode
DECODE_TILES = {
    GEMMA3: [(32, 4, 3), (32, 4, 2), (32, 2, 3), (16, 4, 4), (16, 2, 4), (64, 4, 2), (64, 8, 2), (64, 4, 3)],
    WIDE_HEADS: [(32, 4, 3), (32, 4, 2), (32, 2, 3), (16, 2, 4), (64, 4, 2), (64, 8, 2)],
    GPT_OSS: [
        (32, 4, 3),
        (32, 2, 3),
        (32, 1, 3),
        (16, 1, 4),
        (16, 2, 4),
        (64, 4, 3),
        (64, 2, 3),
        (128, 4, 3),
    ],
    GPT_OSS_FULL: [(128, 4, 3), (64, 4, 3), (64, 2, 3)],
}
CHUNKS = {GEMMA3: (256, 512, 1024), WIDE_HEADS: (512, 1024)}
WIDE_PREFILL = [
    *(Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2)),
    *(Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 3), Tiles(128, 64, 8, 1), Tiles(128, 64, 8, 2)),
    *(Tiles(128, 64, 8, 2, True), Tiles(128, 32, 8, 3, True), Tiles(64, 64, 4, 2, True)),
]
PREFILL_TILES = {
    GEMMA3: WIDE_PREFILL,
    WIDE_HEADS: WIDE_PREFILL,
    GPT_OSS: [
        Tiles(64, 64, 4, 3, registers=128),
        *(Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3)),
        *(Tiles(128, 128, 8, 2, True), Tiles(32, 32, 4, 3)),
    ],
    MISTRAL: [SHORT, WIDE, LONG],
}


def say(line: str, file_only: bool = False) -> None:
    LINES.append(line)
    if not file_only:
        print(line, flush=True)


def of_window(window: int, chunk: int, tiles: Any, head_dim: int) -> tuple[int, Any]:
    """As the kernel's own choice, but with these very tiles."""
    chunks = max(1, window // chunk)
    return -(-(window + tiles.block_n - 1) // (chunks * tiles.block_n)) * tiles.block_n, tiles


@contextmanager
def chosen(tiles: tuple[int, int, int] | None, chunk: int | None) -> Iterator[None]:
    """Use these tiles and chunks of decode, whatever the batch."""
    with ExitStack() as stack:

        def fix(name: str, **options: Any) -> None:
            stack.enter_context(mock.patch.object(decode_attention, name, **options))

        if tiles is not None:
            fix("_tiles", return_value=decode_attention._Tiles(*tiles))
            fix("_of_window", new=of_window)
        if chunk is not None:
            fix("_chunk", return_value=chunk)
        yield


class Case:
    """Queries of `new` tokens each, and block tables over one random cache. rotate: tables that differ."""

    def __init__(
        self, shape: Shape, batch: int, context: int, new: int | None = None, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.shape, self.batch, self.context, self.new = shape, batch, context, new
        token = shape.kv_heads * shape.dim * 2
        width = -(-context // PAGE)
        blocks = max(width, cache_bytes // (token * PAGE))
        size = blocks, PAGE, shape.kv_heads, shape.dim
        k, v = (torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2))
        self.cache = KVCache(k, v)
        read = batch * min(context, shape.window or context) * token * 2
        self.bytes = read
        self.calls = max(4, min(64, 2**29 // read)) if new is None else 1
        order = torch.randperm(blocks, device="cuda").to(torch.int32)
        cells = torch.arange(self.calls * batch * width, device="cuda") % blocks
        self.tables = order[cells].view(self.calls, batch, width)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        heads = shape.q_heads + 2 * shape.kv_heads
        tokens = batch * (new or 1)
        self.q = torch.randn(tokens, heads, shape.dim, device="cuda", dtype=torch.bfloat16)[
            :, : shape.q_heads
        ]
        self.options, self.scale = shape.options(), shape.dim**-0.5

    def decode(self, invariant: bool = False) -> None:
        for table in self.tables:
            args = self.q, self.cache, table, self.lengths, self.context, self.scale
            paged_decode_attention_triton(*args, invariant=invariant, **self.options)

    def prefill(self, tiles: Tiles | None = None) -> None:
        assert self.new is not None
        bounds = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda") * self.new
        args = self.q, self.cache, self.tables[0], bounds, self.lengths, self.new, self.scale
        paged_prefill_attention_triton(*args, tiles=tiles, **self.options)

    def time_decode(self) -> float:
        """Seconds of one call, in a CUDA graph."""
        self.decode()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.decode()
        return timed(graph.replay) / self.calls

    def time_prefill(self, tiles: Tiles | None = None) -> float:
        return timed(lambda: self.prefill(tiles))

    @property
    def flops(self) -> float:
        """Of a prefill, for the pairs that are seen."""
        assert self.new is not None
        window = self.shape.window or self.context
        seen = sum(min(self.context - self.new + 1 + i, window) for i in range(self.new))
        return 4.0 * self.batch * seen * self.shape.q_heads * self.shape.dim


def timed(run: Callable[[], object]) -> float:
    """The median seconds of a warmed-up run."""
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def tried(name: str, run: Callable[[], float]) -> float:
    """The seconds of `run`, or infinity where it fails."""
    try:
        return run()
    except Exception as error:
        torch.cuda.synchronize()
        say(f"    {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", file_only=True)
        return math.inf


Choice = tuple[str, Shape, Any, int | None]  # decode or prefill, tiles, chunk


def choices() -> list[Choice]:
    found: list[Choice] = []
    for shape, tiles in DECODE_TILES.items():
        found += [("decode", shape, each, None) for each in tiles]
        found += [("decode", shape, tiles[0], chunk) for chunk in CHUNKS.get(shape, ())]
    for shape, every in PREFILL_TILES.items():
        found += [("prefill", shape, each, None) for each in every]
    return found


def compile_choice(choice: Choice) -> None:
    """Compile a choice into Triton's cache on disk."""
    kind, shape, tiles, chunk = choice
    try:
        if kind == "decode":
            with chosen(tiles, chunk):
                Case(shape, 48, 2100, cache_bytes=2**25).decode()
        else:
            Case(shape, 1, 300, 300, cache_bytes=2**25).prefill(tiles)
        torch.cuda.synchronize()
    except Exception:
        return  # the sweep says it


def sweep() -> None:
    """The best launch choices of the shapes of the issue, and the present ones."""
    for shape in DECODE_TILES:
        for batch in (16, 48, 256):
            case = Case(shape, batch, 4096)
            found = {"now": tried("now", case.time_decode)}
            for _, _, tiles, chunk in (each for each in choices() if each[:2] == ("decode", shape)):
                with chosen(tiles, chunk):
                    name = f"tiles {tiles} chunk {chunk or 'as now'}"
                    found[name] = tried(name, case.time_decode)
            report(f"decode {shape}, {batch} x 4096", found, case.bytes, "TB/s")
            del case
    for shape in PREFILL_TILES:
        for batch, new, context in ((1, 8192, 8192), (16, 512, 512)):
            case = Case(shape, batch, context, new)
            found = {"now": tried("now", case.time_prefill)}
            for tiles in PREFILL_TILES[shape]:
                found[str(tuple(tiles))] = tried(str(tiles), partial(case.time_prefill, tiles))
            report(f"prefill {shape}, {batch} x {new}", found, case.flops, "TFLOP/s")
            del case


def report(title: str, found: dict[str, float], work: float, unit: str) -> None:
    best = sorted(found, key=found.__getitem__)
    say(
        f"{title}: now {found['now'] * 1e6:.1f} us, {work / found['now'] / 1e12:.2f} {unit}; best {best[0]} "
        f"{found[best[0]] * 1e6:.1f} us, {work / found[best[0]] / 1e12:.2f} {unit}; then {best[1]} "
        f"{found[best[1]] * 1e6:.1f}"
    )
    for name in best:
        say(f"    {found[name] * 1e6:9.1f} us {name}", file_only=True)


def table(shapes: list[Shape]) -> None:
    """Decode of three batches and contexts, and a prefill of 8,192 tokens."""
    for shape in shapes:
        cells = []
        for batch in (16, 48, 256):
            for context in (500, 4096, 16384):
                case = Case(shape, batch, context)
                seconds = tried("decode", case.time_decode)
                cells.append(f"{batch}x{context} {seconds * 1e6:.1f} ({case.bytes / seconds / 1e12:.2f})")
                del case
        say(f"decode {shape}, us (TB/s): {', '.join(cells)}")
    for shape in shapes:
        cells = []
        for batch, new in ((1, 8192), (16, 512)):
            case = Case(shape, batch, new, new)
            seconds = tried("prefill", case.time_prefill)
            cells.append(f"{batch}x{new} {seconds * 1e6:.0f} us ({case.flops / seconds / 1e12:.0f} TFLOP/s)")
            if batch == 1:
                dense = tried("torch", partial(timed, partial(torch_prefill, case)))
                cells.append(f"torch's full attention {dense * 1e6:.0f} us")
        say(f"prefill {shape}: {', '.join(cells)}")


def torch_prefill(case: Case) -> None:
    """Full causal attention of one prompt by torch, from dense keys and values."""
    q = case.q.transpose(0, 1)[None]
    k, v = (x.flatten(0, 1)[: case.context].transpose(0, 1)[None] for x in case.cache[:2])
    attend = torch.nn.functional.scaled_dot_product_attention
    attend(q, k, v, is_causal=True, enable_gqa=True, scale=case.scale)


ODD = [Shape("odd", 6, 3, 72, 77, 20.0, True), Shape("odd", 20, 1, 80, 300, None, True)]
CHECKED = [GEMMA3, GEMMA2, GPT_OSS, GPT_OSS_FULL, WIDE_HEADS, replace(GPT_OSS, softcap=9.0), *ODD]


def differences(shape: Shape) -> dict[str, float]:
    """The largest differences between the kernels and their twins, for batches of 1, 3, 97 and 256."""
    from nanovllm.kernels.attention_reference import (
        paged_decode_attention_reference,
        paged_prefill_attention_reference,
    )

    worst: dict[str, float] = {}

    def compare(name: str, run: Callable[[], torch.Tensor], wanted: torch.Tensor) -> None:
        try:
            out = run()
            off = float((out.float() - wanted.float()).abs().max())
        except Exception as error:
            off, name = math.inf, f"{name}: {type(error).__name__} {str(error)[:200]}"
        worst[name] = max(worst.get(name, 0.0), math.inf if math.isnan(off) else off)

    for batch in (1, 3, 97, 256):
        case = Case(shape, batch, 1500, cache_bytes=2**26)
        case.lengths = (torch.arange(batch, device="cuda") * 397 % 1500 + 1).to(torch.int32)
        args = case.q, case.cache, case.tables[0], case.lengths, case.context, case.scale
        wanted = paged_decode_attention_reference(*args, **case.options)
        for invariant in (True, False):
            run = partial(paged_decode_attention_triton, *args, invariant=invariant, **case.options)
            compare(f"decode {shape}", run, wanted)
    case = Case(shape, 3, 1500, 333, cache_bytes=2**26)
    bounds = torch.arange(4, dtype=torch.int32, device="cuda") * 333
    args = case.q, case.cache, case.tables[0], bounds, case.lengths, 333, case.scale
    wanted = paged_prefill_attention_reference(*args, **case.options)
    for tiles in (None, *PREFILL_TILES.get(shape, ())[-3:]):
        run = partial(paged_prefill_attention_triton, *args, tiles=tiles, **case.options)
        compare(f"prefill {shape} {'' if tiles is None else tuple(tiles)}", run, wanted)
    return worst


def check() -> None:
    """Compile in many processes, which also compare the kernels with their twins."""
    now: list[Choice] = [(kind, shape, None, None) for kind in ("decode", "prefill") for shape in TABLE]
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        checks = [pool.submit(differences, shape) for shape in CHECKED]
        compiled = [pool.submit(compile_choice, each) for each in now + choices()]
        worst = {name: off for each in checks for name, off in each.result().items()}
        for each in compiled:
            each.result()
    wrong = {name: off for name, off in worst.items() if not off < 0.03}
    finite = [off for off in worst.values() if math.isfinite(off)]
    say(f"check: {len(worst)} kinds, worst difference {max(finite):.4f}; wrong: {wrong or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time attention with windows, softcaps and sinks.")
    parser.add_argument("--plain", action="store_true", help="only full attention")
    parser.add_argument("--output", type=Path, help="a file for all lines")
    args = parser.parse_args()
    start = perf_counter()
    steps: list[Callable[[], None]] = [lambda: table([QWEN3, WIDE_HEADS])]
    if not args.plain:
        steps = [check, lambda: table(TABLE), sweep]
    for step in steps:
        try:
            step()
        except Exception as error:  # the next step may still run
            say(f"{type(error).__name__}: {error}")
        say(f"  {perf_counter() - start:.0f} s")
    if args.output is not None:
        args.output.write_text("\n".join([*LINES, ""]))


if __name__ == "__main__":
    main()
