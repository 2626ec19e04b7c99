"""Batches of Ray Data: their columns as lists, and the same batch with more columns.

A batch is a dictionary of NumPy arrays or lists, a pandas DataFrame or an Arrow table. Arrow alone keeps the
types and the nulls of all columns. Imports neither pandas, Arrow nor Ray, and knows nothing of answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from typing import Any, NamedTuple

import numpy as np

_EXACT = 2**53  # integers below it are exact in a float
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
# Of units of NumPy's dates and durations that have a fixed length; others are years and months.
_PICOSECONDS = {"W": 604_800 * 10**12, "D": 86_400 * 10**12, "h": 3_600 * 10**12, "m": 60 * 10**12}
_PICOSECONDS |= {"s": 10**12, "ms": 10**9, "us": 10**6, "ns": 10**3, "ps": 1}


class Column(NamedTuple):
    """A column to add: its values, and its type: "string" or "int64", within `depth` lists."""

    values: list[Any]
    kind: str
    depth: int = 0


class Batch(NamedTuple):
    """A batch in one form."""

    names: list[str]  # of its columns
    values: Callable[[str], list[Any]]  # of a column: Python's own, None for a null
    ids: Callable[[str], list[str]]  # the texts of a column of ids, equal for equal ids
    extended: Callable[[Mapping[str, Column]], Any]  # the batch with more columns; all others as they are


def open_batch(batch: Any) -> Batch:
    """The batch in one form. TypeError for anything else."""
    if isinstance(batch, Mapping):
        return _of_values(batch)
    for kind in type(batch).__mro__:
        found = kind.__module__.split(".")[0], kind.__name__
        if found == ("pandas", "DataFrame"):
            return _of_values(batch, sys.modules["pandas"])
        if found == ("pyarrow", "Table"):
            return _of_arrow(batch, sys.modules["pyarrow"])
    raise TypeError(
        "a batch must be a dictionary of NumPy arrays, a pandas DataFrame or an Arrow table, as map_batches "
        f"gives it with batch_format='numpy', 'pandas' or 'pyarrow', not {type(batch).__name__}"
    )


def _of_values(batch: Any, pandas: Any = None) -> Batch:
    """A dictionary of arrays, or a DataFrame of `pandas`."""

    def extended(columns: Mapping[str, Column]) -> Any:
        arrays = {name: _array(column) for name, column in columns.items()}
        if pandas is None:
            return {**batch, **arrays}
        return batch.assign(**{name: pandas.Series(each, batch.index) for name, each in arrays.items()})

    return Batch(
        list(batch),
        lambda name: [_plain(value) for value in batch[name]],
        lambda name: [_id(value, name) for value in batch[name]],
        extended,
    )


def _of_arrow(batch: Any, arrow: Any) -> Batch:
    def ids(name: str) -> list[str]:
        column, types = batch.column(name), arrow.types
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if types.is_timestamp(column.type) or types.is_date(column.type) or types.is_duration(column.type):
            return [_id(value, name) for value in column.to_numpy()]  # to_pylist cannot read nanoseconds
        return [_id(value, None) for value in column.to_pylist()]

    def extended(columns: Mapping[str, Column]) -> Any:
        made = batch
        for name, column in columns.items():
            kind = getattr(arrow, column.kind)()
            for _ in range(column.depth):
                kind = arrow.list_(kind)
            made = made.append_column(name, arrow.array(column.values, kind))
        return made

    return Batch(batch.schema.names, lambda name: batch.column(name).to_pylist(), ids, extended)


def _array(column: Column) -> np.ndarray[Any, Any]:
    """Integers as such; all else as an array of objects, even if all lists have the same length."""
    if column.kind == "int64" and not column.depth:
        return np.array(column.values, np.int64)
    array = np.empty(len(column.values), object)
    array[:] = column.values
    return array


def _is_null(value: Any) -> bool:
    """Whether it stands for no value: None, NaN, and pandas' and NumPy's NA and NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, (float, np.floating, np.datetime64, np.timedelta64)) and bool(value != value)


def _plain(value: Any) -> Any:
    """A value without NumPy, at any depth."""
    if _is_null(value):
        return None
    if isinstance(value, (np.ndarray, list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _id(value: Any, inexact: str | None) -> str:
    """The text of an id: the same for one value in any kind of batch.

    inexact: the name of a column whose floats may be integers that were rounded, beside a null; ValueError if
    one is that large. None: floats are floats.
    """
    if _is_null(value):
        return "None"
    if isinstance(value, (np.datetime64, np.timedelta64)):
        unit, count = np.datetime_data(value.dtype)
        kind = "time" if isinstance(value, np.datetime64) else "duration"
        if unit not in _PICOSECONDS:  # years or months
            return str(value)
        return f"{kind} {int(value.astype(np.int64)) * count * _PICOSECONDS[unit]}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        if inexact is not None and abs(value) >= _EXACT:
            raise ValueError(
                f"the id {value:.0f} in column {inexact!r} is a float, which may stand for several integers "
                "of the dataset; call map_batches with batch_format='pyarrow'"
            )
        return str(int(value))
    if isinstance(value, timedelta):
        exact = timedelta(value.days, value.seconds, value.microseconds)
        return f"duration {exact // _MICROSECOND * 10**6 + getattr(value, 'nanoseconds', 0) * 10**3}"
    if isinstance(value, date):
        return f"time {_since_epoch(value) // _MICROSECOND * 10**6 + getattr(value, 'nanosecond', 0) * 10**3}"
    if isinstance(value, Mapping):
        parts = [f"{name!r}: {_id(each, inexact)}" for name, each in value.items()]
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, (np.ndarray, Sequence)) and not isinstance(value, (str, bytes)):
        return f"[{', '.join(_id(each, inexact) for each in value)}]"
    return str(value)


def _since_epoch(value: Any) -> timedelta:
    """The time since 1970 of Python's date or time, or pandas' in microseconds; without a zone, in UTC."""
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    elif hasattr(value, "to_pydatetime"):
        value = value.to_pydatetime(warn=False)
    return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)) - _EPOCH
