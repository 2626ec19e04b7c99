"""ThinkingGate: where the text of an answer begins, for a constraint that sleeps while the model thinks.

Knows neither text nor grammars: marks are tokens here.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.reasoning.marks import Channels, Thinking
from nanovllm.reasoning.prompts import Vocabulary, begin


class ThinkingGate:
    """Follows the tokens of one answer up to its text.

    opener: the token that opens the thinking, while it may come; None once it may not.
    """

    def __init__(self, begins: tuple[int, ...], opener: int | None, is_open: bool) -> None:
        """begins: the tokens behind which the text begins. opener: the token that opens the thinking, if the
        first token decides. is_open: whether the text only begins behind `begins`."""
        self._begins, self._is_open = begins, is_open
        self.opener = None if is_open else opener
        self._num_read = 0
        self._text_start = 0  # in the output

    def text_start(self, token_ids: Sequence[int], start: int) -> int | None:
        """Where the text begins in `token_ids`, whose output begins at `start`; None while the model
        thinks."""
        num_begins = len(self._begins)
        for at in range(start + self._num_read, len(token_ids)):
            if self._is_open:
                first = at + 1 - num_begins
                if first >= start and tuple(token_ids[first : at + 1]) == self._begins:
                    self._is_open, self._text_start = False, at + 1 - start
            elif self.opener is not None:
                self._is_open, self.opener = token_ids[at] == self.opener, None
        self._num_read = len(token_ids) - start
        return None if self._is_open else start + self._text_start


def gate_of(
    family: Thinking | Channels, vocabulary: Vocabulary, prompt_ids: Sequence[int]
) -> tuple[tuple[int, ...], int | None, bool]:
    """The arguments of the gate of an answer to a prompt. ValueError if the marks are no single tokens."""
    ids = {str(mark): token_id for token_id, mark in vocabulary.mark_of.items()}
    needed = (family.channel, family.body) if isinstance(family, Channels) else (family.start, family.end)
    if missing := [mark for mark in needed if mark not in ids]:
        raise ValueError(
            "structured_outputs behind the thinking need marks that are one token, and this tokenizer has no "
            f"token {missing[0]!r}; leave out reasoning_parser, or turn thinking off"
        )
    splits = begin(family, vocabulary, prompt_ids)
    if isinstance(family, Channels):
        is_text = splits.is_text
        return vocabulary.encode(f"{family.channel}final{family.body}"), None, not is_text
    opener = None if splits.is_text else ids[family.start]
    return (ids[family.end],), opener, splits.is_open
