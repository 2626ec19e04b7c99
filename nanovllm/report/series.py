"""The charts of a report: their lines, from the timeline and from GPU samples. Counts and draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from nanovllm.engine.stats import EngineStats, TimelinePoint, counted
from nanovllm.report.chart import Chart, Line, Run
from nanovllm.report.gpu import GPUSample
from nanovllm.report.roofline import Cost, Speed


def charts_of(
    stats: EngineStats,
    roofline: tuple[Cost, Speed] | None = None,
    samples: Sequence[GPUSample] = (),
    marks: Sequence[float] = (),
) -> list[Chart]:
    """The charts of a run, with one time axis. A chart of the roofline and two of GPUs are included if their
    data are given."""
    points = stats.timeline()
    prefilling = [point for point in points if num_read(point)]
    steps = stats.num_prefill_steps + stats.num_decode_steps
    most_waiting = max((point.num_waiting for point in points), default=0)
    most_running = max((point.num_running for point in points), default=0)
    preempted = accumulate(point.num_preemptions for point in points)

    def lines(value: Callable[[TimelinePoint], float], of: Sequence[TimelinePoint] = points) -> list[Line]:
        places = [(point.time + stats.interval / 2, value(point)) for point in of]
        return [Line("", split(of, places, stats.interval))]

    output = lines(lambda point: point.output_tokens_per_s)
    prefill = lines(lambda point: point.prefill_tokens_per_s)
    running = lines(lambda point: point.num_running)
    waiting = lines(lambda point: point.num_waiting)
    batch = lines(lambda point: point.batch_size)
    step_ms = lines(lambda point: point.step_ms)
    kv_cache = lines(lambda point: 100 * point.kv_cache_usage)
    hits = lines(lambda point: 100 * point.num_cached_tokens / num_read(point), prefilling)
    preemptions = lines(lambda point: next(preempted))
    found = [
        Chart("Output", "tokens/s", output, f"{counted(stats.num_output_tokens, 'token')} in all"),
        Chart("Prefill", "prompt tokens/s", prefill, f"{counted(stats.num_computed_tokens, 'token')} in all"),
        Chart("Running", "sequences", running, f"{most_running:,.0f} at most", whole=True),
        Chart("Waiting", "sequences", waiting, f"{most_waiting:,.0f} at most", whole=True),
        Chart("Batch size", "sequences of the mean step", batch, f"{stats.decode_batch_size:,.1f} in decode"),
        Chart("Step time", "ms of the mean step", step_ms, f"{counted(steps, 'step')} in all"),
        Chart(
            "KV cache in use", "% of blocks", kv_cache, f"{stats.peak_kv_cache_usage:.1%} at most", most=100
        ),
        Chart(
            "Prefix cache hits",
            "% of prompt tokens",
            hits,
            counted(stats.num_cached_tokens, "token"),
            most=100,
        ),
        Chart(
            "Preemptions", "sequences so far", preemptions, f"{stats.num_preemptions:,} in all", whole=True
        ),
    ]
    if roofline is not None:
        cost, speed = roofline
        share = lines(lambda point: 100 * cost.floor(point, speed) / point.seconds)
        found.append(
            Chart("Share of the roofline", "% of the steps' time", share, whole_share(points, *roofline))
        )
    found += gpu_charts(samples, stats.start_time)
    times = [time for chart in found for line in chart.lines for run in line.runs for time, _ in run]
    span = (min(times, default=0.0), max(times, default=0.0))
    return [replace(chart, span=span, marks=marks) for chart in found]


def whole_share(points: Sequence[TimelinePoint], cost: Cost, speed: Speed) -> str:
    """The share of the time of all steps that a perfect engine would need; "" before the first step."""
    seconds = sum(point.seconds for point in points)
    least = sum(cost.floor(point, speed) for point in points)
    return f"{least / seconds:.1%} of the whole run" if seconds else ""


def gpu_charts(samples: Sequence[GPUSample], start: float) -> list[Chart]:
    """Power and memory of each GPU; empty without samples. start: of the time axis, in seconds since 1970."""
    if not samples:
        return []
    gpus = range(len(samples[0].power))
    by_gpu = "" if len(gpus) == 1 else ", by GPU"

    def lines(value: Callable[[GPUSample, int], float]) -> list[Line]:
        runs: list[Run] = [[(sample.time - start, value(sample, gpu)) for sample in samples] for gpu in gpus]
        return [Line(str(gpu), [run]) for gpu, run in zip(gpus, runs, strict=True)]

    return [
        Chart("GPU power", f"W{by_gpu}", lines(lambda sample, gpu: sample.power[gpu])),
        Chart("GPU memory in use", f"GiB{by_gpu}", lines(lambda sample, gpu: sample.memory[gpu] / 2**30)),
    ]


def num_read(point: TimelinePoint) -> int:
    """Prompt tokens that were computed or came from the prefix cache."""
    return point.num_computed_tokens + point.num_cached_tokens


def split(points: Sequence[TimelinePoint], places: Run, length: float) -> list[Run]:
    """Split the places of points into runs, at gaps of more than two intervals without a step."""
    runs: list[list[tuple[float, float]]] = []
    before = 0.0
    for point, place in zip(points, places, strict=True):
        if not runs or point.time - before - point.seconds > 2 * length:
            runs.append([])
        runs[-1].append(place)
        before = point.time
    return list(runs)
