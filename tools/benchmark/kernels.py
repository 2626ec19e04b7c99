"""The time of each kernel in a short run, from the trace of torch.profiler.

Changes nothing in the engine and keeps no state.
"""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

PROFILE_TOKENS = 32  # output tokens of a sequence in the profiled run: enough for a median, a small trace


@dataclass(frozen=True)
class Kernel:
    """One kernel on the device, or all calls of an operation on a CPU; times in microseconds."""

    name: str
    start: float
    end: float
    correlation: int  # id of the host call that launched it; a graph's kernels share one


def profile(run: Callable[[], object], folder: Path, on_gpu: bool) -> dict[str, Any]:
    """Run under torch.profiler; write `trace.json.gz` and `kernels.txt` into `folder`.

    Returns {"kernels": {part: ten costliest}} and, if CUDA graphs were replayed, {"replays": ...} from
    `replay_times`. On a CPU the table lists operations by their own time. With several devices it is that of
    the first one.
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


def kernels_of(run: Callable[[], object]) -> list[Kernel]:
    """The kernels of a run on a GPU, in the order of their starts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(path))
        return read_trace(path)[0]


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


def idle_times(path: Path) -> dict[str, float]:
    """Microseconds between the first and the last kernel in which none runs, by the name of the innermost
    range of `torch.profiler.record_function` that runs on the host meanwhile; "" for none."""
    kernels, _ = read_trace(path)
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    ranges = [
        (each["dur"], each["ts"], each["ts"] + each["dur"], each["name"])
        for each in events
        if each.get("cat") == "user_annotation" and "dur" in each
    ]
    idle: dict[str, float] = defaultdict(float)
    until = kernels[0].end if kernels else 0.0
    for kernel in kernels:
        here = [each for each in ranges if each[1] < kernel.start and each[2] > until]
        places = {place for each in here for place in each[1:3] if until < place < kernel.start}
        for begin, end in pairwise(sorted({until, kernel.start, *places}) if kernel.start > until else ()):
            inner = min((each for each in here if each[1] <= begin and each[2] >= end), default=None)
            idle["" if inner is None else inner[3]] += end - begin
        until = max(until, kernel.end)
    return dict(idle)


def group_replays(kernels: list[Kernel], graph_calls: set[int]) -> list[list[Kernel]]:
    """The kernels of each graph replay, in order."""
    groups: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.correlation in graph_calls:
            groups[kernel.correlation].append(kernel)
    return sorted(groups.values(), key=lambda group: group[0].start)


def replay_times(kernels: list[Kernel], replays: list[list[Kernel]]) -> dict[str, float]:
    """Medians over the steps from one replay to the next, in microseconds.

    step_us: the whole step, slowed down by the profiler. kernel_us: time with at least one running kernel.
    gap_us: time without a kernel between the end of a replay and the start of the next.
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


def costliest(rows: list[tuple[str, int, float]]) -> list[dict[str, Any]]:
    """The ten rows (name, calls, microseconds) with the most time, and each one's share of all."""
    everything = sum(microseconds for _, _, microseconds in rows) or 1.0
    top = sorted(rows, key=lambda row: -row[2])[:10]
    return [
        {"name": name[:100], "calls": calls, "total_us": round(us, 1), "share": round(us / everything, 4)}
        for name, calls, us in top
    ]


def kernel_table(part: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"{part}: the {len(rows)} costliest", f"{'calls':>8} {'total us':>12} {'share':>7}  name"]
    for row in rows:
        lines.append(f"{row['calls']:8} {row['total_us']:12,.1f} {row['share']:7.1%}  {row['name']}")
    return "\n".join(lines)
