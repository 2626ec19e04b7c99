"""Values made of columns, declared once for the host's arrays and the device's tensors.

Such a value is a frozen dataclass over A, the type of its arrays. Each field is a column, declared as
`Annotated[A, Column(...)]`, another such value, a tuple of them, or plain data. The class must not have
slots, because calling an alias such as `Filters` sets an attribute. Knows no particular column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class StepSize:
    """The dimensions of a step's columns, padding included."""

    tokens: int
    seqs: int
    blocks: int  # width of a block table
    unit: int  # sequences in a group that reads a shared prefix once


@dataclass(frozen=True, slots=True)
class Column:
    """A column's dtype, its padded shape in a step of a given size, and its padding value."""

    dtype: type[np.generic]
    shape: Callable[[StepSize], tuple[int, ...]]
    padding: int = 0


def all_columns(hint: Any) -> list[Column]:
    """Every column that a type declares, including those of optional parts."""
    found = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Column)]
    return found or [column for columns in _fields(hint).values() for column in columns]


def map_columns(value: Any, convert: Callable[[Column, Any], Any]) -> Any:
    """Return `value` with `convert(column, array)` for each of its arrays, in the order of declaration."""
    fields: dict[str, Any] = {}
    kind: Any = type(value)
    for name, columns in _fields(kind).items():
        field = fields[name] = getattr(value, name)
        if not columns or field is None:
            continue
        if isinstance(field, tuple):
            fields[name] = tuple([map_columns(each, convert) for each in field])
        elif is_dataclass(field):
            fields[name] = map_columns(field, convert)
        else:
            fields[name] = convert(columns[0], field)
    return kind(**fields)


@cache
def _fields(hint: Any) -> dict[str, list[Column]]:
    """The columns of each field of a dataclass, or of each argument of another type."""
    kind = get_origin(hint) or hint
    if is_dataclass(kind):
        inner = get_type_hints(kind, include_extras=True)
    else:
        inner = {str(index): each for index, each in enumerate(get_args(hint))}
    return {name: all_columns(each) for name, each in inner.items()}
