"""The page: totals, charts, errors, options and versions of a run as one self-contained HTML file.

Reads statistics, options and configurations, so it works for open and closed engines. Never runs anything on
a device.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from html import escape
from itertools import accumulate
from pathlib import Path

from nanovllm.config import Config
from nanovllm.jobs.journal import versions
from nanovllm.jobs.side_files import check_name, replaced
from nanovllm.report.answers import Answers, answers_section, bars
from nanovllm.report.chart import FONT, STYLE, Chart, Run, clean
from nanovllm.report.gpu import GPUMonitor, GPUSample, devices_of
from nanovllm.report.roofline import Cost, Speed, roofline_of
from nanovllm.stats.calls import StatsCalls
from nanovllm.stats.summary import EngineStats, TimelinePoint, counted, short

MAX_ERROR_ROWS = 200  # rows of the table
MAX_CELL_CHARACTERS = 1000  # of a cell

_PAGE_STYLE = f"""\
html {{ color-scheme: light dark; background: var(--page); color: var(--text) }}
body {{ font: 15px/1.5 {FONT}; max-width: 1000px; margin: 0 auto; padding: 16px }}
h1 {{ font-size: 24px; margin: 8px 0 0 }} h2 {{ font-size: 18px; margin: 28px 0 8px }}
h3 {{ font-size: 15px; margin: 18px 0 6px }} h1, p, pre {{ overflow-wrap: anywhere }}
p, .tile span {{ color: var(--lesser); margin: 4px 0 }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(45%, 220px), 1fr)); gap: 10px }}
.tile {{ border: 1px solid var(--grid); border-radius: 6px; padding: 8px 12px }}
.tile b {{ display: block; font-size: 22px; line-height: 1.3 }} .tile span {{ font-size: 13px }}
.charts, .columns {{ display: grid; gap: 10px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)) }}
.columns {{ gap: 0 24px; align-items: start }} .columns div {{ min-width: 0 }}
.charts svg {{ display: block; width: 100%; border: 1px solid var(--grid); border-radius: 6px }}
table {{ border-collapse: collapse; table-layout: fixed; width: 100%; font-variant-numeric: tabular-nums }}
th, td {{ text-align: left; vertical-align: top; padding: 3px 12px 3px 0; overflow-wrap: anywhere;
  border-bottom: 1px solid var(--grid) }}
th {{ font-weight: 400; color: var(--lesser); width: 14em }}
.bars {{ margin-bottom: 12px }} .bars th {{ width: 35% }}
.bars i {{ display: inline-block; height: 10px; background: var(--line0); border-radius: 2px }}
.sample {{ border: 1px solid var(--grid); border-radius: 6px; padding: 4px 12px; margin: 0 0 8px }}
pre {{ font: inherit; white-space: pre-wrap; margin: 4px 0; max-height: 16em; overflow: auto }}
.prompt {{ color: var(--lesser); border-left: 3px solid var(--grid); padding-left: 8px }}
.charts + h3 {{ margin-top: 24px }}
.errors th {{ width: 6em }} summary {{ cursor: pointer; color: var(--lesser); margin-top: 18px }}
@media (max-width: 480px) {{
  th {{ width: 10.5em }} .charts text {{ font-size: 15px }} .charts .title {{ font-size: 17px }} }}"""


def write_report(
    path: str | os.PathLike[str],
    llm: StatsCalls,
    *,
    errors: Iterable[tuple[object, str]] = (),
    num_errors: int | None = None,
    gpu: GPUMonitor | None = None,
    title: str = "nanovllm run",
    facts: Mapping[str, object] | None = None,
    stats: EngineStats | None = None,
    marks: Sequence[float] = (),
    answers: Answers | None = None,
    parameters: Mapping[str, object] | None = None,
) -> None:
    """Write a report of what `llm` did so far as one HTML page in UTF-8, atomically.

    errors: the index (or id) of each prompt that could not run, and the reason. num_errors: the total number
    of errors, if `errors` has only the first ones.
    gpu: adds charts of its samples. title: of the page. facts: more lines about the run, by name.
    stats: to show instead of `llm.stats()`, such as those of several runs. marks: seconds of the time axis at
    which all charts have a vertical line. answers: shows samples, finish reasons and lengths of these, such
    as `Answers.of(outputs)`. parameters: of sampling, by name.

    Any thread may call it at any time, also after `llm.close()`. `check_path` checks `path` before a run.
    OSError if the page cannot be written.
    """
    check_path(path)
    page = make_report(
        llm,
        errors=errors,
        num_errors=num_errors,
        gpu=gpu,
        title=title,
        facts=facts,
        stats=stats,
        marks=marks,
        answers=answers,
        parameters=parameters,
    )
    with replaced(Path(path), use=f"{os.getpid()}.tmp") as file:
        file.write(page.encode())


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if no file can be written at `path`."""
    target = Path(path)
    if target.is_dir():
        raise ValueError(
            f"the report {str(path)!r} is a folder; pass the name of a file, such as report.html"
        )
    if not target.parent.is_dir():
        raise ValueError(
            f"the report {str(path)!r} cannot be written: there is no folder {str(target.parent)!r}"
        )
    check_name(target, f".nanovllm.{os.getpid()}.tmp")
    if not os.access(target.parent, os.W_OK):
        raise ValueError(f"the report {str(path)!r} cannot be written: {str(target.parent)!r} is read-only")


def charts(llm: StatsCalls, gpu: GPUMonitor | None = None) -> dict[str, Chart]:
    """The charts of the page, by title. A notebook displays each as a picture."""
    samples = gpu.samples if gpu is not None else ()
    return {chart.title: chart for chart in charts_of(llm.stats(), roofline_of(llm), samples)}


def make_report(
    llm: StatsCalls,
    *,
    errors: Iterable[tuple[object, str]] = (),
    num_errors: int | None = None,
    gpu: GPUMonitor | None = None,
    title: str = "nanovllm run",
    facts: Mapping[str, object] | None = None,
    stats: EngineStats | None = None,
    marks: Sequence[float] = (),
    answers: Answers | None = None,
    parameters: Mapping[str, object] | None = None,
) -> str:
    """The page of `write_report` as a string; it is valid HTML and XML."""
    rows, roofline = list(errors), roofline_of(llm)
    ready, stats = llm.stats().start_time, llm.stats() if stats is None else stats
    pictures = charts_of(stats, roofline, gpu.samples if gpu is not None else (), marks)
    num_errors = len(rows) if num_errors is None else num_errors
    start = datetime.fromtimestamp(ready).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    about = _model_facts(llm) | {"Engine ready": start} | dict(facts or {})
    notes = _notes(stats.interval, bool(marks), roofline is not None, None if gpu is None else gpu.why_not)
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{_shown(title)}</title><style>\n{STYLE}{_PAGE_STYLE}\n</style></head><body>\n",
            f"<h1>{_shown(title)}</h1>\n{_table(about, 'about')}\n<h2>Totals</h2>\n",
            _tiles(stats, num_errors),
            f"<h3>Tokens by source</h3>\n{bars(_sources(stats))}",
            "" if answers is None else answers_section(answers),
            "<h2>Over the run</h2>\n",
            "".join(f"<p>{_shown(note)}</p>\n" for note in notes),
            '<div class="charts">\n',
            "".join(f"{chart.svg()}\n" for chart in pictures),
            "</div>\n<h2>Errors</h2>\n",
            _error_table(rows, num_errors),
            '<h2>Details</h2>\n<div class="columns">',
            "" if parameters is None else _column("Parameters", parameters),
            _column("Totals", _totals(stats)),
            _column("Versions", versions() | {"system": platform.platform()}),
            "</div>\n<details><summary>All options</summary>\n",
            _table(_options(llm.config), "options"),
            "</details>\n</body></html>\n",
        )
    )


def _notes(interval: float, is_resumed: bool, has_roofline: bool, why_not: str | None) -> list[str]:
    """What the charts mean."""
    notes = [
        f"A point is {interval:g} s of the run. Rates are per second of steps, without idle time; a "
        "line has a gap where no step ran."
    ]
    if is_resumed:
        notes.append(
            "The job was resumed at each dashed line. Totals of requests and tokens count each answer once; "
            "those of steps, times and the prefix cache also count what an interrupted run had to give up."
        )
    if has_roofline:
        notes.append(
            "The share of the roofline is the time that a perfect engine would need on this device, divided "
            "by the time of the steps. A perfect engine computes products at the speed of a large matrix "
            "product, and reads weights and K/V at the speed of a pure read. Shared K/V counts once for each "
            "sequence, so shared prefixes may raise the share above 100 %."
        )
    if why_not is not None:
        notes.append(f"GPU power and memory are incomplete: {why_not}.")
    return notes


def _tiles(stats: EngineStats, num_errors: int) -> str:
    """The most important figures."""
    figures = {"output tokens/s of decode": f"{stats.decode_tokens_per_s:,.0f}"}
    if not stats.num_decode_steps:  # of answers of one token
        seconds = stats.prefill_seconds or 1.0
        figures = {"requests/s of prefill": short(stats.num_finished_requests / seconds)}
    figures |= {
        "prompt tokens/s of prefill": f"{stats.prefill_tokens_per_s:,.0f}",
        "requests finished": f"{stats.num_finished_requests:,}",
        "output tokens": f"{stats.num_output_tokens:,}",
        "of prompts from the prefix cache": f"{stats.prefix_cache_hit_rate:.1%}",
        "peak use of the KV cache": f"{stats.peak_kv_cache_usage:.1%}",
        "preemptions": f"{stats.num_preemptions:,}",
        "errors": f"{num_errors:,}",
    }
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in figures.items()
    )
    return f'<div class="tiles">{cells}</div>\n'


def _sources(stats: EngineStats) -> dict[str, int]:
    """Where the tokens of the run came from."""
    return {
        "prompts, computed": stats.num_computed_tokens,
        "prompts, from the prefix cache": stats.num_cached_tokens,
        "answers, drawn": stats.num_output_tokens,
    }


def _totals(stats: EngineStats) -> dict[str, object]:
    return {
        "Time since the engine was ready": f"{stats.uptime:,.2f} s",
        "Requests": f"{stats.num_requests:,}",
        "Requests finished": f"{stats.num_finished_requests:,}",
        "Requests unfinished": f"{stats.num_unfinished_requests:,}",
        "Prompt tokens": f"{stats.num_prompt_tokens:,}",
        "Prompt tokens computed": f"{stats.num_computed_tokens:,}",
        "Prompt tokens from the prefix cache": f"{stats.num_cached_tokens:,}",
        "Output tokens": f"{stats.num_output_tokens:,}",
        "Output tokens of decode": f"{stats.num_decoded_tokens:,}",
        "Prefill": f"{counted(stats.num_prefill_steps, 'step')}, {stats.prefill_seconds:,.2f} s",
        "Decode": f"{counted(stats.num_decode_steps, 'step')}, {stats.decode_seconds:,.2f} s",
        "Mean decode batch": f"{stats.decode_batch_size:,.1f} sequences",
        "Preemptions": f"{stats.num_preemptions:,}",
    }


def _options(config: Config) -> dict[str, object]:
    """The engine's options, without secrets."""
    return {each.name: getattr(config, each.name) for each in fields(config) if each.repr}


def _error_table(rows: list[tuple[object, str]], num_errors: int) -> str:
    """The first errors, and the number of further ones."""
    if not rows:
        return "<p>None.</p>\n"
    cells = "".join(_row(index, error) for index, error in rows[:MAX_ERROR_ROWS])
    more = num_errors - min(len(rows), MAX_ERROR_ROWS)
    rest = f"<p>And {more:,} more.</p>\n" if more > 0 else ""
    return f'<table class="errors"><tbody>{_row("index", "error")}{cells}</tbody></table>\n{rest}'


def _column(title: str, rows: Mapping[str, object]) -> str:
    """A table with a title."""
    return f"<div><h3>{title}</h3>\n{_table(rows, title.lower())}</div>"


def _table(rows: Mapping[str, object], kind: str) -> str:
    """Names and values side by side."""
    cells = "".join(_row(name, value) for name, value in rows.items())
    return f'<table class="{kind}"><tbody>{cells}</tbody></table>'


def _row(name: object, value: object) -> str:
    return f"<tr><th>{_shown(name).replace('_', '_<wbr/>')}</th><td>{_shown(value)}</td></tr>"


def _shown(value: object) -> str:
    """A value as text of the page, cut if it is very long."""
    content = str(value)
    if len(content) > MAX_CELL_CHARACTERS:
        content = content[:MAX_CELL_CHARACTERS] + "…"
    return escape(clean(content))


def _model_facts(llm: StatsCalls) -> dict[str, object]:
    """Model, shape, devices and lengths, by name, as readable text."""
    model, devices = llm.model_config, devices_of(llm.config)
    dtype = str(devices[0].resolve_dtype(llm.config.dtype, model.dtype)).removeprefix("torch.")
    layers = counted(model.num_layers, "layer")
    kv_cache = dtype if llm.config.kv_cache_dtype == "auto" else llm.config.kv_cache_dtype
    return {
        "Model": llm.config.model,
        "Architecture": f"{model.architecture}, {layers}, hidden size {model.hidden_size:,}",
        "Dtype": f"{dtype}; KV cache: {kv_cache}",
        "Devices": f"{len(devices)} x {devices[0].name}",
        "Longest sequence": f"{model.max_model_len or model.longest:,} tokens",
    }


# -- charts ------------------------------------------------------------------------------------------------


def charts_of(
    stats: EngineStats,
    roofline: tuple[Cost, Speed] | None = None,
    samples: Sequence[GPUSample] = (),
    marks: Sequence[float] = (),
) -> list[Chart]:
    """The charts of a run, with one time axis. A chart of the roofline and two of GPUs are included if their
    data are given."""
    points = stats.timeline()
    prefilling = [point for point in points if _num_read(point)]
    steps = stats.num_prefill_steps + stats.num_decode_steps
    most_waiting = max((point.num_waiting for point in points), default=0)
    most_running = max((point.num_running for point in points), default=0)
    preempted = accumulate(point.num_preemptions for point in points)

    def lines(
        value: Callable[[TimelinePoint], float], of: Sequence[TimelinePoint] = points
    ) -> dict[str, list[Run]]:
        places = [(point.time + stats.interval / 2, value(point)) for point in of]
        return {"": _split(of, places, stats.interval)}

    output = lines(lambda point: point.output_tokens_per_s)
    prefill = lines(lambda point: point.prefill_tokens_per_s)
    running, waiting = lines(lambda point: point.num_running), lines(lambda point: point.num_waiting)
    batch, step_ms = lines(lambda point: point.batch_size), lines(lambda point: point.step_ms)
    kv_cache, most_kv = lines(lambda point: 100 * point.kv_cache_usage), stats.peak_kv_cache_usage
    hits = lines(lambda point: 100 * point.num_cached_tokens / _num_read(point), prefilling)
    cached = counted(stats.num_cached_tokens, "token")
    in_decode = f"{stats.decode_batch_size:,.1f} in decode" if stats.num_decode_steps else ""
    preemptions, in_all = lines(lambda point: next(preempted)), f"{stats.num_preemptions:,} in all"
    found = [
        Chart("Output", "tokens/s", output, f"{counted(stats.num_output_tokens, 'token')} in all"),
        Chart("Prefill", "prompt tokens/s", prefill, f"{counted(stats.num_computed_tokens, 'token')} in all"),
        Chart("Running", "sequences", running, f"{most_running:,.0f} at most", whole=True),
        Chart("Waiting", "sequences", waiting, f"{most_waiting:,.0f} at most", whole=True),
        Chart("Batch size", "sequences of the mean step", batch, in_decode),
        Chart("Step time", "ms of the mean step", step_ms, f"{counted(steps, 'step')} in all"),
        Chart("KV cache in use", "% of blocks", kv_cache, f"{most_kv:.1%} at most", most=100),
        Chart("Prefix cache hits", "% of prompt tokens", hits, cached, most=100),
        Chart("Preemptions", "sequences so far", preemptions, in_all, whole=True),
    ]
    if roofline is not None:
        cost, speed = roofline
        share = lines(lambda point: 100 * cost.floor(point, speed) / point.seconds)
        found.append(
            Chart("Share of the roofline", "% of the steps' time", share, _whole_share(points, cost, speed))
        )
    found += _gpu_charts(samples, stats.start_time)
    times = [time for chart in found for line in chart.lines.values() for run in line for time, _ in run]
    span = (min(times, default=0.0), max(times, default=0.0))
    return [replace(chart, span=span, marks=marks) for chart in found]


def _whole_share(points: Sequence[TimelinePoint], cost: Cost, speed: Speed) -> str:
    """The share of the time of all steps that a perfect engine would need; "" before the first step."""
    seconds = sum(point.seconds for point in points)
    least = sum(cost.floor(point, speed) for point in points)
    return f"{least / seconds:.1%} of the whole run" if seconds else ""


def _gpu_charts(samples: Sequence[GPUSample], start: float) -> list[Chart]:
    """Power and memory of each GPU; empty without samples. start: of the time axis, in seconds since 1970."""
    if not samples:
        return []
    gpus = range(len(samples[0].power))
    by_gpu = "" if len(gpus) == 1 else ", by GPU"

    def lines(value: Callable[[GPUSample, int], float]) -> dict[str, list[Run]]:
        return {str(gpu): [[(each.time - start, value(each, gpu)) for each in samples]] for gpu in gpus}

    return [
        Chart("GPU power", f"W{by_gpu}", lines(lambda sample, gpu: sample.power[gpu])),
        Chart("GPU memory in use", f"GiB{by_gpu}", lines(lambda sample, gpu: sample.memory[gpu] / 2**30)),
    ]


def _num_read(point: TimelinePoint) -> int:
    """Prompt tokens that were computed or came from the prefix cache."""
    return point.num_computed_tokens + point.num_cached_tokens


def _split(points: Sequence[TimelinePoint], places: Run, length: float) -> list[Run]:
    """Split the places of points into runs, at gaps of more than two intervals without a step."""
    runs: list[list[tuple[float, float]]] = []
    before = 0.0
    for point, place in zip(points, places, strict=True):
        if not runs or point.time - before - point.seconds > 2 * length:
            runs.append([])
        runs[-1].append(place)
        before = point.time
    return list(runs)
