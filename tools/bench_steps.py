"""Where the time of a run of nanovllm goes: by step, by phase, and by kernel.

Steps are timed by standing in for the progress bar, which the engine tells about every step; kernels come
from torch.profiler's trace of a short run. Changes nothing in the engine and keeps no state.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_roofline import Cost, Floor, Speed
from bench_workloads import Sharing

from nanovllm.batch import Batch, StepKind
from nanovllm.engine import llm_engine
from nanovllm.engine.progress import Progress

PROFILE_TOKENS = 32  # out of each sequence in the profiled run: enough steps for a median, a small trace
BATCH_SIZES = (256, 128, 64, 8, 1)


@dataclass(frozen=True, eq=False)
class Step:
    """One step as the host saw it. While steps overlap, `seconds` is from one result to the next."""

    seconds: float
    kind: StepKind
    query_lens: np.ndarray  # [S]
    context_lens: np.ndarray  # [S]
    rows: np.ndarray  # [S] which of the prompts


@contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """The steps of the one `generate` inside the block, in the list once the block has ended.

    What it adds to a step is a look at the clock and an entry in a list, 0.2 to 2.7 us as measured.
    """
    starts: list[float] = []
    log: list[tuple[float, StepKind, np.ndarray, np.ndarray, tuple[int, ...]]] = []

    class Recorder(Progress):
        def __enter__(self) -> Progress:
            super().__enter__()
            starts.append(time.perf_counter())
            return self

        def update(self, batch: Batch | None, num_finished: int) -> None:
            if batch is not None:  # the first launch of a run that is one step ahead has no result yet
                now = time.perf_counter()
                log.append((now, batch.kind, batch.query_lens, batch.context_lens, batch.seq_ids))
            super().update(batch, num_finished)

    steps: list[Step] = []
    with mock.patch.object(llm_engine, "Progress", Recorder):
        yield steps
    begin, first_id = starts[0], min((min(seq_ids) for *_, seq_ids in log), default=0)
    for end, kind, query_lens, context_lens, seq_ids in log:
        steps.append(Step(end - begin, kind, query_lens, context_lens, np.array(seq_ids) - first_id))
        begin = end


def phases(
    steps: list[Step], cost: Cost, speed: Speed, floor: Floor, sharing: Sharing | None
) -> dict[str, Any]:
    """Tokens/s, TFLOP/s or TB/s and the share of the floor of prefill (with mixed steps) and decode.

    The rates count what the steps that ran had to compute or read: what rows share by `sharing` one read a
    step, and none of what attention, norms and copies add to the weights and the K/V.
    """
    report: dict[str, Any] = {}
    prefill = [step for step in steps if step.kind is StepKind.PREFILL]
    if prefill:
        tokens = sum(int(step.query_lens.sum()) for step in prefill)
        flops = sum(cost.prefill_flops(step.query_lens, step.context_lens) for step in prefill)
        report["prefill"] = _phase(prefill, tokens, "tflops", flops, speed.flops_per_s, floor.prefill)
    decode = [step for step in steps if step.kind is StepKind.DECODE]
    if decode:
        tokens = sum(len(step.query_lens) for step in decode)
        contexts = sum(int(step.context_lens.sum()) for step in decode)
        if sharing is not None:
            contexts -= sum(sharing.saved(step.rows) for step in decode)
        read = cost.decode_bytes(len(decode), contexts)
        report["decode"] = _phase(decode, tokens, "tb_per_s", read, speed.bytes_per_s, floor.decode)
    return report


def _phase(
    steps: list[Step], tokens: int, rate: str, work: float, peak: float, floor: float
) -> dict[str, Any]:
    """What `steps` did: `work` in all, `rate` in 10**12 a second, of `peak` a second; floor in seconds."""
    seconds = sum(step.seconds for step in steps)
    return {
        "seconds": seconds,
        "steps": len(steps),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        rate: work / seconds / 1e12,
        "share_of_peak": work / seconds / peak,
        "share_of_floor": floor / seconds,
    }


def step_times(steps: list[Step]) -> dict[str, Any]:
    """The median decode step at some batch sizes and the largest, batches up to 5 % smaller counted in."""
    decode = [(len(step.query_lens), step) for step in steps if step.kind is StepKind.DECODE]
    sizes = sorted({*BATCH_SIZES, max((size for size, _ in decode), default=1)}, reverse=True)
    report = {}
    for size in sizes:
        chosen = [step for num_seqs, step in decode if 0.95 * size <= num_seqs <= size]
        if chosen:
            report[str(size)] = {
                "ms": statistics.median(step.seconds for step in chosen) * 1e3,
                "steps": len(chosen),
                "mean_context": float(np.mean([step.context_lens.mean() for step in chosen])),
            }
    return report


# -- kernels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One kernel on the device, times in microseconds, or what the calls of one operation took on a CPU."""

    name: str
    start: float
    end: float
    correlation: int  # which call on the host launched it; a graph's kernels share one


def profile(run: Callable[[], object], folder: Path, on_gpu: bool) -> dict[str, Any]:
    """Run under torch.profiler; write `trace.json.gz` and `kernels.txt` into `folder`.

    Returns {"kernels": {part: ten costliest}} and, where CUDA graphs were replayed, {"replays": ...} as
    `replay_times` gives it. On a CPU the table is of operations, by the time that is their own. With several
    devices it is the first one's.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    folder.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    trace = folder / "trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    report: dict[str, Any] = {"kernels": {}}
    if on_gpu:
        kernels, graph_calls = read_trace(trace)
        replays = group_replays(kernels, graph_calls)
        begin = replays[0][0].start if replays else float("inf")
        parts = {
            "decode": [kernel for kernel in kernels if kernel.start >= begin],
            "prefill" if replays else "all steps": [kernel for kernel in kernels if kernel.start < begin],
        }
        for part, chosen in parts.items():
            if chosen:
                report["kernels"][part] = costliest(_totals(chosen))
        if len(replays) > 2:
            report["replays"] = replay_times(kernels, replays)
    else:
        rows = [(e.key, e.count, e.self_cpu_time_total) for e in profiler.key_averages()]
        report["kernels"]["all steps"] = costliest(rows)
    tables = [kernel_table(part, rows) for part, rows in report["kernels"].items()]
    (folder / "kernels.txt").write_text("\n\n".join(tables) + "\n")
    return report


def read_trace(path: Path) -> tuple[list[Kernel], set[int]]:
    """The kernels of a Chrome trace in the order of their starts, and the calls that launched a graph."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels, graph_calls = [], set()
    for event in events:
        correlation = event.get("args", {}).get("correlation", -1)
        if event.get("cat") == "kernel":
            end = event["ts"] + event["dur"]
            kernels.append(Kernel(event["name"], event["ts"], end, correlation))
        elif "GraphLaunch" in event.get("name", ""):
            graph_calls.add(correlation)
    return sorted(kernels, key=lambda kernel: kernel.start), graph_calls


def group_replays(kernels: list[Kernel], graph_calls: set[int]) -> list[list[Kernel]]:
    """The kernels of each graph replay, in order."""
    groups: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.correlation in graph_calls:
            groups[kernel.correlation].append(kernel)
    return sorted(groups.values(), key=lambda group: group[0].start)


def replay_times(kernels: list[Kernel], replays: list[list[Kernel]]) -> dict[str, float]:
    """Medians over the steps from one replay to the next, in microseconds.

    step_us: all of it, as slow as the profiler makes it. kernel_us: at least one kernel ran. gap_us: none
    did, between the end of a replay and the start of the next; sampling and its launches lie there.
    """
    whole, busy, gaps = [], [], []
    for this, following in pairwise(replays):
        last, begin = max(kernel.end for kernel in this), following[0].start
        inside = [kernel for kernel in kernels if this[0].start <= kernel.start < begin]
        whole.append(begin - this[0].start)
        busy.append(busy_time(inside))
        gaps.append(begin - last - busy_time([kernel for kernel in inside if kernel.start >= last]))
    return {
        "count": len(replays),
        "step_us": statistics.median(whole),
        "kernel_us": statistics.median(busy),
        "gap_us": statistics.median(gaps),
    }


def busy_time(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one of the kernels ran."""
    total, until = 0.0, -float("inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def _totals(kernels: list[Kernel]) -> list[tuple[str, int, float]]:
    totals: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for kernel in kernels:
        calls, microseconds = totals[kernel.name]
        totals[kernel.name] = calls + 1, microseconds + kernel.end - kernel.start
    return [(name, calls, microseconds) for name, (calls, microseconds) in totals.items()]


def costliest(rows: list[tuple[str, int, float]], count: int = 10) -> list[dict[str, Any]]:
    """The `count` rows (name, calls, microseconds) with the most time, and each one's share of all."""
    everything = sum(microseconds for _, _, microseconds in rows) or 1.0
    top = sorted(rows, key=lambda row: -row[2])[:count]
    return [
        {"name": name[:100], "calls": calls, "total_us": round(us, 1), "share": round(us / everything, 4)}
        for name, calls, us in top
    ]


def kernel_table(part: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"{part}: the {len(rows)} costliest", f"{'calls':>8} {'total us':>12} {'share':>7}  name"]
    for row in rows:
        lines.append(f"{row['calls']:8} {row['total_us']:12,.1f} {row['share']:7.1%}  {row['name']}")
    return "\n".join(lines)
