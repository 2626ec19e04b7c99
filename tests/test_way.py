"""The way of a prompt through the code is what the documents say."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
from test_docs import PACKAGE, ROOT, section

from nanovllm import doors
from nanovllm.doors import Table
from tools.way import Way, code_lines, measures, star_calls, walk


@pytest.fixture(scope="module")
def way() -> Way:
    return walk()


@pytest.fixture(scope="module")
def measured(way: Way) -> dict[str, Any]:
    return measures(way)


def test_the_walk_through_the_code_is_that_of_a_prompt(way: Way) -> None:
    """Each file once, in the order in which `generate` meets it. Of kernels only whether they
    exist, as a GPU runs others than a CPU."""
    text = section((ROOT / "docs/design.md").read_text(), "A walk through the code")
    named = re.findall(r"^- `([\w/]+\.py)` .*\.$", text, re.M)
    assert named == re.findall(r"^- .*?`([\w/]+\.py)`", text, re.M), "a line is `file.py` and a sentence"
    assert len(set(named)) == len(named) and all((PACKAGE / name).exists() for name in named)
    kernels = [name for name in named if "kernels" in name.split("/")]
    assert {"kernels/prefill_attention.py", "kernels/decode_attention.py"} <= set(kernels)
    met = [path.relative_to(PACKAGE) for path in way.met]
    assert [name for name in named if name not in kernels] == [
        str(path) for path in met if "kernels" not in path.parts
    ]


def test_the_afternoon_of_the_readme_is_that_of_a_prompt(measured: dict[str, Any]) -> None:
    """README counts the files and lines, to the nearest hundred, that a reader opens, and how many run."""
    shown = r"(\d+) files\s+of\s+([\d,]+)\s+lines,\s+of\s+which\s+(\d+) % run"
    found = re.search(shown, (ROOT / "README.md").read_text())
    assert found is not None
    assert int(found[1]) == measured["the way: files"]
    assert abs(int(found[2].replace(",", "")) - measured["the way: lines"]) <= 100
    assert int(found[3]) == measured["the way: share of lines that run, %"] >= 45


def test_calls_that_do_not_name_their_arguments_only_fall(measured: dict[str, Any]) -> None:
    assert measured["calls with *name"] <= 25 and measured["calls with **name"] <= 15


def test_code_is_what_is_no_comment() -> None:
    text = (
        '"""Doc."""\n\nimport os  # here\n\n\ndef f():\n    """Doc."""\n    # why\n    return (\n        1\n'
    )
    text += "    )\n"
    assert code_lines(text) == {3, 6, 9, 10, 11}
    assert star_calls(ast.parse("f(*a, **b); f(*g()); f(**{}); f(x)")) == (1, 1)


TABLES = [name for name, value in vars(doors).items() if name.isupper() and isinstance(value, dict)]


@pytest.mark.parametrize("name", TABLES)
def test_each_place_in_a_table_of_doors_exists(name: str) -> None:
    table: Table[Any] = Table(getattr(doors, name))
    assert len(table) == len({**table}) > 0
    table["new"] = 1
    assert table["new"] == 1
    assert [*table][-1] == "new"
    del table["new"]
    assert "new" not in table
    with pytest.raises(KeyError):
        table["new"]
