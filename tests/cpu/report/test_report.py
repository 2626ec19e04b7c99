"""The report of a run: its page and its charts."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checked_llm import CheckedLLM, make_tiny
from report_pages import (
    SVG,
    TITLES,
    TOKEN,
    check_axes,
    drawn,
    named,
    parse,
    pictures,
    preempted_llm,
    rows,
    ticks,
    words,
)

from nanovllm import SamplingParams
from nanovllm.batch import StepKind
from nanovllm.engine.executor import Load
from nanovllm.engine.stats import History, StepStats, attention_pairs
from nanovllm.report import charts, make_report, write_report
from nanovllm.report.chart import STYLE, Axis, Chart, time_unit
from nanovllm.report.gpu import GPUSample
from nanovllm.report.page import MAX_CELL_CHARACTERS, MAX_ERROR_ROWS, charts_of
from nanovllm.report.roofline import KNOWN_DEVICES, Cost, Speed, roofline_of
from nanovllm.stats.summary import EngineStats, summary


@pytest.fixture(scope="module")
def llm(model: Path) -> CheckedLLM:
    return preempted_llm(model)


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


def test_a_phone_shows_the_whole_page(llm: CheckedLLM) -> None:
    """Nothing has a fixed width above that of a small phone, and any text, however long its words, wraps."""
    text = make_report(llm, errors=[("x" * 500, "y" * 500)], parameters={"a_long_name": "z" * 500})
    style = text.split("<style>")[1].split("</style>")[0]
    flexible = re.sub(r"min\(\d+%, \d+px\)|max-width: \d+px", "", style)
    assert max(int(each) for each in re.findall(r"\b(\d+)px", flexible)) <= 40
    ems = [float(each) for each in re.findall(r"width: ([\d.]+)em", style)]
    assert ems and max(ems) * 15 < 320 - 2 * 16 - 60, "a name leaves room for its value"
    for names in ("h1, p, pre", "th, td"):
        [rules] = re.findall(rf"{names} \{{([^}}]*)\}}", style)
        assert "overflow-wrap: anywhere" in rules
    assert re.search(r"table \{[^}]*table-layout: fixed", style), "a long word does not widen a table"
    assert "width=device-width" in text and "<th>a_<wbr/>long_<wbr/>name</th>" in text
    units, pixels = re.search(r"charts text \{ font-size: (\d+)px", style), 390 - 2 * 16
    width = float(pictures(parse(text))["Output"].get("viewBox", "").split()[2])
    assert units is not None and int(units[1]) * pixels / width > 11, "text of charts can be read"


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
    lines = {str(number): [[(0.0, 1.0), (9.0, 2.0 + number)]] for number in range(10)}
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
    pairs = attention_pairs(queries, contexts)
    return StepStats(kind, num_seqs, num_seqs * query, pairs, seconds, num_seqs, 0, 0, num_seqs, 0, 0.5)


def recorded(steps: list[tuple[float, StepStats]]) -> EngineStats:
    history = History()
    history.steps.add(steps)
    return summary(history, Load(0, 0, 0, 0.0, 0.0))


def test_a_line_is_broken_where_no_step_ran() -> None:
    step = made(StepKind.DECODE, 2, 9, seconds=0.1)
    slow = replace(step, seconds=2.0)
    stats = recorded([(0.15, step), (0.25, step), (2.25, slow), (5.05, step), (5.15, step)])
    [output, *_] = charts_of(stats)
    assert [len(run) for run in output.lines[""]] == [3, 2]


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
    svg = parse(Chart("x", "y", {"": [[(0.0, 1.0), (seconds, 2.0)]]}).svg())
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
    assert [value for run in chart.lines[""] for _, value in run] == [
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
