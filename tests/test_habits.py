"""The habits of the project: its commands, its examples, and what it is built with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import bench

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_front_of_measurements_says_what_each_program_measures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.main([])
    lines = capsys.readouterr().out.split("names:\n")[1].splitlines()
    assert [line.split()[0] for line in lines] == list(bench.programs())
    assert len(lines) == len(list((ROOT / "tools").glob("bench_*.py"))) >= 15
    assert all(re.fullmatch(r"  [a-z0-9-]+ +\S.*\.", line) for line in lines)


def test_a_program_that_does_not_exist_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["plna"])
    assert "invalid choice: 'plna'" in (error := capsys.readouterr().err) and "int4-experts" in error


@pytest.mark.parametrize("name", bench.programs())
def test_each_program_is_called_by_its_name(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    with pytest.raises(SystemExit, match="0"):
        bench.main([name, "--help"])
    assert capsys.readouterr().out.startswith("usage: python")


def test_a_program_gets_its_own_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    bench.main(["plan", "--num-seqs", "3", "--steps", "4"])
    assert re.match(r"3 decoding sequences, 2 steps, ", capsys.readouterr().out)


def test_the_documents_measure_with_the_front() -> None:
    text = "\n".join(path.read_text() for path in [*PAGES, *(ROOT / "tools").glob("bench*.py")])
    named = set(re.findall(r"`(?:[A-Z_]+=\S+ )?python -m tools\.bench\s([a-z][a-z0-9-]*)", text))
    assert {"table", "cpu", "plan"} <= named <= set(bench.programs())
    assert not re.search(r"python (?:-m tools\.bench_|tools/bench_)", text)
