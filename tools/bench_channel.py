"""Time of sending one decode step to the workers: `Channel.send` on rank 0, and until each worker has the
Batch.

python -m tools.bench channel --num-seqs 512 --width 16 --readers 2
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from time import perf_counter_ns, sleep

import numpy as np

from nanovllm.batch import LAST_SAMPLED, Batch, StepKind, greedy
from nanovllm.parallel.channel import Channel, ChannelReader

WARM_UP = 50


def decode_batch(size: int, width: int) -> Batch:
    return Batch(
        kind=StepKind.DECODE,
        seq_ids=tuple(range(10_000, 10_000 + size)),
        slots=np.arange(size, dtype=np.int32),
        token_ids=np.full(size, LAST_SAMPLED, np.int32),
        query_lens=np.ones(size, np.int32),
        context_lens=np.full(size, 1000, np.int32),
        tables=(np.arange(size * width, dtype=np.int32).reshape(size, width),),
        draws=np.ones(size, np.int32),
        sampling=replace(greedy(size), temperature=np.full(size, 0.6, np.float32)),
    )


def read(reader: ChannelReader, results: Connection, cpu: int) -> None:
    """Put into `results` the nanoseconds from each call of `send` until this process has the Batch."""
    os.sched_setaffinity(0, {cpu})
    latencies = []
    results.send("ready")
    while True:
        call = reader.receive(timeout=1)
        now = perf_counter_ns()
        if call is None:
            if os.getppid() != parent_process().pid:
                return
            continue
        function, args = call
        if function is read:
            break
        latencies.append(now - args[0])
    results.send(latencies)
    reader.close()


def work(seconds: float) -> None:
    """Keep the processor busy, like planning and launching the next step."""
    end = perf_counter_ns() + seconds * 1e9
    while perf_counter_ns() < end:
        pass


def measure(num_readers: int, batch: Batch, steps: int, between: Callable[[], None]) -> dict[str, list[int]]:
    """Nanoseconds of each step: of `send`, and of every reader."""
    context = get_context("spawn")
    channel = Channel(num_readers)
    pipes, processes = [], []
    own, *others = sorted(os.sched_getaffinity(0))
    for reader, cpu in zip(channel.readers, cycle(others or [own])):
        here, there = context.Pipe()
        processes.append(context.Process(target=read, args=(reader, there, cpu), daemon=True))
        processes[-1].start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    os.sched_setaffinity(0, {own})
    times = []
    for _ in range(WARM_UP + steps):
        start = perf_counter_ns()
        channel.send(measure, start, batch)
        times.append(perf_counter_ns() - start)
        between()
    channel.send(read)
    rows = {"send on rank 0": times[WARM_UP:]}
    for index, pipe in enumerate(pipes):
        rows[f"received by {index + 1}"] = pipe.recv()[WARM_UP:]
    for process in processes:
        process.join()
    channel.close()
    os.sched_setaffinity(0, {own, *others})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-seqs", type=int, default=512)
    parser.add_argument("--width", type=int, default=16, help="of the block tables")
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step", type=float, default=2e-3, help="seconds from one step to the next")
    args = parser.parse_args()

    batch = decode_batch(args.num_seqs, args.width)
    print(
        f"{args.num_seqs} decoding sequences, block tables {args.width} wide, {args.readers} readers, "
        f"{args.steps} steps; {os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    step = f"{args.step * 1e3:g} ms"
    cases: dict[str, Callable[[], None]] = {
        f"rank 0 busy for {step}": lambda: work(args.step),
        f"rank 0 asleep for {step}": lambda: sleep(args.step),
        "step after step": lambda: None,
    }
    for title, between in cases.items():
        print(f"{title:26}{'median':>8}{'99 % below':>14}")
        for name, values in measure(args.readers, batch, args.steps, between).items():
            median, p99 = statistics.median(values), sorted(values)[int(0.99 * len(values))]
            print(f"  {name:22}{median / 1e3:7.0f} us{p99 / 1e3:11.0f} us")


if __name__ == "__main__":
    main()
