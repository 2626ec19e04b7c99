"""A run without `-m full` still shows each value of a matrix, and the table names tests that exist."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from full_cells import SHARE_OF_EXAMPLES, STAY, draw_fewer_examples, left_to_full
from hypothesis import given, settings
from hypothesis import strategies as st

TESTS = Path(__file__).parent


def test_the_table_names_tests_that_exist() -> None:
    for file, names in STAY.items():
        text = (TESTS / file).read_text()
        for name, ids in names.items():
            assert f"\ndef {name}(" in text, f"{file}::{name}"
            assert not ids or "parametrize" in text


def cells(*lists: list[Any], full: tuple[int, ...] = ()) -> list[pytest.Item]:
    """A matrix of the values in these lists; the cells at `full` are marked so."""
    rows: list[dict[str, Any]] = [{}]
    for number, values in enumerate(lists):
        rows = [{**row, f"p{number}": value} for row in rows for value in values]
    marks = [pytest.mark.parametrize(f"p{number}", values).mark for number, values in enumerate(lists)]

    def item(place: int, params: dict[str, Any]) -> SimpleNamespace:
        def iter_markers(name: str) -> list[Any]:
            return marks if name == "parametrize" else [name] * (place in full)

        found = SimpleNamespace(callspec=SimpleNamespace(params=params), iter_markers=iter_markers)
        found.nodeid, found.name, found.originalname = "tests/a.py::test_b[0]", "test_b[0]", "test_b"
        return found

    class Cell(SimpleNamespace):
        __hash__ = object.__hash__  # type: ignore[assignment]

    return [cast(pytest.Item, Cell(**vars(item(place, row)))) for place, row in enumerate(rows)]


def test_each_value_of_a_matrix_stays_once() -> None:
    matrix = cells([1, 2, 3], ["a", "b"], [True, False])
    left = left_to_full(matrix, whole=True)
    stay = [cast(Any, cell).callspec.params for cell in matrix if cell not in left]
    assert len(stay) == 3 and len(left) == 9
    for name, values in {"p0": {1, 2, 3}, "p1": {"a", "b"}, "p2": {True, False}}.items():
        assert {row[name] for row in stay} == values


def test_a_list_of_cases_stays_whole() -> None:
    assert left_to_full(cells([1, 2, 3, 4]), whole=True) == []


def test_cells_that_are_marked_count_for_nothing() -> None:
    matrix = cells([1, 2], ["a", "b"], full=(0, 3))
    assert left_to_full(matrix, whole=True) == []


def test_an_id_that_no_cell_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAY, "a.py", {"test_b": ["0", "1"]})
    with pytest.raises(pytest.UsageError, match=r"a.py::test_b has no cell \['1'\]"):
        left_to_full(cells([1]), whole=True)
    assert left_to_full(cells([1]), whole=False) == []


def test_hypothesis_draws_fewer_examples() -> None:
    drawn = []

    @settings(max_examples=20 * SHARE_OF_EXAMPLES, database=None)
    @given(number=st.integers())
    def draws(number: int) -> None:
        drawn.append(number)

    def plain() -> None:
        """It has no settings."""

    draw_fewer_examples([cast(pytest.Item, SimpleNamespace(function=each)) for each in (draws, plain, draws)])
    draws()
    assert len(drawn) == 20
