"""The report of a run: its page, its charts, and samples of GPUs."""

from __future__ import annotations

import random
import re
import threading
from dataclasses import replace
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import pytest
from checked_llm import CheckedLLM, make_tiny

from nanovllm import SamplingParams
from nanovllm.batch import ALL_GREEDY, Batch, StepKind
from nanovllm.engine.stats import Counters, EngineStats, StepStats
from nanovllm.report import GPUMonitor, charts, gpu, make_report, write_report
from nanovllm.report.chart import BOTTOM, LEFT, RIGHT, STYLE, TOP, Axis, Chart, Line, time_unit
from nanovllm.report.facts import roofline_of
from nanovllm.report.gpu import MAX_INTERVALS, GPUSample
from nanovllm.report.page import MAX_CELL_CHARACTERS, MAX_ERROR_ROWS
from nanovllm.report.roofline import KNOWN_DEVICES, Cost, Speed
from nanovllm.report.series import charts_of

SVG = "{http://www.w3.org/2000/svg}"
TITLES = ["Output", "Prefill", "Running", "Waiting", "Batch size", "Step time", "KV cache in use"]
TITLES += ["Prefix cache hits", "Preemptions"]
TOKEN = "hf_very_secret"
AHEAD = 100.0  # in seconds: samples use the engine's clock, and the host's clock was set back by this much


@pytest.fixture(scope="module")
def llm(model: Path) -> CheckedLLM:
    """A closed engine after a run in which some sequences waited and some were preempted."""
    with make_tiny(model, num_kvcache_blocks=9, max_num_seqs=3, hf_token=TOKEN) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        llm.generate([[5] * 17, *([5] * 17 + [each] for each in range(8))], params, use_tqdm=False)
    stats = llm.stats()
    assert stats.num_preemptions and stats.num_cached_tokens and stats.num_decode_steps > 20
    return llm


def parse(page: str) -> Element:
    return ElementTree.fromstring(page.encode())


def words(element: Element) -> str:
    return "".join(element.itertext())


def rows(page: Element, kind: str) -> dict[str, str]:
    """The cells of a table by name."""
    [table] = page.findall(f".//table[@class='{kind}']")
    return {words(row[0]): words(row[1]) for row in table.iter("tr")}


def pictures(page: Element) -> dict[str, Element]:
    return {named(svg, "title")[0]: svg for svg in page.iter(f"{SVG}svg")}


def named(svg: Element, kind: str) -> list[str]:
    return [words(each) for each in svg.iter(f"{SVG}text") if each.get("class") == kind]


def ticks(svg: Element, kind: str) -> list[tuple[float, float]]:
    """(value, place) of each tick of an axis."""
    scale = {"k": 1e3, "M": 1e6}
    found = []
    for each in svg.iter(f"{SVG}text"):
        if each.get("class") == kind:
            number, unit = re.fullmatch(r"([\d,.]+)([kM]?)", words(each)).groups()  # type: ignore[union-attr]
            place = float(each.attrib["x"]) if kind == "xtick" else float(each.attrib["y"]) - 4
            found.append((float(number.replace(",", "")) * scale.get(unit, 1.0), place))
    return found


def drawn(svg: Element, number: int = 0) -> list[tuple[float, float]]:
    """All points of a line as (time in the axis's unit, value), measured in the picture with the ticks."""
    places = [
        tuple(map(float, place.split()))
        for each in svg.iter(f"{SVG}path")
        if (each.get("class") or "").startswith(f"line line{number}") and not each.attrib["d"].endswith("h12")
        for place in re.findall(r"[-\d.]+ [-\d.]+", each.attrib["d"])
    ]
    (x0, left), (x1, right) = ticks(svg, "xtick")[:: len(ticks(svg, "xtick")) - 1]
    (y0, low), (y1, high) = ticks(svg, "ytick")[:: len(ticks(svg, "ytick")) - 1]
    return [
        (x0 + (x - left) / (right - left) * (x1 - x0), y0 + (y - low) / (high - low) * (y1 - y0))
        for x, y in places
    ]


def check_axes(svg: Element) -> None:
    """Check for a title, a unit for each axis, and round ticks at equal distances within the picture."""
    assert len(named(svg, "title")) == 1 and named(svg, "title")[0]
    unit, time_axis = named(svg, "unit")
    assert unit and re.fullmatch(r"time since the engine was ready \((s|min|h|days)\)", time_axis)
    for kind, begin, end in (("xtick", LEFT, RIGHT), ("ytick", TOP, BOTTOM)):
        found = ticks(svg, kind)
        assert 2 <= len(found) <= 9, found
        steps = np.diff([value for value, _ in found])
        assert steps[0] > 0 and np.allclose(steps, steps[0]), found
        assert float(f"{steps[0]:.1e}"[:3]) in (1, 2, 2.5, 5), found
        assert all(begin - 0.1 <= place <= end + 0.1 for _, place in found), found


# -- the page ----------------------------------------------------------------------------------------------


def test_the_page_has_all_charts_with_axes_and_needs_nothing_else(llm: CheckedLLM) -> None:
    text = make_report(llm)
    page = parse(text)
    found = pictures(page)
    assert list(found) == TITLES
    for svg in found.values():
        check_axes(svg)
    elements = {each.tag.removeprefix(SVG) for each in page.iter()}
    assert not elements & {"script", "link", "img", "image", "iframe", "use"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg\")|url\(|@import|\bsrc=|\bhref=", text)
    assert text.startswith("<!DOCTYPE html>") and "prefers-color-scheme: dark" in text
    assert page.find("head/meta[@name='viewport']") is not None


def test_figures_on_the_page_are_those_of_the_stats(llm: CheckedLLM) -> None:
    stats, page = llm.stats(), parse(make_report(llm, title="A & B", facts={"Input": "<rows>.jsonl"}))
    totals = rows(page, "totals")
    for name, value in {
        "Requests": stats.num_requests,
        "Requests finished": stats.num_finished_requests,
        "Requests unfinished": stats.num_unfinished_requests,
        "Prompt tokens": stats.num_prompt_tokens,
        "Prompt tokens computed": stats.num_computed_tokens,
        "Prompt tokens from the prefix cache": stats.num_cached_tokens,
        "Output tokens": stats.num_output_tokens,
        "Output tokens of decode": stats.num_decoded_tokens,
        "Preemptions": stats.num_preemptions,
    }.items():
        assert int(totals[name].replace(",", "")) == value, name
    assert totals["Prefill"] == f"{stats.num_prefill_steps} steps, {stats.prefill_seconds:.2f} s"
    assert totals["Decode"] == f"{stats.num_decode_steps} steps, {stats.decode_seconds:.2f} s"
    tiles = {words(each[1]): words(each[0]) for each in page.iterfind(".//div[@class='tile']")}
    assert tiles["output tokens/s of decode"] == f"{stats.decode_tokens_per_s:,.0f}"
    assert tiles["prompt tokens/s of prefill"] == f"{stats.prefill_tokens_per_s:,.0f}"
    assert tiles["of prompts from the prefix cache"] == f"{stats.prefix_cache_hit_rate:.1%}"
    assert tiles["peak use of the KV cache"] == f"{stats.peak_kv_cache_usage:.1%}"
    assert (tiles["requests finished"], tiles["errors"]) == ("9", "0")
    about = rows(page, "about")
    assert about["Model"] == llm.config.model and about["Devices"] == "1 x cpu"
    assert about["Dtype"] == "float32; KV cache: float32" and about["Input"] == "<rows>.jsonl"
    assert page.findtext("head/title") == page.findtext("body/h1") == "A & B"
    assert {"python", "torch", "nanovllm", "system"} <= set(rows(page, "versions"))


def test_options_are_there_and_secrets_are_not(llm: CheckedLLM) -> None:
    text = make_report(llm)
    options = rows(parse(text), "options")
    assert options["max_num_seqs"] == "3" and options["num_kvcache_blocks"] == "9"
    assert TOKEN not in text and "hf_token" not in options


def test_lines_show_the_timeline(llm: CheckedLLM) -> None:
    stats = llm.stats()
    points = stats.timeline()
    page = pictures(parse(make_report(llm)))
    reading = [each for each in points if each.num_computed_tokens + each.num_cached_tokens]
    preempted = np.cumsum([each.num_preemptions for each in points])
    for title, values, of in (
        ("Output", [each.output_tokens_per_s for each in points], points),
        ("Prefill", [each.prefill_tokens_per_s for each in points], points),
        ("Running", [each.num_running for each in points], points),
        ("Waiting", [each.num_waiting for each in points], points),
        ("Batch size", [each.batch_size for each in points], points),
        ("Step time", [each.step_ms for each in points], points),
        ("KV cache in use", [100 * each.kv_cache_usage for each in points], points),
        (
            "Prefix cache hits",
            [
                100 * each.num_cached_tokens / (each.num_cached_tokens + each.num_computed_tokens)
                for each in reading
            ],
            reading,
        ),
        ("Preemptions", list(preempted), points),
    ):
        found = drawn(page[title])
        unit, seconds = time_unit(points[-1].time + stats.interval)
        assert unit == "s" and len(found) == len(values) > 0, title
        height = ticks(page[title], "ytick")[-1][0]
        for (x, y), value, point in zip(found, values, of, strict=True):
            assert y == pytest.approx(value, abs=height / 500), title
            assert x == pytest.approx((point.time + stats.interval / 2) / seconds, abs=0.02), title


def test_errors_are_text_and_as_many_as_are_legible(llm: CheckedLLM) -> None:
    message = "</td><script>alert('&')</script> \x00\x1b[0m \ud800 \N{SNOWMAN} \ufffe"
    many = [(number, f"error {number}") for number in range(MAX_ERROR_ROWS + 50)]
    page = parse(make_report(llm, errors=[("row-<7>", message), ("long", "x" * 5000), *many]))
    cells = list(rows(page, "errors").items())
    assert cells[0] == ("index", "error") and len(cells) == MAX_ERROR_ROWS + 1
    shown = message.translate({0: "\ufffd", 0x1B: "\ufffd", 0xD800: "\ufffd", 0xFFFE: "\ufffd"})
    assert cells[1] == ("row-<7>", shown)
    assert cells[2] == ("long", "x" * MAX_CELL_CHARACTERS + "…")
    assert cells[3] == ("0", "error 0")
    assert "And 52 more." in words(page)
    assert "None." in words(parse(make_report(llm))) and "None." not in words(page)


def test_an_engine_that_has_not_run(model: Path) -> None:
    with make_tiny(model) as llm:
        page = parse(make_report(llm))
    assert rows(page, "totals")["Requests"] == "0"
    for svg in pictures(page).values():
        check_axes(svg)
        assert "nothing to show" in words(svg)
        assert {each.get("class") for each in svg.iter(f"{SVG}path")} == {"grid", "axis"}


def test_a_run_of_one_step(model: Path) -> None:
    with make_tiny(model) as llm:
        llm.generate([[5] * 9], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        page, stats = parse(make_report(llm)), llm.stats()
    assert (stats.num_prefill_steps, stats.num_decode_steps) == (1, 0)
    assert "1 token in all" in words(pictures(page)["Output"])
    assert "1 step in all" in words(pictures(page)["Step time"])
    assert rows(page, "totals")["Prefill"].startswith("1 step, ")
    assert "prefill: 1 step, " in repr(stats) and "decode: 0 steps, 0.00 s, 0 tokens, " in repr(stats)
    for svg in pictures(page).values():
        check_axes(svg)
        [dot] = [each for each in svg.iter(f"{SVG}path") if "dot" in (each.get("class") or "")]
        assert dot.attrib["d"].endswith("h0")
    [(_, rate)] = drawn(pictures(page)["Prefill"])
    assert rate == pytest.approx(9 / stats.prefill_seconds, rel=0.02)


def test_a_report_during_a_run(model: Path) -> None:
    """`on_step` may write a report, although the engine is in a call."""
    with make_tiny(model) as llm:
        pages = []
        llm.on_step = lambda stats: pages.append(make_report(llm))
        llm.generate([[5], [6]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [rows(parse(page), "totals")["Output tokens"] for page in pages] == ["2", "4"]


# -- the file ----------------------------------------------------------------------------------------------


def test_a_report_replaces_the_one_before(llm: CheckedLLM, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, llm, errors=[(3, "Grüße")])
    page = parse(path.read_text("utf-8"))
    assert rows(page, "errors")["3"] == "Grüße"
    assert list(tmp_path.iterdir()) == [path]


def test_invalid_paths(llm: CheckedLLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; pass the name of a file"):
        write_report(tmp_path, llm)
    with pytest.raises(ValueError, match=r"there is no folder '.*missing'"):
        write_report(str(tmp_path / "missing" / "report.html"), llm)
    assert not list(tmp_path.iterdir())


# -- charts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("from_zero", "whole"), [(True, False), (True, True), (False, False)])
def test_ticks_are_few_and_round_and_their_labels_are_their_values(from_zero: bool, whole: bool) -> None:
    rng = random.Random(7)
    for _ in range(2000):
        least = 0.0 if from_zero else rng.choice([0.0, 10 ** rng.uniform(-3, 6)])
        most = least + 10 ** rng.uniform(-4, 8)
        axis = Axis.of(least, most, from_zero, whole)
        assert axis.first <= least + 1e-9 * most and axis.last >= most - 1e-9 * most
        found = list(axis.ticks(0.0, 1.0))
        assert 2 <= len(found) <= 9 and all(-1e-9 <= place <= 1 + 1e-9 for place, _ in found)
        for place, label in found:
            value = axis.first + place * (axis.last - axis.first)
            scale = {"k": 1e3, "M": 1e6}.get(label[-1], 1.0)
            number = float(label.rstrip("kM").replace(",", "")) * scale
            assert number == pytest.approx(value, rel=1e-6, abs=axis.step * 1e-6), (label, value)
            assert not whole or number == int(number)
        assert len({label for _, label in found}) == len(found)


def test_several_lines_have_a_legend_and_colors_of_their_own() -> None:
    lines = [Line(str(number), [[(0.0, 1.0), (9.0, 2.0 + number)]]) for number in range(10)]
    svg = parse(Chart("GPU power", "W, by GPU", lines).svg())
    texts = [each for each in svg.iter(f"{SVG}text") if each.get("y") == "39.0"]
    assert [words(each) for each in texts] == ["W, by GPU", *map(str, reversed(range(10)))]
    strokes = {
        each.get("class") for each in svg.iter(f"{SVG}path") if "line line" in (each.get("class") or "")
    }
    assert strokes == {f"line line{number}" for number in range(8)}
    assert all(f"--line{number}: #" in STYLE for number in range(8))
    check_axes(svg)


def test_a_chart_shows_itself_in_a_notebook(llm: CheckedLLM) -> None:
    found = charts(llm)
    assert list(found) == TITLES
    svg = parse(found["Output"]._repr_svg_())
    style = svg.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme: dark" in style and ":root" not in style
    assert len(drawn(svg)) == len(llm.stats().timeline())


def made(kind: StepKind, num_seqs: int, context: int, query: int = 1, seconds: float = 0.1) -> StepStats:
    contexts, queries = np.full(num_seqs, context, np.int32), np.full(num_seqs, query, np.int32)
    tokens = np.zeros(num_seqs * query, np.int32)
    seq_ids = tuple(range(num_seqs))
    batch = Batch(kind, seq_ids, contexts, tokens, queries, contexts, contexts[None], queries, ALL_GREEDY)
    return StepStats(batch, seconds, num_seqs, 0, 0, num_seqs, 0, 0.5)


def recorded(steps: list[tuple[float, StepStats]]) -> EngineStats:
    counters = Counters()
    for when, step in steps:
        counters.record(step, counters._origin + when)
    return counters.snapshot(0, 0, 0, 0.0)


def test_a_line_is_broken_where_no_step_ran() -> None:
    step = made(StepKind.DECODE, 2, 9, seconds=0.1)
    slow = replace(step, seconds=2.0)
    stats = recorded([(0.15, step), (0.25, step), (2.25, slow), (5.05, step), (5.15, step)])
    [output, *_] = charts_of(stats)
    assert [len(run) for run in output.lines[0].runs] == [3, 2]


def test_all_charts_have_one_time_axis() -> None:
    prefill, decode = (made(kind, 2, 9, query=1, seconds=0.1) for kind in (StepKind.PREFILL, StepKind.DECODE))
    stats = recorded([(0.15, prefill), (5.05, decode)])
    samples = [GPUSample(stats.start_time + seconds, (1.0,), (1.0,)) for seconds in (0.0, 9.0)]
    axes = {str(ticks(parse(each.svg()), "xtick")) for each in charts_of(stats, None, samples)}
    assert len(axes) == 1 and "(8.0," in axes.pop()


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [(0.5, "s"), (180, "s"), (181, "min"), (3 * 3600, "min"), (86400, "h"), (1e6, "days")],
)
def test_times_have_a_unit_that_suits_them(seconds: float, unit: str) -> None:
    svg = parse(Chart("x", "y", [Line("", [[(0.0, 1.0), (seconds, 2.0)]])]).svg())
    check_axes(svg)
    assert named(svg, "unit")[1].endswith(f"({unit})")
    size = {"s": 1, "min": 60, "h": 3600, "days": 86400}[unit]
    assert drawn(svg)[-1][0] * size == pytest.approx(seconds, rel=0.005)


# -- the roofline ------------------------------------------------------------------------------------------

# As in test_benchmark.py: 288 parameters in layers, 40 in the head, 24 bytes of K/V per token, 48 FLOP per
# pair.
COST = Cost(layer_params=288, head_params=40, kv_bytes=24, pair_flops=48, itemsize=2)


def test_the_share_of_the_roofline_is_the_floor_by_the_time() -> None:
    steps = [
        (0.05, made(StepKind.PREFILL, 2, context=6, query=2, seconds=0.5)),
        (0.06, made(StepKind.DECODE, 3, context=7, seconds=0.3)),
        (1.05, made(StepKind.DECODE, 3, context=8, seconds=0.4)),
    ]
    stats = recorded(steps)
    speed = Speed(bytes_per_s=1e4, flops_per_s=1e5)
    floors = [(2 * 288 * 4 + 48 * 2 * 11) / 1e5 + (328 * 2 + 21 * 24) / 1e4, (328 * 2 + 24 * 24) / 1e4]
    points = stats.timeline()
    assert [COST.floor(point, speed) for point in points] == [pytest.approx(floor) for floor in floors]
    chart = charts_of(stats, (COST, speed))[-1]
    assert (
        chart.title == "Share of the roofline" and chart.note == f"{sum(floors) / 1.2:.1%} of the whole run"
    )
    assert [value for run in chart.lines[0].runs for _, value in run] == [
        pytest.approx(100 * floors[0] / 0.8),
        pytest.approx(100 * floors[1] / 0.4),
    ]
    slow = Speed(bytes_per_s=1e9, flops_per_s=1e3)  # where compute is the limit
    assert COST.floor(points[1], slow) == pytest.approx(2 * 328 * 3 / 1e3, rel=1e-5)


def test_a_known_device_has_a_share_and_a_note(llm: CheckedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert roofline_of(llm) is None and "roofline" not in make_report(llm)
    monkeypatch.setitem(KNOWN_DEVICES, "cpu", (2e12, 1e13))
    cost, speed = roofline_of(llm) or (None, None)
    assert speed == Speed(2e12, 1e13) and cost == Cost.of(llm.model_config, 4, 4)
    page = parse(make_report(llm))
    check_axes(pictures(page)["Share of the roofline"])
    assert "The share of the roofline is the time" in words(page)
    two = SimpleNamespace(config=replace(llm.config, data_parallel_size=2), model_config=llm.model_config)
    assert roofline_of(two)[1] == Speed(4e12, 2e13)  # type: ignore[arg-type,index]
    fp8 = SimpleNamespace(config=replace(llm.config, kv_cache_dtype="fp8"), model_config=llm.model_config)
    assert roofline_of(fp8)[0].kv_bytes * 4 == cost.kv_bytes  # type: ignore[arg-type,index,union-attr]


# -- GPUs --------------------------------------------------------------------------------------------------


class FakeGPU:
    """Counts its calls; from call number `end` on they fail."""

    is_cuda = True

    def __init__(self, number: int, end: float = float("inf"), kind: type[Exception] = RuntimeError) -> None:
        self.number, self.end, self.kind, self.calls = number, end, kind, 0
        self.enough = threading.Event()

    def power(self) -> float:
        self.calls += 1
        if self.calls >= 5:
            self.enough.set()
        if self.calls >= self.end:
            raise self.kind("GPU is lost")
        return 100.0 * (self.number + 1)

    def memory_in_use(self) -> int:
        return (self.number + 1) * 2**30


def threads() -> list[threading.Thread]:
    """The threads that sample GPUs."""
    return [each for each in threading.enumerate() if each.name == "nanovllm-gpu-monitor"]


def monitor_of(devices: list[Any], monkeypatch: pytest.MonkeyPatch) -> GPUMonitor:
    monkeypatch.setattr(gpu, "devices_of", lambda config: devices)
    monkeypatch.setattr(gpu, "INTERVAL_SECONDS", 0.002)
    stats = SimpleNamespace(start_time=time() + AHEAD, uptime=1.0)
    return GPUMonitor(SimpleNamespace(config=None, stats=lambda: stats))  # type: ignore[arg-type]


def test_samples_of_all_gpus(llm: CheckedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, begin = [FakeGPU(0), FakeGPU(1)], time() + AHEAD + 1.0
    with monkeypatch.context() as patch:
        monitor = monitor_of(devices, patch)
        with monitor:
            assert devices[0].enough.wait(60)
        assert threads() == []
        before = len(monitor.samples)
        with monitor:
            assert len(threads()) == 1
    assert monitor.why_not is None and threads() == []
    samples = monitor.samples
    assert before >= 5 and len(samples) >= before + 2
    assert begin <= samples[0].time < samples[-1].time <= time() + AHEAD + 1.0
    assert {sample.power for sample in samples} == {(100.0, 200.0)}
    assert {sample.memory for sample in samples} == {(2.0**30, 2.0**31)}
    found = pictures(parse(make_report(llm, gpu=monitor)))
    assert list(found)[-2:] == list(charts(llm, monitor))[-2:] == ["GPU power", "GPU memory in use"]
    check_axes(found["GPU power"])
    assert named(found["GPU power"], "unit")[0] == "W, by GPU"
    assert [round(drawn(found["GPU power"], number)[0][1]) for number in (0, 1)] == [100, 200]
    assert [round(drawn(found["GPU memory in use"], number)[-1][1], 1) for number in (0, 1)] == [1.0, 2.0]


def test_a_gpu_that_is_lost_ends_sampling_and_the_page_says_so(
    llm: CheckedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        monitor = monitor_of([FakeGPU(0, end=4)], patch)
        with monitor:
            for thread in threads():
                thread.join(60)
    assert len(monitor.samples) == 3 and monitor.why_not == "NVML: GPU is lost"
    page = parse(make_report(llm, gpu=monitor))
    assert "GPU power" in pictures(page) and "are incomplete: NVML: GPU is lost" in words(page)


def test_without_nvml_or_a_gpu_there_is_a_reason_and_no_thread(
    llm: CheckedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = FakeGPU(0, 1, ModuleNotFoundError)
    with monkeypatch.context() as patch, monitor_of([missing], patch) as monitor:
        assert threads() == []
    assert monitor.samples == [] and "pip install 'nanovllm[report]'" in (monitor.why_not or "")
    with GPUMonitor(llm) as monitor:
        assert threads() == []
    assert monitor.samples == [] and monitor.why_not == "the engine runs on a CPU"
    page = parse(make_report(llm, gpu=monitor))
    assert list(pictures(page)) == TITLES and "the engine runs on a CPU" in words(page)


def test_samples_of_a_long_run_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = monitor_of([FakeGPU(0)], monkeypatch)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        assert len(monitor._samples) <= MAX_INTERVALS
        return len(waits) > 3 * MAX_INTERVALS

    monkeypatch.setattr(monitor, "_end", SimpleNamespace(wait=wait))
    monitor._run()
    assert waits[0] == 0.002 and set(waits) == {0.002, 0.004, 0.008, 0.016, 0.032}
    times = [sample.time for sample in monitor.samples]
    assert MAX_INTERVALS // 2 <= len(times) <= MAX_INTERVALS and times == sorted(times)
    middle = gpu.mean(GPUSample(1.0, (10.0,), (4.0,)), GPUSample(2.0, (30.0,), (8.0,)))
    assert middle == GPUSample(1.5, (20.0,), (6.0,))
