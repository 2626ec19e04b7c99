"""The habits of the project: its commands, its examples, and what it is built with."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tools import bench

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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


def test_columns_of_a_job_are_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    bench.main(["jobs", "columns", "--rows", "200", "--repeat", "1"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures["seconds"]) == {"none", "all"} and figures["rate_of_plain"] > 0


def test_the_documents_measure_with_the_front() -> None:
    text = "\n".join(path.read_text() for path in [*PAGES, *(ROOT / "tools").glob("bench*.py")])
    named = set(re.findall(r"`(?:[A-Z_]+=\S+ )?python -m tools\.bench\s([a-z][a-z0-9-]*)", text))
    assert {"table", "cpu", "plan"} <= named <= set(bench.programs())
    assert not re.search(r"python (?:-m tools\.bench_|tools/bench_)", text)


def make_targets() -> dict[str, str]:
    """The commands of each target of the Makefile."""
    found = re.findall(r"^([a-z]+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    return dict(found)


def test_make_fast_is_style_types_plans_and_documents() -> None:
    targets = make_targets()
    assert targets["fast"].split()[-3:] == ["types", "quick", "style"]
    assert "ruff format --check ." in targets["style"] and "ruff check ." in targets["style"]
    assert "-m mypy" in targets["types"]
    paths = re.findall(r"tests/\S+", targets["quick"])
    assert paths == ["tests/plan", "tests/test_architecture.py", "tests/test_docs.py"]
    assert all((ROOT / path).exists() for path in [*paths, targets["ci"].strip()])
    test = re.search(r"&& (python -m pytest .*)", (ROOT / "README.md").read_text())
    assert test is not None and targets["test"].strip().replace("$(PYTHON)", "python") == test[1]


def test_hooks_before_a_commit_need_no_download() -> None:
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-format", "ruff-check", "mypy"]
    for hook in repository["hooks"]:
        assert hook["language"] == "system" and hook["entry"].startswith("python -m ")


def test_the_hosted_run_is_that_of_the_project() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    steps = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert steps["tests"] == [".ci/run"] and (ROOT / ".ci/run").stat().st_mode & 0o100
    assert steps["site"] == ['pip install -e ".[docs]"', "mkdocs build --strict"]
    assert "mkdocs" not in (ROOT / ".ci/run").read_text()
    supported = SpecifierSet(PROJECT["requires-python"])
    assert all(version in supported for version in jobs["tests"]["strategy"]["matrix"]["python"])


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_forms_of_issues_have_the_fields_that_a_form_needs(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    asked = [each for each in form["body"] if each["type"] != "markdown"]
    assert len({each["id"] for each in asked}) == len(asked) > 0
    assert {each["type"] for each in asked} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(each["attributes"]["label"] for each in asked)


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        canonicalize_name(name): version
        for name, version in (line.split("==") for line in lines if line[0] != "#")
    }


def test_tested_versions_are_those_that_the_project_accepts() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [Requirement(each) for each in [*PROJECT["dependencies"], *extras["test"], *extras["cpu"]]]
    pinned = pins()
    for each in asked:
        if each.name != "triton":  # torch for CUDA has its own
            assert pinned[canonicalize_name(each.name)] in each.specifier, each
    assert "triton" not in pinned


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_a_container_is_built_from_files_that_exist(name: str) -> None:
    text = re.sub(r"\\\n", " ", (ROOT / name).read_text())
    lines = [line.split(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    steps = [keyword for keyword, _ in lines]
    assert steps[0] == "FROM" and re.fullmatch(r"[\w/]+:\d[\w.-]+", lines[0][1]), "a base image has a tag"
    shown = {
        line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = [source for keyword, rest in lines if keyword == "COPY" for source in rest.split()[:-1]]
    assert set(copied) == shown and all((ROOT / source).exists() for source in copied)
    [user] = [index for index, keyword in enumerate(steps) if keyword == "USER"]
    assert lines[user][1] not in ("root", "0")
    assert "RUN" not in steps[user:] and {"ENTRYPOINT", "CMD"} <= set(steps[user:])
    [install] = re.findall(r"pip install [^\n]*", text)
    [extras] = re.findall(r'"\.\[([a-z,-]+)\]"', install)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert f"`{install.replace('--no-cache-dir ', '')}`" in (ROOT / "README.md").read_text()
    assert "-c constraints.txt" in install
