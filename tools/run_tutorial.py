"""Run the tutorial, and store its outputs and pictures in it.

    python -m tools.run_tutorial

Progress bars and log lines are left out: they are those of one machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "docs/tutorial.ipynb"
SECONDS = 300  # for one cell


def run_tutorial(folder: Path) -> Any:
    """Return the notebook with its outputs, run in a folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        notebook = run_tutorial(Path(folder))
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec",)}
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
