"""Answers: the tokens of one answer, decoded and separated, as they come or at the end. Ends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nanovllm.reasoning.marks import Mark
from nanovllm.reasoning.splitter import Split, Splits


class TextStream(Protocol):
    """Decodes an answer token by token, as `extras/stop_strings.py` does."""

    def append(self, token_id: int) -> str:
        """Take the next token; return the new whole characters."""


class CountedThinking:
    """Counts the tokens within the thinking, with its marks. Those of a tool call that ends it are none."""

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._num_held = 0
        self.number = 0

    def feed(self, piece: str, num_tokens: int = 1) -> Split:
        """Give the next piece, of some tokens, to what separates; return what that returns."""
        was_open = self._splits.is_open
        found = self._splits.feed(piece)
        if self._splits.is_held:
            self._num_held += num_tokens
        elif was_open or self._splits.is_open or self._num_held:
            self.number += self._num_held + num_tokens
            self._num_held = 0
        return found

    def finish(self) -> Split:
        """As `feed`, at the end of the answer."""
        if self._splits.is_open:  # no call has begun
            self.number += self._num_held
        self._num_held = 0
        return self._splits.finish()


class ThinkingStream:
    """A `TextStream` of the text behind the thinking, which it keeps.

    So a search for stop strings in it sees nothing of the thinking.
    """

    def __init__(
        self,
        stream_behind: Callable[[Sequence[int]], TextStream],
        prompt_ids: Sequence[int],
        splits: Splits,
        mark_of: Mapping[int, Mark],
    ) -> None:
        """stream_behind: a decoder for the tokens behind given ones; there is a new one behind each mark, so
        that bytes before a mark that are no character have no part in the text behind it. mark_of: the marks
        that are one token, by its id."""
        self._stream_behind, self._splits, self._mark_of = stream_behind, splits, mark_of
        self._counted = CountedThinking(splits)
        self._token_ids = list(prompt_ids)
        self._stream = stream_behind(prompt_ids)
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._num_taken = 0  # parts of the thinking that `take` returned

    def append(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        mark = self._mark_of.get(token_id)
        if mark is None:
            reasoning, new = self._counted.feed(self._stream.append(token_id))
        else:
            reasoning, new = self._counted.feed(mark)
            self._stream = self._stream_behind(self._token_ids)
        return self._kept(reasoning, new)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        return self._kept(*self._counted.finish())

    def _kept(self, reasoning: str, text: str) -> str:
        if reasoning:
            self._reasoning.append(reasoning)
        if text:
            self._texts.append(text)
        return text

    @property
    def is_open(self) -> bool:
        """Whether the answer is inside its thinking."""
        return self._splits.is_open

    @property
    def num_reasoning_tokens(self) -> int:
        """The tokens within the thinking so far, with its marks."""
        return self._counted.number

    @property
    def reasoning(self) -> str:
        """The thinking so far."""
        return "".join(self._reasoning)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def take(self) -> str:
        """The new thinking since the last call."""
        new = "".join(self._reasoning[self._num_taken :])
        self._num_taken = len(self._reasoning)
        return new
