"""The speed at which a device reads its memory and multiplies matrices: the two figures of the floor.

    python tools/measure_device.py            # a line for KNOWN_DEVICES in nanovllm/report/roofline.py

Each figure is the best of many tries with several kernels, because no engine may be faster than the floor. On
a GPU it reads gigabytes and multiplies 8,192 x 8,192 matrices, so that caches and launches do not matter.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from nanovllm.cpu import isa
from nanovllm.cpu.dense import torch_linear
from nanovllm.kernels.compat import HAS_TRITON, cpu_kernel, jit, multiprocessors, tl

GPU_BYTES = 4 * 2**30  # read at once; at most half of the free memory
CPU_BYTES = 2**29
CPU_INPUTS = 2048  # of a product that reads them
GPU_SIDE, CPU_SIDE = 8192, 2048  # of the matrices that are multiplied
GPU_TRIES, CPU_TRIES = 50, 4
# Values that a program reads at once, warps, and programs for each multiprocessor.
READS = [(2048, 4, 8), (4096, 4, 8), (4096, 8, 4), (8192, 8, 2), (8192, 8, 4), (16384, 16, 2)]


@jit()
def _read_kernel(data_ptr, sums_ptr, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program adds up every n-th block of BLOCK values, so that all of them are read."""
    first = tl.program_id(0).to(tl.int64)  # offsets do not fit into 32 bits
    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(tl.cdiv(num_blocks - tl.program_id(0), tl.num_programs(0))):
        block = first + turn * tl.num_programs(0)
        total += tl.load(data_ptr + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


def read_triton(data: torch.Tensor, block: int, warps: int, programs: int) -> torch.Tensor:
    """Return partial sums [programs] of `data`, float32 in whole blocks."""
    assert data.numel() % block == 0, "a block is read whole"
    sums = torch.empty(programs, device=data.device)
    _read_kernel[(programs,)](data, sums, data.numel() // block, BLOCK=block, num_warps=warps)
    return sums


def best_seconds(work: Callable[[], object], device: torch.device, tries: int) -> float:
    """The shortest of `tries` runs after a warm-up, on a GPU by its own clock."""
    work()
    if device.type != "cuda":
        return min(_host_seconds(work) for _ in range(tries))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(tries + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return min(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3


def _host_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def read_speed(device: torch.device) -> float:
    """Bytes/s of a pure read: with our kernel on a GPU, on a CPU as a product of one row, and with torch's
    reductions."""
    on_gpu = device.type == "cuda"
    size = min(GPU_BYTES, torch.cuda.mem_get_info(device)[0] // 2) if on_gpu else CPU_BYTES
    data = torch.ones(size // 2**20 * 2**18, device=device)  # float32, in whole MiB
    ways: list[Callable[[], object]] = [data.sum, data.amax]
    if on_gpu and HAS_TRITON:
        for block, warps, each in READS:
            programs = each * multiprocessors(device)
            ways.append(lambda b=block, w=warps, p=programs: read_triton(data, b, w, p))  # type: ignore[misc]
    if not on_gpu and isa.has_kernels():  # which ask for memory further ahead than torch's reductions
        packed = data.view(-1, CPU_INPUTS, 64)
        ways.append(lambda: cpu_kernel("matmul.matmul")(data[None, :CPU_INPUTS], packed, 64 * len(packed)))
    tries = GPU_TRIES if on_gpu else CPU_TRIES
    return data.nbytes / min(best_seconds(way, device, tries) for way in ways)


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product in `dtype`."""
    side, tries = (GPU_SIDE, GPU_TRIES) if device.type == "cuda" else (CPU_SIDE, CPU_TRIES)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    ways = (
        lambda: torch.mm(a, b, out=out),
        lambda: torch.mm(a, b.T, out=out),
        lambda: torch_linear(a, b, None),  # on a CPU another library
    )
    return 2 * side**3 / min(best_seconds(way, device, tries) for way in ways)


def measure_speed(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes/s and FLOP/s of one device; takes a second or two, and on a GPU the time to compile kernels."""
    return read_speed(device), product_speed(device, dtype)


def device_name(device: torch.device) -> str:
    """As in KNOWN_DEVICES."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--times", type=int, default=3, help="how often to measure; the best counts")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # where Triton launches
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = [measure_speed(device, dtype) for _ in range(args.times)]
    for reads, products in found:
        print(f"# {reads / 1e12:.4g} TB/s, {products / 1e12:.4g} TFLOP/s")
    reads, products = (max(figures) for figures in zip(*found, strict=True))
    print(f'"{device_name(device)}": ({_up(reads):.3g}, {_up(products):.3g}),')


def _up(value: float) -> float:
    """Rounded up to three digits, so that it is not below the measurement."""
    digit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / digit) * digit


if __name__ == "__main__":
    main()
