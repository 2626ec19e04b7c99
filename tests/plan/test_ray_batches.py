"""Batches of Ray Data, without Ray: columns that stay as they are, ids that have one text in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from arrow_columns import every_type

from nanovllm.integrations.ray_batches import Column, open_batch

TABLE = every_type()
ADDED = {
    "text": Column(["a", "b", "c"], "string"),
    "tokens": Column([[1], [], [2, 3]], "int64", 1),
    "several": Column([[[1], [2]], [[], []], [[3], [4]]], "int64", 2),
    "number": Column([7, 8, 9], "int64"),
}
TYPES = [pa.string(), pa.list_(pa.int64()), pa.list_(pa.list_(pa.int64())), pa.int64()]


def numpy_of(table: pa.Table) -> dict[str, Any]:
    return {name: table.column(name).to_numpy() for name in table.schema.names}


KINDS: dict[str, Callable[[pa.Table], Any]] = {
    "numpy": numpy_of,
    "pandas": lambda table: table.to_pandas(),
    "pandas with its own types": lambda table: table.to_pandas(types_mapper=pd.ArrowDtype),
    "arrow": lambda table: table,
}
# What they make of a column is no longer the value: Arrow's NumPy arrays have another word for a null.
UNLIKE = {("numpy", "dictionary"), *((kind, "extension") for kind in ("numpy", "pandas"))}
ROUNDED = {(kind, name) for kind in ("numpy", "pandas") for name in ("int64", "uint64", "struct")}


def ids_of(batch: Any, name: str) -> list[str] | None:
    """None if they are refused."""
    try:
        return open_batch(batch).ids(name)
    except ValueError:
        return None


@pytest.mark.parametrize("num_rows", [3, 0])
def test_an_arrow_table_keeps_types_values_nulls_and_metadata(num_rows: int) -> None:
    columns = {name: Column(each.values[:num_rows], each.kind, each.depth) for name, each in ADDED.items()}
    made = open_batch(TABLE.slice(0, num_rows)).extended(columns)
    assert made.schema.names == [*TABLE.schema.names, *ADDED]
    assert made.select(TABLE.schema.names).equals(TABLE.slice(0, num_rows), check_metadata=True)
    assert [made.schema.field(name).type for name in ADDED] == TYPES
    assert [made.column(name).to_pylist() for name in ADDED] == [each.values for each in columns.values()]


def test_other_kinds_keep_their_columns() -> None:
    arrays = numpy_of(TABLE)
    made = open_batch(arrays).extended(ADDED)
    assert all(made[name] is array for name, array in arrays.items()) and [*made] == [*arrays, *ADDED]
    assert made["number"].dtype == np.int64 and list(made["several"]) == ADDED["several"].values
    frame = TABLE.select(["int64", "string", "zoned"]).to_pandas().set_index(pd.Index([5, 3, 5]))
    made = open_batch(frame).extended(ADDED)
    pd.testing.assert_frame_equal(made[list(frame)], frame)
    assert list(made["tokens"]) == [[1], [], [2, 3]] and made["number"].dtype == np.int64


@pytest.mark.parametrize("name", TABLE.schema.names)
def test_an_id_has_the_same_text_beside_any_others(name: str) -> None:
    """A null beside it makes integers floats in NumPy and pandas, which may only be refused."""
    table = TABLE.select([name])
    texts = open_batch(table).ids(name)
    assert texts[1] == "None" and len({*texts}) == (1 if name == "null" else 3)
    for kind, made in KINDS.items():
        if (kind, name) in UNLIKE:
            continue
        for rows in (slice(0, 3), slice(0, 1), slice(2, 3), slice(1, 3)):
            some = table.slice(rows.start, rows.stop - rows.start)
            found = ids_of(made(some), name)
            if found is not None:
                assert found == texts[rows], kind
            else:
                assert (kind, name) in ROUNDED and some.column(0).null_count


@pytest.mark.parametrize("kind", KINDS)
def test_small_integers_texts_and_times_are_ids_in_every_kind(kind: str) -> None:
    table = pa.table(
        {
            "number": pa.array([5, None, 2**53 - 1]),
            "text": ["5", None, "x"],
            "time": pa.array([7, None, 0], pa.timestamp("ms", "Asia/Tokyo")),
            "day": pa.array([1, None, 0], pa.date32()),
        }
    )
    batch = open_batch(KINDS[kind](table))
    assert batch.ids("number") == ["5", "None", "9007199254740991"] and batch.ids("text") == [
        "5",
        "None",
        "x",
    ]
    assert batch.ids("time") == ["time 7000000000", "None", "time 0"]
    assert batch.ids("day") == ["time 86400000000000000", "None", "time 0"]


def test_an_id_that_numpy_may_have_rounded_is_refused() -> None:
    batch = open_batch({"id": np.array([2.0**53, np.nan])})
    with pytest.raises(ValueError, match=r"the id 9007199254740992 in column 'id' .* batch_format='pyarrow'"):
        batch.ids("id")
    assert open_batch(pa.table({"id": [2.0**53]})).ids("id") == ["9007199254740992"]


def test_values_are_pythons_own() -> None:
    nested = np.empty(3, object)
    nested[:] = [np.array([1, 2]), None, {"content": np.array([{"text": np.str_("a")}])}]
    expected = [[1, 2], None, {"content": [{"text": "a"}]}]
    assert open_batch({"x": nested}).values("x") == expected
    assert open_batch(pd.DataFrame({"x": nested})).values("x") == expected
    assert open_batch({"x": np.array([1.5, np.nan])}).values("x") == [1.5, None]
    assert open_batch(pd.DataFrame({"x": pd.array([1, pd.NA], "Int64")})).values("x") == [1, None]
    table = pa.table({"x": pa.array([["a"], None])})
    assert open_batch(table).values("x") == [["a"], None] and open_batch(table).names == ["x"]


@pytest.mark.parametrize("batch", [[{"prompt": "A"}], "text", None, np.zeros(3)])
def test_anything_else_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match=f"'numpy', 'pandas' or 'pyarrow', not {type(batch).__name__}"):
        open_batch(batch)
