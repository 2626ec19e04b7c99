"""The tutorial runs completely, and its cells print what its text says."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent.parent / "docs/tutorial.ipynb"
SECONDS = 300  # for one cell


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the notebook runs."""
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module")
def ran(folder: Path) -> list[Any]:
    """The code cells with their outputs."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        client.execute()
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
    errors = printed(ran, 'on_error="return"')
    assert errors.startswith("[(1, '") and errors.count("(") == 1 and "empty" in errors
    assert "requests: 71, 71 finished" in printed(ran, "print(llm.stats())")


def test_it_ends_with_a_chart_and_a_report(ran: list[Any], folder: Path) -> None:
    [cell] = [cell for cell in ran if "charts(llm)" in cell.source]
    [shown] = cell.outputs
    chart = ElementTree.fromstring(shown.data["image/svg+xml"])
    texts = [each.text for each in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert "Output" in texts and "tokens/s" in texts
    page = ElementTree.parse(folder / "report.html").getroot()
    assert page.findtext("body/h1") == "Tutorial"
    assert len(page.findall(".//table[@class='errors']//tr")) == 2


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
