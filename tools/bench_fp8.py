"""FP8 products on a GPU: kernels against their references, the times of tiles, and whole layers beside bf16.

`python -m tools.bench fp8 [check] [table] [tiles] [rows] [experts]`, by default all. Each part ends with its
time limit. A configuration that fails is printed and left out. --output FILE gets all times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm.formats.fp8.kernels import gemv as fp8_gemv
from nanovllm.formats.fp8.kernels.fused import add_rms_norm_fp8_triton, silu_and_mul_fp8_triton
from nanovllm.formats.fp8.kernels.grouped import Fp8Experts, fp8_experts_reference, fp8_experts_triton
from nanovllm.formats.fp8.kernels.matmul import (
    BLOCK_TILES,
    TILES,
    Fp8Weight,
    choose_fp8_tile,
    fitted_fp8,
    fp8_linear_reference,
    fp8_linear_triton,
)
from nanovllm.formats.fp8.kernels.values import (
    FP8,
    GROUP,
    Fp8Rows,
    quantise_rows_reference,
    quantise_rows_triton,
)
from nanovllm.formats.fp8.loading import Stored
from nanovllm.formats.fp8.method import Fp8LinearMethod
from nanovllm.kernels import activation
from nanovllm.kernels.activation import Activation
from nanovllm.kernels.compat import in_graph
from nanovllm.moe.kernels.grouped_matmul import choose_experts, experts_triton
from nanovllm.moe.kernels.routing import route_triton
from nanovllm.quantization.base import Gated, LinearMethod, Normed, Product
from nanovllm.quantization.shards import WeightOptions
from nanovllm.quantization.unquantized import UnquantizedLinearMethod

GPU = torch.device("cuda", 0)
CACHE = 120e6  # bytes; weights in turn exceed the L2 cache
ROWS = (1, 2, 4, 8, 16, 64, 131, 256, 512, 4096, 16384)
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
LIMITS = {"check": 20, "table": 30, "tiles": 25, "rows": 10, "experts": 20}  # seconds
OPTIONS = WeightOptions(torch.bfloat16, GPU, fuse=True)


class Times(NamedTuple):
    """Where all times go, and when the current part ends."""

    lines: list[str]
    end: float

    def late(self) -> bool:
        return time.monotonic() > self.end


def measure(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds of one of the calls, which run in turn in a CUDA graph; quick ones many times, because the
    start of a graph takes some microseconds."""

    def run(times: int = 1) -> None:
        for _ in range(times):
            for call in calls:
                call()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        began = time.monotonic()
        run()
        torch.cuda.synchronize()
    quick = time.monotonic() - began < 3e-4 * len(calls)
    repeats = max(1, 48 // len(calls)) if quick else 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(repeats)
    graph.replay()
    seconds = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000 / len(calls) / repeats)
    return statistics.median(seconds)


def attempt(what: str, calls: Sequence[Callable[[], Any]]) -> float:
    """`measure`, or infinity after printing an error."""
    try:
        return measure(calls)
    except Exception as error:
        print(f"  failed: {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        torch.cuda.synchronize()
        return float("inf")


def copies(num_bytes: float, rows: int) -> int:
    return max(2, min(12, int(CACHE // num_bytes) + 1)) if rows <= 512 else 2


def weight_of(n: int, k: int, group: int | None = None) -> Fp8Weight:
    codes = (torch.randn(n, k, device=GPU) * 100).clamp(-448, 448).to(FP8)
    shape = (n,) if group is None else (-(-n // GROUP), -(-k // GROUP))
    return Fp8Weight(codes, torch.rand(shape, device=GPU) * 1e-3 + 1e-5)


def rows_of(rows: int, k: int) -> torch.Tensor:
    return torch.randn(rows, k, device=GPU, dtype=torch.bfloat16)


# ---- check ----


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9))


def check(times: Times) -> None:
    """Each kernel against its reference, on odd shapes."""
    worst: dict[str, float] = {}
    for group, n, k, rows in product((None, GROUP), (200, 1536), (336, 1024), (1, 3, 97, 256)):
        if times.late():
            break
        for what, make in checks(group, weight_of(n, k, group), rows_of(rows, k)).items():
            try:
                worst[what] = max(worst.get(what, 0.0), error_of(*make()))
            except Exception as error:
                print(f"  failed: {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                worst[what] = float("inf")
    for what, size in worst.items():
        limit = 0.04 if what.startswith(("norm", "silu")) else 0.005
        print(f"  {what}: {size:.2e}{'' if size < limit else '   WRONG'}")


Pair = tuple[torch.Tensor, torch.Tensor]


def checks(group: int | None, weight: Fp8Weight, x: torch.Tensor) -> dict[str, Callable[[], Pair]]:
    """What a kernel computes, and what it should."""
    kind = "rows" if group is None else "blocks"
    codes = quantise_rows_reference(x, group)
    norm = torch.ones_like(x[0])
    pair = torch.cat((x, x.flip(1)), 1)
    expected = fp8_linear_reference(codes, weight)
    found: dict[str, Callable[[], Pair]] = {
        "quantise": lambda: (quantise_rows_triton(x, group).float(), codes.float()),
        "norm": lambda: (add_rms_norm_fp8_triton(x, x, norm, 1e-6, group)[0].float(), _norm(x + x)),
        "silu": lambda: (
            silu_and_mul_fp8_triton(pair, group).float(),
            activation.silu_and_mul_reference(pair),
        ),
        "product": lambda: (fp8_linear_triton(codes, weight), expected),
        "product with a residual": lambda: (
            fp8_linear_triton(codes, weight, None, torch.ones_like(expected)),
            expected + 1,
        ),
    }
    if len(x) <= 3:
        found["gemv"] = lambda: (fp8_gemv.fp8_gemv_triton(x, weight)[0], expected)
    return {f"{what}, {kind}": make for what, make in found.items()}


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=1e-6)


# ---- table ----


def make_method(fp8: Stored | None, n: int, k: int) -> LinearMethod:
    """A method with a random weight."""
    if fp8 is None:
        dense = UnquantizedLinearMethod()
        dense.deterministic, dense.fuse = False, True
        dense.weight = torch.randn(n, k, device=GPU, dtype=torch.bfloat16) * 0.02
        return dense
    method = Fp8LinearMethod(fp8, products=True)
    method.options, method.dense, method.weight = OPTIONS, None, weight_of(n, k, fp8.group)
    return method


def layer_call(name: str, method: LinearMethod, rows: int, k: int) -> Callable[[], Any]:
    """The product as a layer makes it, with its norm, activation or residual."""
    x, residual = rows_of(rows, k), rows_of(rows, SHAPES[name][0])
    norm = torch.ones(k, device=GPU, dtype=torch.bfloat16)
    if name in ("qkv", "gate_up"):
        silu = Activation.SILU if name == "gate_up" else None
        other = rows_of(rows, k)

        return lambda: method.apply_to_normed(Normed(x, other, norm, 1e-6), None, silu)
    if name == "down" and isinstance(method, Fp8LinearMethod) and rows > 2:
        gated = Gated(rows_of(rows, 2 * k), Activation.SILU)
        return lambda: Product(method, gated, None).added_to(residual)
    if name == "down" and rows > 2:
        pair = rows_of(rows, 2 * k)
        return lambda: Product(method, Activation.SILU.and_mul(pair), None).added_to(residual)
    return lambda: Product(method, x, None).added_to(residual)


def scaled_mm(x: Fp8Rows, weight: Fp8Weight) -> torch.Tensor:
    scales = x.scales[:, None], weight.scales[None, :]
    out: torch.Tensor = torch._scaled_mm(
        x.codes, weight.codes.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out


def table(times: Times) -> None:
    """Whole layers with norm, SiLU, residual and quantisation: bf16 today, FP8 of rows and of blocks; and the
    product alone by torch._scaled_mm and by ours."""
    print("  us: bf16 layer | fp8 layer | fp8 blocks layer || product: ours, torch._scaled_mm")
    for rows in ROWS:
        for name, (n, k) in SHAPES.items():
            if times.late():
                print("  time is up")
                return
            many, found = copies(n * k, rows), []
            for kind in (None, Stored.ROWS, Stored.BLOCKS):
                calls = [layer_call(name, make_method(kind, n, k), rows, k) for _ in range(many)]
                found.append(attempt(f"{name} {rows} {kind}", calls))
            x, weights = quantise_rows_triton(rows_of(rows, k)), [weight_of(n, k) for _ in range(many)]
            ours = attempt("ours", [partial(fp8_linear_triton, x, w) for w in weights])
            other = attempt("scaled_mm", [partial(scaled_mm, x, w) for w in weights])
            speed = f"{n * k / found[1] / 1e12:.2f} TB/s" if rows < 64 else f"{_tflops(rows, n, k, found[1])}"
            line = f"  {name} M={rows}: " + " | ".join(f"{1e6 * each:.1f}" for each in found)
            line += f" || {1e6 * ours:.1f}, {1e6 * other:.1f} ({speed} with quantisation)"
            print(line, flush=True)
            times.lines.append(line)


def _tflops(rows: int, n: int, k: int, seconds: float) -> str:
    return f"{2 * rows * n * k / seconds / 1e12:.0f} TFLOP/s"


# ---- tiles and rows ----


def tiles(times: Times) -> None:
    """The times of all tiles for some numbers of rows, best first, and which one is chosen."""
    cases = [(256, 6144, 4096), (4096, 4096, 4096), (16, 4096, 4096), (131, 24576, 4096), (64, 4096, 12288)]
    cases += [(16, 24576, 4096), (64, 6144, 4096), (512, 4096, 12288), (256, 4096, 4096), (8, 6144, 4096)]
    cases += [(4096, 24576, 4096)]
    for (rows, n, k), group in [(case, group) for group in (None, GROUP) for case in cases]:
        x, plain = quantise_rows_triton(rows_of(rows, k), group), rows_of(rows, k)
        weights = [weight_of(n, k, group) for _ in range(copies(n * k, rows))]
        found = []
        for tile in TILES if group is None else BLOCK_TILES:
            if times.late():
                print("  time is up")
                return
            if tile.height >= 2 * max(rows, 64) or (rows > 512 and tile.rows * tile.columns < 2**13):
                continue
            fit = fitted_fp8(tile, GPU)
            calls = [partial(fp8_linear_triton, x, w, tile=fit) for w in weights]
            found.append((attempt(str(tile), calls), fit, "rows" if group is None else "blocks"))
        found.sort(key=lambda each: each[0])
        chosen = choose_fp8_tile(rows, n, GPU, group)
        quantise = attempt("quantise", [partial(quantise_rows_triton, plain)] * 4)
        best = f"{_named(*found[0])}: {_tflops(rows, n, k, found[0][0])}"
        print(f"  {rows} x {n} x {k}: best {best}; quantise alone")
        print(f"    {1e6 * quantise:.1f} us, chosen {[_named(*each) for each in found if each[1] == chosen]}")
        times.lines.extend([f"{rows} x {n} x {k}: {_named(*each)}" for each in found])
        print("    " + "; ".join(_named(*each) for each in found[:6]), flush=True)


def _named(seconds: float, tile: Any, kind: str) -> str:
    flags = f"{' swap' if tile.swap else ''}{' persistent' if tile.persistent else ''}"
    rows = f"{tile.rows}+{tile.more}" if tile.more else f"{tile.rows}"
    shape = f"{rows}x{tile.columns}x{tile.k}/{tile.stages}/{tile.warps}w{flags}"
    return f"{shape} {kind} {1e6 * seconds:.1f} us"


def rows(times: Times) -> None:
    """Launch choices of `fp8_gemv`, and of the kernels that write whole rows."""
    for name, (n, k) in SHAPES.items():
        method = [weight_of(n, k) for _ in range(copies(n * k, 1))]
        x, norm = rows_of(1, k), torch.ones(k, device=GPU, dtype=torch.bfloat16)
        fused = {"norm_weight": norm, "eps": 1e-6, "residual": rows_of(1, k), "silu": name == "gate_up"}
        options: Any = fused if name in ("qkv", "gate_up") else {}
        found = []
        for tile, warps in ((8192, 4), (16384, 4), (32768, 4), (32768, 8)):
            if times.late():
                print("  time is up")
                return
            fp8_gemv._TILE, fp8_gemv._WARPS = tile, warps
            calls = [partial(fp8_gemv.fp8_gemv_triton, x, w, **options) for w in method]
            found.append((attempt(f"gemv {tile} {warps}", calls), f"tile {tile}, {warps} warps"))
        fp8_gemv._TILE, fp8_gemv._WARPS = 16384, 4
        line = "; ".join(f"{what} {1e6 * s:.1f} us, {n * k / s / 1e12:.2f} TB/s" for s, what in sorted(found))
        print(f"  gemv {name}: {line}", flush=True)
        times.lines.append(f"gemv {name}: {line}")
    for count in (16, 256, 4096):
        pair = [rows_of(count, 2 * 12288) for _ in range(2)]
        widths = []
        for warps in (8, 16, 32):
            if times.late():
                return
            fused._ROW_WARPS = warps
            silus = [partial(silu_and_mul_fp8_triton, p) for p in pair]
            widths.append(f"{warps} warps {1e6 * attempt('silu', silus):.1f}")
        fused._ROW_WARPS = 16
        bf16 = attempt("silu bf16", [partial(activation.silu_and_mul_triton, p) for p in pair])
        print(f"  silu {count}: {', '.join(widths)} us; to bf16 {1e6 * bf16:.1f} us", flush=True)


def experts(times: Times) -> None:
    """The experts of a layer of Qwen3-30B-A3B: to bf16, and in FP8 with scales of rows and of blocks."""
    num, top_k, hidden, width = 128, 8, 2048, 768
    floats = [torch.randn(num, *shape, device=GPU, dtype=torch.bfloat16) * 0.02 for shape in EXPERTS]
    for count in (1, 16, 256, 4096, 16384):
        if times.late():
            print("  time is up")
            return
        choice = choose_experts(count * top_k, num, torch.bfloat16, GPU)
        chosen, tiles = route_triton(rows_of(count, num), top_k, True, None, choice.rows)
        assert tiles is not None
        x, found = rows_of(count, hidden), []
        found.append(attempt("bf16", [partial(experts_triton, x, *floats, tiles, choice)] * 2))
        for group in (None, GROUP):
            pair = [experts_of(num, *shape, group) for shape in EXPERTS]
            found.append(attempt(f"fp8 {group}", [partial(fp8_experts_triton, x, *pair, tiles, choice)] * 2))
            error = error_of(
                fp8_experts_triton(x, *pair, tiles, choice), fp8_experts_reference(x, *pair, chosen)
            )
            print("   WRONG" if error > 0.04 else "", f"error {error:.4f}", end="")
        speed = _tflops(3 * count * top_k, hidden, width, found[1])
        line = f"  experts M={count}: bf16 {1e6 * found[0]:.1f} | rows {1e6 * found[1]:.1f} ({speed})"
        print(line + f" | blocks {1e6 * found[2]:.1f} us", flush=True)


EXPERTS = ((1536, 2048), (2048, 768))  # of gate and up, and of down


def experts_of(num: int, n: int, k: int, group: int | None) -> Fp8Experts:
    each = weight_of(num * n, k, group)
    return Fp8Experts(each.codes.view(num, n, k), each.scales.view(num, -1, *each.scales.shape[1:]))


@torch.inference_mode()
def main() -> None:
    """Run the parts that the command line names."""
    lines: list[str] = []
    parts = {"check": check, "table": table, "tiles": tiles, "rows": rows, "experts": experts}
    parser = argparse.ArgumentParser(description="Check and time FP8 products.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--output", type=Path, help="a file for all times")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(0), torch.__version__)
    context = copy_context()
    context.run(in_graph.set, True)
    for name in args.parts or parts:
        print(f"{name}:", flush=True)
        start = time.monotonic()
        try:
            context.run(parts[name], Times(lines, start + LIMITS[name]))
        except Exception as error:
            print(f"  {name} ended: {type(error).__name__}: {str(error)[:300]}", flush=True)
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
