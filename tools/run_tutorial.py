"""Run the tutorial, and store its outputs and pictures in it.

    python -m tools.run_tutorial

Bars are stored as the text of their last state, which every viewer of notebooks shows; widgets would show
nothing without a kernel. Log lines are left out: they are those of one machine.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "docs/tutorial.ipynb"
SECONDS = 300  # for one cell
# Bars of text, also where widgets are installed.
SETUP = "import os, sys\nos.environ.pop('TQDM_DISABLE', None)\nsys.modules['ipywidgets'] = None"


def run_tutorial(folder: Path) -> Any:
    """Return the notebook with its outputs, run in a folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": str(folder)}}
    # Streams come in one piece, although a busy kernel prints in several, and of a bar its last state.
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources=resources, coalesce_streams=True
    )
    with client.setup_kernel():
        assert client.kc is not None
        client.kc.execute(SETUP, silent=True)  # counts as no cell
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = settled(cell.outputs)
    return notebook


def settled(outputs: list[Any]) -> list[Any]:
    """The outputs that do not change any more: of standard error the last states of bars, as text."""
    errors = "".join(each["text"] for each in outputs if each.get("name") == "stderr")
    bars = [line.strip() for line in errors.splitlines() if re.search(r"%\|.*\|", line)]
    shown = [nbformat.v4.new_output("display_data", {"text/plain": bar}) for bar in bars]
    return [*shown, *(each for each in outputs if each.get("name") != "stderr")]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        notebook = run_tutorial(Path(folder))
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec",)}
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
