"""What quantisations read in config.json in the same way. Every error says where. Opens no file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def check_choices(where: str, stated: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    """ValueError unless each key has one of its supported values; None: it may be absent."""
    for key, values in supported.items():
        if stated.get(key) not in values:
            names = ", ".join(repr(value) for value in values if value is not None)
            raise ValueError(f"{where}: {key} {stated.get(key)!r} is not supported; supported: {names}")


def names_of(where: str, value: Any, what: str = "a list of names") -> tuple[str, ...]:
    """The names of modules that a key has as its value. ValueError for anything but a list of strings."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where} must be {what}, not {value!r}")
    return tuple(value)


def check_expressions(where: str, expressions: Iterable[str], prefix: str = "") -> None:
    """ValueError for the first that is no regular expression behind the prefix."""
    for each in expressions:
        try:
            re.compile(each.removeprefix(prefix))
        except re.error as error:
            raise ValueError(f"{where}: {each!r} is no regular expression: {error}") from None
