"""Time several all-reduces of a decode step's activations over GPUs, in a CUDA graph, as in the engine.

    python -m tools.bench all-reduce --ranks 2 --hidden 4096

Prints microseconds for each number of rows, in bfloat16; every rank's result is checked first.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from nanovllm.device import Device
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.parallel.group import TPGroup
from nanovllm.parallel.kernels.all_reduce import EMPTY, all_reduce_add_rms_norm_triton, all_reduce_triton
from nanovllm.parallel.peer_memory import PeerMemorySizes
from nanovllm.parallel.rendezvous import Rendezvous

ROWS = (1, 8, 32, 64, 128, 192, 256, 512)
CALLS = 40  # in one graph


def ways(group: TPGroup, hidden: int, device: Device) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The all-reduces by name; each takes and returns one rank's tensor."""

    def nccl(x: torch.Tensor) -> torch.Tensor:
        options = torch.distributed.AllreduceOptions()
        options.asyncOp = False
        work = group._group().allreduce([x], options)
        if work is not None:
            work.wait()
        return x

    group.make_peer_memory(PeerMemorySizes(torch.bfloat16, max(ROWS), hidden), device)
    peer_memory = group._peer_memory
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device.torch)

    def nccl_norm(x: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(nccl(x), x, weight, 1e-6)[0]

    if peer_memory is None:
        return {"nccl": nccl, "nccl+norm": nccl_norm}
    name = peer_memory.group_name

    def one_shot(x: torch.Tensor) -> torch.Tensor:
        buffer = peer_memory._buffer[: x.numel()].view_as(x)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", name)

    def two_shot(x: torch.Tensor) -> torch.Tensor:
        buffer = peer_memory._buffer[: x.numel()].view_as(x)
        buffer.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", name, torch.empty_like(x))

    def own(x: torch.Tensor, two: bool) -> torch.Tensor:
        return all_reduce_triton(peer_memory.peers, x, two)

    def own_norm(x: torch.Tensor, two: bool) -> torch.Tensor:
        return all_reduce_add_rms_norm_triton(peer_memory.peers, x, x, weight, 1e-6, two)[0]

    found = {
        "nccl": nccl,
        "one_shot": one_shot,
        "two_shot": two_shot,
        "own one": partial(own, two=False),
        "nccl+norm": nccl_norm,
        "one+norm": partial(own_norm, two=False),
    }
    if group.size > 2:  # for two ranks, two shots move as much as one
        found |= {"own two": partial(own, two=True), "two+norm": partial(own_norm, two=True)}
    return found


def graph_us(way: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Microseconds of one call: the median over replays of a graph with CALLS calls."""
    way(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    y = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            y = way(y)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times[5:])


def work(rank: int, ranks: int, hidden: int, folder: str | None, folders: multiprocessing.Queue) -> None:
    logging.basicConfig(level=logging.INFO)  # tells why symmetric memory is missing, if it is
    device = Device(f"cuda:{rank}")
    rendezvous = Rendezvous(folder)
    if folder is None:
        for _ in range(ranks - 1):
            folders.put(rendezvous.folder)
    group = TPGroup.connect(rank, ranks, device, rendezvous)
    candidates = ways(group, hidden, device)
    if rank == 0:
        print(f"{ranks} x {device.name}, hidden {hidden}, torch {torch.__version__}, us a call")
        print(f"{'rows':>6}{'KiB':>8}" + "".join(f"{name:>12}" for name in candidates))
    for rows in ROWS:
        line = f"{rows:6}{rows * hidden * 2 // 1024:8}"
        for name, way in candidates.items():
            x = torch.full((rows, hidden), float(rank + 1), dtype=torch.bfloat16, device=device.torch)
            if group._peer_memory is not None:  # torch's ways leave their rows in our buffers
                group._peer_memory._buffer.view(torch.int16).fill_(EMPTY)
            candidates["nccl"](x.clone())  # and all have done so before any goes on
            device.synchronize()
            total = way(x.clone())
            assert (total == (1 if "norm" in name else ranks * (ranks + 1) / 2)).all(), name
            line += f"{graph_us(way, x):12.1f}"
        if rank == 0:
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    folders = context.Queue()
    jobs = [context.Process(target=work, args=(0, args.ranks, args.hidden, None, folders))]
    jobs[0].start()
    for rank in range(1, args.ranks):
        own = (rank, args.ranks, args.hidden, folders.get(), folders)
        jobs.append(context.Process(target=work, args=own))
        jobs[-1].start()
    for job in jobs:
        job.join()


if __name__ == "__main__":
    main()
