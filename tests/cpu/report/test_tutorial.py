"""The tutorial runs completely, and its cells print what its text says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest

from tools.run_tutorial import NOTEBOOK, run_tutorial, settled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the notebook runs."""
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module")
def ran(folder: Path) -> list[Any]:
    """The code cells with their outputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        notebook = run_tutorial(folder)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(ran: list[Any], code: str) -> str:
    """The text output of the cell that contains `code`."""
    [cell] = [cell for cell in ran if code in cell.source]
    texts = [each.text for each in cell.outputs if each.get("name") == "stdout"]
    texts += [each.data["text/plain"] for each in cell.outputs if each.output_type == "execute_result"]
    return "".join(texts)


def test_its_title_counts_its_cells() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert cells[0].source.startswith(f"# nanovllm in {len(cells)} cells\n")


def test_cells_print_what_they_promise(ran: list[Any]) -> None:
    assert printed(ran, "Sort these numbers").strip().endswith("20 45 67 92")
    lines = printed(ran, "Count down from").splitlines()
    assert len(lines) == 3
    assert lines[0].replace(",", "").endswith("-> 30 26 22 18 14 10")
    streamed = [line.split() for line in printed(ran, "llm.stream").splitlines()]
    assert sorted(int(line[0]) for line in streamed) == list(range(8))
    assert {line[1] for line in streamed} == {"stop"}
    assert [json.loads(line)["text"] for line in printed(ran, "words.csv").splitlines() if line] == [
        *("I-V-V-O", "A-B-B-A", "L-O-V-E")
    ]
    errors = printed(ran, 'on_error="return"')
    assert errors.startswith("[(1, '") and errors.count("(") == 1 and "empty" in errors
    assert "requests: 71, 71 finished" in printed(ran, "print(llm.stats())")


def test_it_ends_with_a_chart_and_a_report(ran: list[Any], folder: Path) -> None:
    [cell] = [cell for cell in ran if "charts(llm)" in cell.source]
    [shown] = cell.outputs
    check_chart(shown)
    page = ElementTree.parse(folder / "report.html").getroot()
    assert page.findtext("body/h1") == "Tutorial"
    assert len(page.findall(".//table[@class='errors']//tr")) == 2
    assert len(page.findall(".//div[@class='sample']")) == 7


def check_chart(shown: Any) -> None:
    chart = ElementTree.fromstring(shown.data["image/svg+xml"])
    texts = [each.text for each in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert "Output" in texts and "tokens/s" in texts


def test_the_notebook_is_stored_with_its_outputs(ran: list[Any]) -> None:
    """`python -m tools.run_tutorial` stores them. Only times differ."""
    stored = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in stored] == list(range(1, len(stored) + 1))
    for cell, again in zip(stored, ran, strict=True):
        if "charts(llm)" in cell.source:
            check_chart(cell.outputs[0])
        else:
            assert _texts(cell) == _texts(again)
    assert "/" + "tmp" not in NOTEBOOK.read_text() and "/" + "home" not in NOTEBOOK.read_text()


def _texts(cell: Any) -> list[str]:
    """What a cell printed or returned, without bars. Of statistics, which have times, the requests; of a
    stream its lines in order."""
    found = [
        each.get("text") or each.data["text/plain"]
        for each in cell.outputs
        if each.output_type != "display_data"
    ]
    if "llm.stats()" in cell.source:
        return [line for text in found for line in text.splitlines() if "requests:" in line]
    return sorted(found[0].splitlines()) if "llm.stream" in cell.source else found


def bars(cell: Any) -> list[str]:
    return [each.data["text/plain"] for each in cell.outputs if each.output_type == "display_data"]


def test_bars_survive_a_static_view(ran: list[Any]) -> None:
    """They are plain text of one line, each at its end; no output needs a widget or a kernel."""
    stored = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    for cells in (stored, ran):
        [cell] = [cell for cell in cells if "outputs = llm.chat(conversations" in cell.source]
        [bar] = bars(cell)
        assert re.match(r"100%\|.*\| 60/60 \[", bar) and len(bar.splitlines()) == 1, bar
        assert all(
            "widget" not in kind for each in cells for out in each.outputs for kind in out.get("data", {})
        )
        assert all(out.get("name") != "stderr" for each in cells for out in each.outputs)


def test_of_standard_error_bars_stay() -> None:
    text = "a warning\n100%|####| 2/2 [2s]\n"
    outputs = [nbformat.v4.new_output("stream", name="stderr", text=text)]
    outputs += [nbformat.v4.new_output("stream", text="printed\n")]
    bar, printed = settled(outputs)
    assert bar.data == {"text/plain": "100%|####| 2/2 [2s]"} and printed.text == "printed\n"
