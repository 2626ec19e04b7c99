"""What a kernel has for each kind of something: an activation, a dtype, an instruction set. Never guesses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Kinds(dict[K, V]):
    """A table by kind, whose `[kind]` is a ValueError that names an unknown kind.

    Every choice by kind is such a table, or a chain of comparisons that ends in `raise unknown(...)`: an
    unknown kind must never pass for a known one.
    """

    def __init__(self, what: str, values: Mapping[K, V]) -> None:
        """what: of what these are the kinds, for the error."""
        super().__init__(values)
        self.what = what

    def __missing__(self, kind: K) -> V:
        raise unknown(self.what, kind, self)


def unknown(what: str, kind: object, known: Mapping[K, V] | None = None) -> ValueError:
    """The error of code that has nothing for a kind."""
    listed = f"; known here: {', '.join(map(repr, known))}" if known else ""
    return ValueError(
        f"no code here for the {what} {kind!r}{listed}; docs/adding.md, 'Kinds', names each place "
        "that a new kind needs"
    )
