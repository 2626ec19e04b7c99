"""Texts: a long list of strings as prompts, each of which is made when it is looked at.

Checks all strings at once, and tokenises none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, overload

from nanovllm.text.prompts import Prompt

_CHECKED = 2**14  # strings that are encoded at once


class Late(Sequence[Prompt]):
    """Prompts of a list, each of which is made when it is looked at."""

    @overload
    def __getitem__(self, row: int) -> Prompt: ...

    @overload
    def __getitem__(self, row: slice) -> list[Prompt]: ...

    def __getitem__(self, row: int | slice) -> Prompt | list[Prompt]:
        rows = range(len(self))[row]
        return self._prompt(rows) if isinstance(rows, int) else [self._prompt(each) for each in rows]

    @abstractmethod
    def _prompt(self, row: int) -> Prompt: ...


class Texts(Late):
    """The `Prompt`s of strings, none of them empty or with half of a surrogate pair."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    @staticmethod
    def of(prompts: Any) -> Texts | None:
        """A list of valid strings as prompts; None if any of it needs a closer look."""
        texts = list(prompts)
        if not all(texts) or set(map(type, texts)) != {str}:
            return None
        for first in range(0, len(texts), _CHECKED):
            try:
                "".join(texts[first : first + _CHECKED]).encode()
            except UnicodeEncodeError:
                return None
        # Two halves of a pair in neighbouring strings are no character, so no string has one.
        return Texts(texts)

    def __len__(self) -> int:
        return len(self.texts)

    def _prompt(self, row: int) -> Prompt:
        return Prompt(self.texts[row], None, where=f"prompts[{row}]")
