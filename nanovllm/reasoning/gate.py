"""ThinkingGate: where the text of an answer begins, for a constraint that sleeps while the model thinks.

Knows neither text nor grammars: marks are tokens here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from nanovllm.reasoning.marks import Channels, Thinking
from nanovllm.reasoning.prompts import Vocabulary, begin

GateArguments: TypeAlias = "tuple[tuple[int, ...], tuple[tuple[int, ...], ...], bool]"


class ThinkingGate:
    """Follows the tokens of one answer up to its text."""

    def __init__(self, begins: tuple[int, ...], opening: tuple[tuple[int, ...], ...], is_open: bool) -> None:
        """begins: the tokens behind which the text begins. opening: all ways to open the thinking, if the
        first tokens decide. is_open: whether the text only begins behind `begins`."""
        self._begins, self._is_open = begins, is_open
        self._opening = () if is_open else opening
        self._num_read = 0
        self._text_start = 0  # in the output

    @property
    def openers(self) -> tuple[int, ...]:
        """The tokens that may come now and open the thinking, or go on opening it; none once it is decided
        whether the model thinks."""
        return tuple(each[self._num_read] for each in self._opening)

    def text_start(self, token_ids: Sequence[int], start: int) -> int | None:
        """Where the text begins in `token_ids`, whose output begins at `start`; None while the model thinks,
        or has begun to open its thinking."""
        num_begins = len(self._begins)
        for at in range(start + self._num_read, len(token_ids)):
            if self._is_open:
                first = at + 1 - num_begins
                if first >= start and tuple(token_ids[first : at + 1]) == self._begins:
                    self._is_open, self._text_start = False, at + 1 - start
            elif self._opening:
                length = at + 1 - start
                left = tuple(each for each in self._opening if each[length - 1] == token_ids[at])
                self._is_open = any(len(each) == length for each in left)
                self._opening = () if self._is_open else left
            self._num_read = at + 1 - start
        is_opening = bool(self._opening) and self._num_read > 0
        return None if self._is_open or is_opening else start + self._text_start


def gate_of(family: Thinking | Channels, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> GateArguments:
    """The arguments of the gate of an answer to a prompt. ValueError if the marks are no single tokens."""
    ids = {str(mark): token_id for token_id, mark in vocabulary.mark_of.items()}
    needed = (family.start, family.end) if isinstance(family, Thinking) else (family.channel, family.body)
    if missing := [mark for mark in needed if mark and mark not in ids]:
        raise ValueError(
            "structured_outputs behind the thinking need marks that are one token, and this tokenizer has no "
            f"token {missing[0]!r}; leave out reasoning_parser, or turn thinking off"
        )
    splits = begin(family, vocabulary, prompt_ids)
    if isinstance(family, Channels):
        is_text = splits.is_text
        return vocabulary.encode(family.text), (), not is_text
    start = ids[family.start]
    ways = {(start,), (*vocabulary.encode(family.lead), start)}
    return (ids[family.end],), () if splits.is_text else tuple(sorted(ways)), splits.is_open
