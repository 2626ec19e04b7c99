"""StopStrings: the text of an output, in parts, searched for stop strings.

Decodes each token once and reads each character once, however many stop strings there are. Ends nothing and
keeps no request.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from nanovllm.answers import CompletionOutput
from nanovllm.batch import TokenEvents
from nanovllm.params import SamplingParams
from nanovllm.text.characters import CONTEXT
from nanovllm.text.detokenizer import Detokenizer


class _ByteStream:
    """A _TextStream for byte-level tokenizers, which can decode each token alone."""

    def __init__(self, detokenizer: Detokenizer, prompt_ids: Sequence[int]) -> None:
        self._bytes = detokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in detokenizer.context(prompt_ids):  # a character may begin there
            self._utf8.decode(self._bytes(token_id))
        self._continues = detokenizer.continues
        self._begins = True  # no text of the output has come yet

    def append(self, token_id: int) -> str:
        new = self._bytes(token_id)
        if new and self._begins:
            self._begins = False
            if not self._continues(token_id):
                self._utf8.reset()
        return self._utf8.decode(new)


class _WindowStream:
    """A _TextStream for all other tokenizers: decodes each token together with a few previous tokens."""

    def __init__(self, detokenizer: Detokenizer, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        # Runs of tokens that begin and end at character boundaries; only the prompt may end within one.
        self._chunks = deque([detokenizer.context(prompt_ids)], maxlen=CONTEXT)
        self._chunk: list[int] = []
        self._num_written = 0  # characters of the chunk's text
        self._before, self._context_is_cut = "", False  # what the chunks decode to
        self._begin_chunk()

    def append(self, token_id: int) -> str:
        if token_id in self._detokenizer.skipped:
            return ""
        if self._context_is_cut and not self._chunk and not self._detokenizer.continues(token_id):
            self._before = self._detokenizer.decode(self._context)
            self._context_is_cut = False
        self._chunk.append(token_id)
        text, is_cut = self._detokenizer.whole_characters(self._context + self._chunk)
        if text.startswith(self._before):
            text = text[len(self._before) :]
        else:  # the context ended with bytes that do not become a character
            text, is_cut = self._detokenizer.whole_characters(self._chunk)
        new = text[self._num_written :]
        if is_cut:
            self._num_written = len(text)
        else:
            if self._context_is_cut:
                self._chunks[-1] += self._chunk
            else:
                self._chunks.append(self._chunk)
            self._begin_chunk()
        return new

    def _begin_chunk(self) -> None:
        self._context = [token_id for chunk in self._chunks for token_id in chunk]
        self._before, self._context_is_cut = self._detokenizer.whole_characters(self._context)
        self._chunk, self._num_written = [], 0


# Decodes one output token by token: `append` takes the next token and returns the new whole characters.
# Returned characters never change later.
_TextStream: TypeAlias = _ByteStream | _WindowStream


def text_stream(detokenizer: Detokenizer, prompt_ids: Sequence[int]) -> _TextStream:
    """Return a decoder for the tokens that follow `prompt_ids`, one at a time."""
    return (_ByteStream if detokenizer.joins else _WindowStream)(detokenizer, prompt_ids)


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

    reason = "stop"  # how the completion ends, once one was found

    def __init__(self, search: StopSearch, stream: _TextStream, min_tokens: int = 0) -> None:
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

    def completion(self, params: SamplingParams, index: int, token_ids: list[int]) -> CompletionOutput:
        """Completion `index` of a request, which the stop string ends that was found."""
        text, kept = self.text(params.include_stop_str_in_output), token_ids[: self.num_tokens]
        return CompletionOutput(index, text, kept, finish_reason="stop", stop_reason=self.found)

    def append(self, token_id: int) -> bool:
        """Decode the next token; return whether a stop string was found. Later tokens are ignored."""
        if self.found is not None:
            return True
        self.num_tokens += 1
        return self.read(self._stream.append(token_id))

    def read(self, new: str) -> bool:
        """Take the new text of the last token; return whether a stop string was found."""
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

    def finish(self) -> bool:
        """At the end of the answer: return whether a stop string was found."""
        return self.found is not None

    def take(self) -> str:
        """Return the new text since the last call. Text that may be the beginning of a stop string is held
        back, because it may be cut off later."""
        text = self._held + "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        end = len(text) - self.search.num_held[self._state]
        self._held = text[end:]
        return text[:end]

    def take_reasoning(self) -> str | None:
        """The new thinking, which nobody separates here."""
        return None

    def text(self, include: bool) -> str:
        """Return the text before the stop string that was found. include: with the stop string."""
        assert self.found is not None
        text = "".join(self._parts)
        return text[: len(text) - self._end - (0 if include else len(self.found))]


def found_stops(stops: dict[int, Any], events: TokenEvents) -> dict[int, str]:
    """Decode the tokens of a step; return {sequence id: finish reason} for those that a search ends.

    stops: `StopStrings`, or what works as it, by sequence id. The token that stopped a sequence, its last
    one, is not part of its text.
    """
    found: dict[int, str] = {}
    last = {seq_id: place for place, seq_id in enumerate(events.seq_ids)}
    for place, (seq_id, token_id) in enumerate(zip(events.seq_ids, events.token_ids, strict=True)):
        stop = stops.get(seq_id)
        is_stop = events.finish_reasons.get(seq_id) == "stop" and place == last[seq_id]
        if stop is not None and not is_stop and stop.append(token_id):
            found[seq_id] = stop.reason
    return found
