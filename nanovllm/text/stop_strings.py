"""StopStrings: finds the first stop string in the text of one completion, token by token.

Decodes each token once, and ends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.text.detokenizer import TextStream


class StopStrings:
    """The text of one completion, searched for the stop strings of its request.

    The match that ends first counts; if several end at the same character, the first one in the list.
    """

    def __init__(self, stops: Sequence[str], stream: TextStream, min_tokens: int = 0) -> None:
        """stops: non-empty strings; the list may be empty. min_tokens: matches that end within this number of
        tokens do not count."""
        self._stops = stops
        self._min_tokens = min_tokens
        self._stream = stream
        self._num_kept = max(map(len, stops), default=1) - 1  # characters
        self._kept = ""  # the end of the text, in which a stop string may begin
        self._parts: list[str] = []
        self._num_taken = 0  # parts that `take` returned
        self._held = ""  # the end of the text that `take` holds back: a stop string may begin there
        self._end = 0  # end of the match, counted from the end of the text
        self.found: str | None = None
        self.num_tokens = 0  # up to and including the token that completed the match

    def append(self, token_id: int) -> bool:
        """Decode the next token; return whether a stop string was found. Later tokens are ignored."""
        if self.found is not None:
            return True
        self.num_tokens += 1
        new = self._stream.append(token_id)
        if not new:
            return False
        self._parts.append(new)
        text = self._kept + new
        first_end = len(text) + 1
        for stop in self._stops if self.num_tokens > self._min_tokens else ():
            start = text.find(stop, max(0, len(self._kept) - len(stop) + 1))  # it ends in the new text
            if start >= 0 and start + len(stop) < first_end:
                first_end, self.found = start + len(stop), stop
        self._end = len(text) - first_end
        self._kept = text[max(0, len(text) - self._num_kept) :]
        return self.found is not None

    def take(self) -> str:
        """Return the new text since the last call. Text that may be the beginning of a stop string is held
        back, because it may be cut off later."""
        text = self._held + "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        beginnings = [
            size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])
        ]
        end = len(text) - max(beginnings, default=0)
        self._held = text[end:]
        return text[:end]

    def text(self, include: bool) -> str:
        """Return the text before the stop string that was found. include: with the stop string."""
        assert self.found is not None
        text = "".join(self._parts)
        return text[: len(text) - self._end - (0 if include else len(self.found))]
