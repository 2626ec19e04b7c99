"""An engine to report on, and what reads the page of a report and its charts."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
from checked_llm import CheckedLLM, make_tiny

from nanovllm import SamplingParams
from nanovllm.report.chart import BOTTOM, LEFT, RIGHT, TOP

SVG = "{http://www.w3.org/2000/svg}"
TITLES = ["Output", "Prefill", "Running", "Waiting", "Batch size", "Step time", "KV cache in use"]
TITLES += ["Prefix cache hits", "Preemptions"]
TOKEN = "hf_very_secret"


def preempted_llm(model: Path) -> CheckedLLM:
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
