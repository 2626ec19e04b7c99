"""README.md agrees with the code, and its commands run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_docs import DOCS, OPTIONS, README, ROOT, anchors, links, section

from nanovllm import demo_model_path


def test_links_of_the_readme_lead_somewhere_on_a_package_index_too() -> None:
    """A package index shows only the text of README.md, so a link to a file of the project leads nowhere."""
    for target in links(README):
        assert target.startswith("https://") or target in anchors(README), target


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    measured = set(re.findall(r"[\d,]+", (ROOT / "docs/benchmarks.md").read_text()))
    table = README.split("| | nanovllm |")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        for figure in re.findall(r"[\d,]+", row.split("|", 2)[2]):
            assert figure in measured, row


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.S)
    assert code.count('"path/to/Qwen3-0.6B"') == 1
    names: dict[str, Any] = {}
    exec(code.replace('"path/to/Qwen3-0.6B"', repr(demo_model_path())), names)
    output = names["outputs"][0]
    assert output.outputs[0].text == output["text"] and output["token_ids"]
    assert capsys.readouterr().out == output["text"] + "\n"


def test_versions_of_the_readme_are_those_that_pip_accepts() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    [(least, above)] = re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', settings)
    assert f"Python 3.{least} to 3.{int(above) - 1}." in README
    [(least, above)] = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', settings)
    assert f"torch 2.{least} to 2.{int(above) - 1}" in section(README, "Models and hardware")
    assert f'pip install "torch<2.{above}" --index-url' in README, (
        "of another one pip would make torch for CUDA"
    )


def test_the_first_screen_of_the_readme() -> None:
    """What, for whom, why, and two commands, before the table of speed, whose figures it has."""
    screen, _, rest = README.partition("\n## Speed\n")
    assert len(screen.splitlines()) <= 60 and screen.count("\n## ") == 0
    for word in ("labels", "synthetic data", "evals", "RL rollouts"):
        assert f"\n| {word} |" in screen
    why = screen.split("**Why.**")[1].split("Its\nengine")[0]
    figures = re.findall(r"\d+,\d+|(?<= vLLM at )\d+", why)
    assert len(figures) == 7 and set(figures) <= set(re.findall(r"[\d,]+", rest.split("\n\n")[1]))
    assert len(re.findall(r"```bash\n", screen)) == 2
    assert "## Use\n" in OPTIONS and "## Use\n" not in README


def test_the_commands_of_the_first_screen_run(tmp_path: Path) -> None:
    """As they are written, in a folder with the project's files."""
    first, second = re.findall(r"```bash\n(.*?)```", README, re.S)[:2]
    assert first == "pip install -e . && python example.py\n"
    for name in ("example.py", "nanovllm"):
        (tmp_path / name).symlink_to(ROOT / name)
    program = tmp_path / "bin/nanovllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nanovllm "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in (first.partition(" && ")[2], second):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["task"] for row in rows] == ["What is 2 + 3?", "Reverse the word NOTE."]
    assert "5" in rows[0]["text"] and "ETON" in rows[1]["text"]


def test_the_readme_names_every_document() -> None:
    for path in DOCS[1:]:
        assert f"`{path.relative_to(ROOT)}`" in README
    assert "`SECURITY.md`" in README


def test_it_says_how_long_the_tests_take() -> None:
    assert re.search(r"python -m pytest [^\n]*\n```\n\nThe tests take about \d+ minutes", README)
