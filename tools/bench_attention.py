"""Time of the paged attention kernels alone: decode inside a CUDA graph, whole prompts as launched.

python -m tools.bench attention --q-heads 16 --kv-heads 8 --cache-dtype fp8

The calls rotate over several caches, so that no call finds its keys and values in the L2 cache.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable

import numpy as np
import torch

from nanovllm.kernels.decode_attention import CHUNK, SHARED_CHUNK, SharedUnit, paged_decode_attention_triton
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.prefill_attention import paged_prefill_attention_triton
from nanovllm.shared_prefixes.finder import find_shared_prefixes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
ROTATE_BYTES = 2**30  # what the calls of a round read at least: many times an L2 cache


def draw(count: int, low: int, high: int) -> list[int]:
    generator = random.Random(0)
    return [generator.randint(low, high) for _ in range(count)]


DECODE_CASES = {
    "256 x 100-2048": draw(256, 100, 2048),
    "256 x 100-1100": draw(256, 100, 1100),
    "128 x 100-2048": draw(128, 100, 2048),
    "64 x 100-2048": draw(64, 100, 2048),
    "16 x 100-2048": draw(16, 100, 2048),
    "4 x 100-2048": draw(4, 100, 2048),
    "1 x 1000": [1000],
    "1 x 4096": [4096],
    "256 x 4096": [4096] * 256,
    "256 x 4160-4352": draw(256, 4160, 4352),
}
PREFILL_CASES = {  # (new tokens, context) of each sequence
    "16 x 1024": [(1024, 1024)] * 16,
    "30 x 100-1024": [(n, n) for n in draw(30, 100, 1024)],
    "4 x 4096": [(4096, 4096)] * 4,
    "8 x 512 after 3584": [(512, 4096)] * 8,
    "88 x 177 after 4096": [(177, 4273)] * 88,
    "150 x 20-200": [(n, n) for n in draw(150, 20, 200)],
}


class Caches:
    """Keys and values of `contexts` in scattered blocks of as many caches as it takes to defeat the L2.

    The first `common` tokens of all sequences lie in the same blocks.
    """

    def __init__(self, contexts: list[int], args: argparse.Namespace, common: int = 0) -> None:
        dtype, page = DTYPES[args.cache_dtype], args.block_size
        counts = [math.ceil(n / page) for n in contexts]
        blocks, width = sum(counts), max(math.ceil(args.max_context_len / page), max(counts))
        shape = (blocks, page, args.kv_heads, args.head_dim)
        self.bytes = 2 * sum(contexts) * args.kv_heads * args.head_dim * dtype.itemsize
        self.copies = min(256, max(2, math.ceil(ROTATE_BYTES / self.bytes)))

        def drawn() -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)

        scale = torch.ones(args.kv_heads, device="cuda") if args.cache_dtype == "fp8" else None
        self.layers = [KVCache(drawn(), drawn(), scale, scale) for _ in range(self.copies)]
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
        tables = torch.full((len(contexts), width), -1, dtype=torch.int32)
        for row, part in enumerate(order.split(counts)):
            tables[row, : len(part)] = part
            tables[row, : common // page] = tables[0, : common // page]
        self.tables = tables.cuda()
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device="cuda")


def queries(tokens: int, args: argparse.Namespace) -> torch.Tensor:
    """A view into the output of a fused projection of queries, keys and values."""
    dtype = torch.bfloat16 if args.cache_dtype == "fp8" else DTYPES[args.cache_dtype]
    heads = args.q_heads + 2 * args.kv_heads
    return torch.randn(tokens, heads, args.head_dim, device="cuda", dtype=dtype)[:, : args.q_heads]


def seconds(run: Callable[[], object], calls: int) -> float:
    """The median time of one of the `calls` calls of a run."""
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times[2:])


def time_decode(contexts: list[int], args: argparse.Namespace) -> tuple[float, int]:
    """Seconds of one call, and the bytes of keys and values that it reads."""
    caches = Caches(contexts, args, args.common)
    bound = max(args.max_context_len, max(contexts))
    shared = None
    if args.group:
        chunk = CHUNK if args.invariant else SHARED_CHUNK
        unit = SharedUnit(args.tile * args.kv_heads // args.q_heads, chunk)
        found = find_shared_prefixes(caches.tables.cpu().numpy(), np.array(contexts), args.block_size, unit)
        if found is not None:
            columns = found.members, found.lens, found.skips, found.units
            shared = tuple(torch.from_numpy(column).cuda() for column in columns)
    q = queries(len(contexts), args)
    scale = args.head_dim**-0.5
    if args.backend == "flash_attn":
        from flash_attn import flash_attn_with_kvcache

    def step() -> None:
        for cache in caches.layers:
            if args.backend == "flash_attn":
                flash_attn_with_kvcache(
                    q[:, None],
                    cache.k,
                    cache.v,
                    cache_seqlens=caches.contexts,
                    block_table=caches.tables,
                    softmax_scale=scale,
                    causal=True,
                )
            else:
                paged_decode_attention_triton(
                    q,
                    cache,
                    caches.tables,
                    caches.contexts,
                    bound,
                    scale,
                    shared,
                    invariant=args.invariant,
                )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return seconds(graph.replay, caches.copies), caches.bytes


def time_prefill(lengths: list[tuple[int, int]], args: argparse.Namespace) -> tuple[float, int]:
    """Seconds of one call and the floating-point operations that a causal mask leaves."""
    caches = Caches([context for _, context in lengths], args, args.common)
    new = torch.tensor([0, *(tokens for tokens, _ in lengths)])
    bounds = new.cumsum(0).to("cuda", torch.int32)
    q = queries(int(new.sum()), args)
    scale = args.head_dim**-0.5
    longest = int(new.max())

    def step() -> None:
        for cache in caches.layers:
            paged_prefill_attention_triton(q, cache, caches.tables, bounds, caches.contexts, longest, scale)

    pairs = sum(n * context - n * (n - 1) // 2 for n, context in lengths)
    return seconds(step, caches.copies), 4 * pairs * args.q_heads * args.head_dim


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", choices=["decode", "prefill"], default="decode")
    parser.add_argument("--backend", choices=["triton", "flash_attn"], default="triton", help="of decode")
    parser.add_argument("--invariant", action="store_true", help="as with deterministic=True (decode)")
    parser.add_argument("--cache-dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--q-heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument(
        "--max-context-len", type=int, default=4096, help="the bound that a graph is made for"
    )
    parser.add_argument("--peak", type=float, default=4.58, help="TB/s of a plain read, for the last column")
    parser.add_argument("--common", type=int, default=0, help="tokens that all sequences share")
    parser.add_argument("--group", action="store_true", help="and read once for several sequences")
    parser.add_argument("--tile", type=int, default=64, help="query heads that read it together (--group)")
    parser.add_argument("--cases", help="only those whose name holds this text")
    args = parser.parse_args()

    heads = f"{args.q_heads}/{args.kv_heads} heads of {args.head_dim}, block size {args.block_size}"
    print(f"{args.phase}, {args.backend}, {heads}, cache {args.cache_dtype}, {torch.cuda.get_device_name()}")
    decode = args.phase == "decode"
    rate = f"{'TB/s':>8}{f'of {args.peak}':>9}" if decode else f"{'TFLOP/s':>9}"
    print(f"{'sequences x tokens':20}{'us':>9}{rate}")
    for name, shape in (DECODE_CASES if decode else PREFILL_CASES).items():
        if args.cases and args.cases not in name:
            continue
        time, work = time_decode(shape, args) if decode else time_prefill(shape, args)
        speed = work / time / 1e12
        print(
            f"{name:20}{time * 1e6:9.1f}"
            + (f"{speed:8.2f}{speed / args.peak:9.0%}" if decode else f"{speed:9.0f}")
        )


if __name__ == "__main__":
    main()
