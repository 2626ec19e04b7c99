"""Times the kernels of states on one GPU: a step's share of the memory bus, prompts in TFLOP/s, and a sweep.

    python -m tools.bench states                       # each operation as it is launched; a table at the end
    python -m tools.bench states --sweep               # many tiles; --output FILE has all of them
    python -m tools.bench states --step-tiles 32,4 64,4 --prefill-tiles 64,4,2,4 32,4,2,8

Steps run inside a CUDA graph over several pools, so that no state is in the L2 cache. With the package
flash-linear-attention installed its kernels are timed too.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TextIO

import torch

from nanovllm.states.kernels import causal_conv as conv
from nanovllm.states.kernels.causal_conv import causal_conv_step_triton, causal_conv_triton
from nanovllm.states.kernels.delta_heads import DeltaHeads, Gates
from nanovllm.states.kernels.delta_prefill import PREFILL_TILES, PrefillTiles, delta_prefill_triton
from nanovllm.states.kernels.delta_step import TokenTile, choose_tile, delta_step_triton
from nanovllm.states.kernels.gated_norm import gated_norm_triton
from nanovllm.states.kernels.packed import Packed, pack

MODELS = {"35B-A3B, 4B": DeltaHeads(16, 32, 128, 128), "27B": DeltaHeads(16, 48, 128, 128)}
STEP_ROWS = (16, 128, 256)
PROMPTS = {"16,384 tokens, 1 row": [16384], "16,384 tokens, 64 rows": [256] * 64}
PROMPTS["16,384 tokens, 1 of 8,192, 64 of 128"] = [8192, *[128] * 64]
BUS = {"H200": 4.8e12, "H100": 3.35e12}  # bytes per second, as NVIDIA states them
STEP_SWEEP = [TokenTile(*each) for each in product((16, 32, 64, 128), (1, 2, 4, 8))]
PREFILL_SWEEP = [PrefillTiles(*each, 4, 168) for each in product((16, 32, 64, 128), (4, 8), (1, 2, 3))]
FIRST_SWEEP = [(4, None), (4, 128), (8, None), (8, 128), (8, 80)]  # warps and registers
PREFILL_SWEEP += [PrefillTiles(64, 4, 2, *each) for each in FIRST_SWEEP]
LINES: list[str] = []


class Inputs(NamedTuple):
    heads: DeltaHeads
    qkv: torch.Tensor
    gates: Gates

    @classmethod
    def random(cls, heads: DeltaHeads, tokens: int) -> Inputs:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        ab = torch.randn(tokens, 2 * heads.v_heads, **options)
        bias = torch.randn(heads.v_heads, **options)
        gates = Gates(ab[:, : heads.v_heads], ab[:, heads.v_heads :], 0.5 * bias, bias)
        return cls(heads, torch.randn(tokens, heads.channels, **options), gates)


def seconds(calls: Sequence[Callable[[], Any]], turns: int = 5) -> float:
    """The median time of one of `calls`, in a CUDA graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(turns):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]) / 1e3 / len(calls))
    return statistics.median(times[1:])


def attempt(calls: Sequence[Callable[[], Any]], what: str, log: TextIO) -> float:
    """Their time; infinite if they fail, as with tiles that do not fit."""
    try:
        return seconds(calls)
    except Exception as error:
        print(f"FAILED {what}: {type(error).__name__} {str(error)[:300]}", file=log)
        return float("inf")


def say(line: str, log: TextIO) -> None:
    LINES.append(line)
    print(line, flush=True)
    print(line, file=log, flush=True)


def bus_speed() -> float:
    name = torch.cuda.get_device_name()
    return next((speed for each, speed in BUS.items() if each in name), float("nan"))


def copy_speed() -> float:
    """Bytes read and written per second by a copy of 1 GiB."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds([partial(y.copy_, x)] * 10)


# ---- one token of each sequence ----


def step_calls(
    heads: DeltaHeads, rows: int, tile: TokenTile, pool_dtype: torch.dtype
) -> list[Callable[[], Any]]:
    """Layers whose states take a GiB together."""
    inputs = Inputs.random(heads, rows)
    size = rows * heads.v_heads * heads.k_dim * heads.v_dim * pool_dtype.itemsize
    pools = [
        torch.zeros(rows + 1, *heads.state, dtype=pool_dtype, device="cuda")
        for _ in range(max(2, -(-(2**30) // size)))
    ]
    order = torch.randperm(rows, device="cuda", dtype=torch.int32)
    return [
        partial(delta_step_triton, inputs.qkv, inputs.gates, heads, pool, order, tile=tile) for pool in pools
    ]


def bench_step(name: str, tiles: Sequence[TokenTile], log: TextIO) -> None:
    heads = MODELS[name]
    for rows, pool_dtype in product(STEP_ROWS, (torch.float32, torch.bfloat16)):
        found, own = {}, choose_tile(rows, pool_dtype)
        for tile in (own, *tiles):
            what = f"step {name} {rows} rows {pool_dtype} {tuple(tile)}"
            found[tile] = attempt(step_calls(heads, rows, tile, pool_dtype), what, log)
            print(f"  {what}: {found[tile] * 1e6:.1f} us", file=log, flush=True)
        for text, tile in (("as launched", own), ("best", min(found, key=lambda each: found[each]))):
            if tile in found and (text == "as launched" or tile != own):
                took = found[tile]
                moved = rows * heads.v_heads * heads.k_dim * heads.v_dim * pool_dtype.itemsize * 2
                moved += rows * 2 * (heads.channels + heads.v_heads * heads.v_dim)
                say(
                    f"step     {name:12s} {rows:4d} rows {str(pool_dtype)[6:]:9s}{took * 1e6:9.1f} us "
                    f"{moved / took / 1e9:7.0f} GB/s {moved / took / bus_speed():5.0%} of the bus  "
                    f"{text} {tuple(tile)}",
                    log,
                )


# ---- prompts ----


def packed_of(lengths: Sequence[int]) -> Packed:
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().cuda()
    rows = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
    return pack(starts, torch.zeros_like(rows), rows, sum(lengths))


def prefill_flops(heads: DeltaHeads, tokens: int, chunk: int = 64) -> float:
    """Of the chunked form: three products with the state, four within a chunk, and its inverse."""
    of_state = 3 * 2 * heads.k_dim * heads.v_dim
    inside = 2 * chunk * (2 * heads.k_dim + 2 * heads.v_dim) + 4 * 2 * chunk * chunk
    return tokens * heads.v_heads * (of_state + inside)


def bench_prefill(name: str, tiles: Sequence[PrefillTiles], log: TextIO) -> None:
    heads = MODELS[name]
    for prompts, lengths in PROMPTS.items():
        tokens = sum(lengths)
        inputs, packed = Inputs.random(heads, tokens), packed_of(lengths)
        pool = torch.zeros(len(lengths), *heads.state, device="cuda")
        found = {}
        for tile in tiles:
            what = f"prefill {name} {prompts} {tuple(tile)}"
            call = partial(delta_prefill_triton, inputs.qkv, inputs.gates, heads, pool, packed, tiles=tile)
            found[tile] = attempt([call] * 3, what, log)
            print(f"  {what}: {found[tile] * 1e3:.3f} ms", file=log, flush=True)
        best = min(found, key=lambda each: found[each])
        for text, tile in (("as launched", PREFILL_TILES), ("best", best)):
            if tile in found and (text == "as launched" or tile != PREFILL_TILES):
                rate = prefill_flops(heads, tokens) / found[tile] / 1e12
                say(
                    f"prefill  {name:12s} {prompts:38s}{found[tile] * 1e3:8.3f} ms {rate:7.1f} TFLOP/s  "
                    f"{text} {tuple(tile)}",
                    log,
                )
        parts = kernel_times(partial(delta_prefill_triton, inputs.qkv, inputs.gates, heads, pool, packed))
        say(f"         {', '.join(f'{kernel} {took * 1e3:.3f} ms' for kernel, took in parts.items())}", log)
        took = bench_fla(inputs, lengths, log)
        if took:
            say(f"fla      {name:12s} {prompts:38s}{took * 1e3:8.3f} ms", log)


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """The seconds of each kernel of a call, by name."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    events = [each for each in profile.key_averages() if each.key.startswith("_")]
    return {each.key: each.self_device_time_total / 1e6 / each.count for each in events}


def bench_fla(inputs: Inputs, lengths: Sequence[int], log: TextIO) -> float:
    """What flash-linear-attention takes for the same, q and k repeated beforehand; 0 without it."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return 0.0
    heads, tokens = inputs.heads, len(inputs.qkv)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k = (torch.randn(1, tokens, heads.v_heads, heads.k_dim, **options) for _ in range(2))
    v = torch.randn(1, tokens, heads.v_heads, heads.v_dim, **options)
    g = -torch.rand(1, tokens, heads.v_heads, device="cuda")
    beta = torch.rand(1, tokens, heads.v_heads, **options)
    starts = torch.tensor([0, *lengths]).cumsum(0).cuda()
    state = torch.zeros(len(lengths), *heads.state, device="cuda")

    def call() -> Any:
        return chunk_gated_delta_rule(
            *(q, k, v, g, beta),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
        )

    try:
        with torch.no_grad():
            call()
            times = []
            for _ in range(7):
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                call()
                events[1].record()
                events[1].synchronize()
                times.append(events[0].elapsed_time(events[1]) / 1e3)
        return statistics.median(times)
    except Exception as error:
        print(f"FAILED fla: {type(error).__name__} {str(error)[:300]}", file=log)
        return 0.0


# ---- what lies around it ----


def bench_others(name: str, log: TextIO) -> None:
    """Convolution and gated norm, against what they read and write."""
    heads, tokens = MODELS[name], 16384
    inputs = Inputs.random(heads, tokens)
    weight = torch.randn(heads.channels, 4, dtype=torch.bfloat16, device="cuda")
    pool = torch.zeros(256, 3, heads.channels, dtype=torch.bfloat16, device="cuda")
    moved = 2 * inputs.qkv.nbytes
    for prompts, lengths in PROMPTS.items():
        call = partial(causal_conv_triton, inputs.qkv, weight, None, pool, packed_of(lengths))
        took = attempt([call] * 3, f"convolution {prompts}", log)
        say(f"conv     {name:12s} {prompts:38s}{took * 1e6:9.1f} us {moved / took / 1e9:7.0f} GB/s", log)
    for rows in STEP_ROWS:
        x, order = inputs.qkv[:rows], torch.arange(rows, dtype=torch.int32, device="cuda")
        took = attempt(
            [partial(causal_conv_step_triton, x, weight, None, pool, order)] * 20, "conv step", log
        )
        say(f"conv     {name:12s} {f'step of {rows} rows':38s}{took * 1e6:9.1f} us", log)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    weight = torch.ones(heads.v_dim, **options)
    for rows in (*STEP_ROWS, tokens):
        x, z = (torch.randn(rows, heads.v_heads, heads.v_dim, **options) for _ in range(2))
        took = attempt([partial(gated_norm_triton, x, z, weight, 1e-6)] * 10, "gated norm", log)
        rate = 3 * x.nbytes / took / 1e9
        say(f"norm     {name:12s} {f'{rows} tokens':38s}{took * 1e6:9.1f} us {rate:7.0f} GB/s", log)


def sweep_conv(name: str, log: TextIO) -> None:
    """The tiles of the convolution."""
    heads = MODELS[name]
    inputs, packed = Inputs.random(heads, 16384), packed_of([16384])
    weight = torch.randn(heads.channels, 4, dtype=torch.bfloat16, device="cuda")
    pool = torch.zeros(1, 3, heads.channels, dtype=torch.bfloat16, device="cuda")
    before = conv._CHANNELS, conv._TOKENS
    for channels, tokens in product((64, 128, 256, 512), (8, 16, 32, 64)):
        conv._CHANNELS, conv._TOKENS = channels, tokens
        call = partial(causal_conv_triton, inputs.qkv, weight, None, pool, packed)
        took = attempt([call] * 3, f"convolution {channels} x {tokens}", log)
        say(f"conv     {channels} channels x {tokens} tokens{took * 1e6:9.1f} us", log)
    conv._CHANNELS, conv._TOKENS = before


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the kernels of states, on a GPU.")
    parser.add_argument("--output", default=os.devnull, help="a file for all lines of the sweep")
    parser.add_argument("--sweep", action="store_true", help="try many tiles")
    parser.add_argument("--step-tiles", nargs="*", default=[], metavar="COLUMNS,WARPS")
    parser.add_argument(
        "--prefill-tiles", nargs="*", default=[], metavar="COLUMNS,WARPS,STAGES,FIRST_WARPS[,FIRST_REGISTERS]"
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", choices=("step", "prefill", "others"), help="one of the three parts")
    args = parser.parse_args()
    steps = [TokenTile(*map(int, each.split(","))) for each in args.step_tiles]
    prefills = [PrefillTiles(*map(int, each.split(","))) for each in args.prefill_tiles]
    steps = [*steps, *(STEP_SWEEP if args.sweep else ())]
    prefills = [PREFILL_TILES, *prefills, *(PREFILL_SWEEP if args.sweep else ())]
    with open(args.output, "w") as log:
        copied = copy_speed()
        say(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy moves "
            f"{copied / 1e9:.0f} GB/s, {copied / bus_speed():.0%} of the bus",
            log,
        )
        for name in args.models:
            if args.only in (None, "step"):
                bench_step(name, list(dict.fromkeys(steps)), log)
            if args.only in (None, "prefill"):
                bench_prefill(name, list(dict.fromkeys(prefills)), log)
            if args.only in (None, "others"):
                bench_others(name, log)
        if args.sweep and args.only in (None, "others"):
            sweep_conv(args.models[0], log)
    print("\nAll figures again:", *LINES, sep="\n")


if __name__ == "__main__":
    main()
