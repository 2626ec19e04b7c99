"""StopStrings: finds the first stop string in the text of one completion, token by token.

Decodes each token once, reads each character once, however many stop strings there are, and ends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nanovllm.text.detokenizer import TextStream


class StopSearch:
    """The search for some stop strings, for any number of texts: the automaton of Aho and Corasick (1975).

    A state is the longest end of the text so far that begins a stop string, or is one. State 0 is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings; the list may be empty."""
        self.stops = tuple(stops)
        self._longer: list[dict[str, int]] = [{}]  # the states with one more character
        ends: dict[int, int] = {}  # the first stop string that each state is, by index
        for index, stop in enumerate(stops):
            state = 0
            for letter in stop:
                state = self._longer[state].setdefault(letter, len(self._longer))
                if state == len(self._longer):
                    self._longer.append({})
            ends.setdefault(state, index)
        self.shorter = [0] * len(self._longer)  # the longest end of each state that is another state
        self._found = [ends.get(state, -1) for state in range(len(self._longer))]
        self.num_held = [0] * len(self._longer)  # characters of each state that may begin a stop string
        layer, length = [0], 0
        while layer := [child for state in layer for child in self._finish(state)]:
            length += 1
            for state in layer:
                has_longer = bool(self._longer[state])
                self.num_held[state] = length if has_longer else self.num_held[self.shorter[state]]

    def _finish(self, state: int) -> Iterable[int]:
        """Compute, for the states with one more character, what follows from shorter states; return them."""
        for letter, longer in self._longer[state].items():
            shorter = self.after(self.shorter[state], letter) if state else 0
            self.shorter[longer] = shorter
            found = [index for index in (self._found[longer], self._found[shorter]) if index >= 0]
            self._found[longer] = min(found, default=-1)
        return self._longer[state].values()

    def after(self, state: int, letter: str) -> int:
        """The state after the next character."""
        while letter not in self._longer[state]:
            if not state:
                return 0
            state = self.shorter[state]
        return self._longer[state][letter]

    def found(self, state: int) -> str | None:
        """The stop string that ends where the text ends; of several, the first one in the list."""
        index = self._found[state]
        return None if index < 0 else self.stops[index]


class StopStrings:
    """The text of one completion, searched for the stop strings of its request.

    The match that ends first counts; if several end at the same character, the first one in the list.
    """

    def __init__(self, search: StopSearch, stream: TextStream, min_tokens: int = 0) -> None:
        """min_tokens: matches that end within this number of tokens do not count."""
        self.search = search
        self._state = 0  # of the search, after all text so far
        self._min_tokens = min_tokens
        self._stream = stream
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
        if not self.search.stops:
            return False
        for position, letter in enumerate(new, 1):
            self._state = self.search.after(self._state, letter)
            found = self.search.found(self._state)
            if found is not None and self.num_tokens > self._min_tokens:
                self.found, self._end = found, len(new) - position
                return True
        return False

    def take(self) -> str:
        """Return the new text since the last call. Text that may be the beginning of a stop string is held
        back, because it may be cut off later."""
        text = self._held + "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        end = len(text) - self.search.num_held[self._state]
        self._held = text[end:]
        return text[:end]

    def text(self, include: bool) -> str:
        """Return the text before the stop string that was found. include: with the stop string."""
        assert self.found is not None
        text = "".join(self._parts)
        return text[: len(text) - self._end - (0 if include else len(self.found))]
