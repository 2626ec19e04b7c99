"""Rows of a call, each checked on its own: a bad row is replaced by its error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

Value = TypeVar("Value")
BadRow: TypeAlias = "TypeError | ValueError"


def attempt(check: Callable[..., Value], *args: Any) -> Value | BadRow:
    """Return `check(*args)`, or the TypeError or ValueError that it raises. Values that are nested too deeply
    for Python to read or print give an error too."""
    try:
        return check(*args)
    except RecursionError:
        return ValueError("it is nested too deeply")
    except (TypeError, ValueError) as error:
        return error.with_traceback(None)  # a traceback would keep the row's values alive


def raise_first(rows: Iterable[object]) -> None:
    for row in rows:
        if isinstance(row, Exception):
            raise row
