"""Splitter: separates the thinking of an answer from its text, piece by piece. Knows no token and no
template.

A piece is a string, or a `Mark`. What `feed` and `finish` return is joined to the same two texts however an
answer is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, Protocol

from nanovllm.reasoning.marks import CallMark, Mark, Thinking


class Split(NamedTuple):
    """Two texts, or two parts of them."""

    reasoning: str
    text: str


class Begin(Enum):
    """Where an answer begins, as its prompt says."""

    OPEN = "the first piece decides: a start mark, or text"
    INSIDE = "inside the thinking"
    OUTSIDE = "behind it"


class Splits(Protocol):
    """What separates one answer."""

    @property
    def is_open(self) -> bool:
        """Whether the answer is inside its thinking."""

    @property
    def is_held(self) -> bool:
        """Whether the last pieces wait for others, which tell whether they are thinking."""

    @property
    def is_text(self) -> bool:
        """Whether what comes is text, so that no thinking can begin."""

    def feed(self, piece: str) -> Split:
        """Take the next piece; return what is certain."""

    def finish(self) -> Split:
        """Return what was held back, once, at the end of the answer."""


class _State(Enum):
    OPEN = 1  # only white space has come
    FRESH = 2  # inside the thinking; only white space has come
    INSIDE = 3
    CALL = 4  # inside, behind a mark that may begin a tool call
    CALLED = 5  # inside, behind a tool call's beginning: an end mark shows that it was a quotation
    AFTER = 6  # directly behind the end mark; newlines are dropped
    OUTSIDE = 7


class Splitter:
    """`Splits` of a family whose thinking has a start mark and an end mark.

    The thinking is the first thing of an answer. It ends by the first end mark. Without one it ends by the
    first tool call that begins inside, which is known at the end of the answer alone. One newline behind the
    start mark is dropped, and two behind the end mark. A second start mark directly behind the first one is
    dropped, and so is a second end mark. Later marks are text. An answer that ends inside is thinking alone.
    """

    def __init__(self, family: Thinking, begin: Begin, searched: Iterable[str], behind: str = "") -> None:
        """searched: the marks that plain text is searched for, because they are no tokens of the vocabulary.
        behind: what the prompt has behind the start mark, where an answer begins inside."""
        self._family = family
        self._searched = frozenset(searched)
        self._state = {Begin.OPEN: _State.OPEN, Begin.INSIDE: _State.FRESH, Begin.OUTSIDE: _State.OUTSIDE}[
            begin
        ]
        self._held = ""  # the end of the text so far, which may begin a mark
        self._space = ""  # what OPEN, FRESH, CALL and CALLED hold back
        self._label = family.label.removeprefix(behind)  # that has not come yet
        if behind and not family.label.startswith(behind):
            self._label = ""
        self._newlines = 0 if behind else 1  # that may still be dropped
        self._calls: tuple[CallMark, ...] = ()  # the calls that may begin, in CALL
        self._out: list[tuple[bool, str]] = []  # (whether it is thinking, text)

    @property
    def is_open(self) -> bool:
        return self._state in (_State.FRESH, _State.INSIDE, _State.CALL)

    @property
    def is_held(self) -> bool:
        return self._state in (_State.CALL, _State.CALLED)

    @property
    def is_text(self) -> bool:
        return self._state in (_State.AFTER, _State.OUTSIDE)

    def feed(self, piece: str) -> Split:
        if not self._held and type(piece) is str:  # most pieces, at once
            if self._state is _State.OUTSIDE:
                return Split("", piece)
            if self._state is _State.INSIDE and not self._searched:
                return Split(piece, "")
        if isinstance(piece, Mark):
            self._drain(final=True)  # a mark by id never continues characters
            self._mark(piece)
        else:
            self._held += piece
            self._drain(final=False)
        return self._taken()

    def finish(self) -> Split:
        self._drain(final=True)
        if self._state is _State.FRESH:
            self._think(self._space)
        else:
            self._emit(self._state is _State.CALL, self._space)
        self._space = ""
        return self._taken()

    def _taken(self) -> Split:
        thought = "".join(text for is_thinking, text in self._out if is_thinking)
        found = Split(thought, "".join(text for is_thinking, text in self._out if not is_thinking))
        self._out.clear()
        return found

    def _drain(self, final: bool) -> None:
        """Process the held text; unless `final`, all but an end that may begin a mark."""
        while self._held:
            marks = self._wanted()
            at, mark = first_of(self._held, marks)
            if mark is None:
                kept = 0 if final else num_held(self._held, marks)
                new, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
                self._text(new)
                return
            new, self._held = self._held[:at], self._held[at + len(mark) :]
            self._text(new)
            if mark in self._wanted():
                self._mark(mark)
            else:  # the text before it has changed the state
                self._held = mark + self._held

    def _wanted(self) -> set[str]:
        """The marks that count now and are searched for in text."""
        family, state = self._family, self._state
        if state is _State.OPEN:
            wanted = {family.start, family.end}
        elif state is _State.FRESH:
            wanted = {family.start, family.end, *(call.mark for call in family.calls)}
        elif state in (_State.INSIDE, _State.CALL):
            wanted = {family.end, *(call.mark for call in family.calls)}
        elif state is _State.CALLED:
            wanted = {family.end}
        elif state is _State.AFTER:
            wanted = {family.end} if self._newlines == 2 else set()
        else:
            assert state is _State.OUTSIDE
            wanted = set()
        return wanted & self._searched

    def _mark(self, mark: str) -> None:
        family, state = self._family, self._state
        calls = tuple(call for call in family.calls if call.mark == mark)
        if state is _State.CALL:  # no call began
            self._emit(True, self._space)
            self._space, self._state = "", _State.INSIDE
            self._mark(mark)
        elif mark == family.end and state is _State.CALLED:
            self._emit(True, self._space)
            self._space, self._newlines, self._state = "", 2, _State.AFTER
        elif mark == family.start and state in (_State.OPEN, _State.FRESH):
            self._space, self._newlines, self._state, self._label = "", 1, _State.FRESH, family.label
        elif mark == family.end and state in (_State.OPEN, _State.FRESH, _State.INSIDE):
            if state is _State.FRESH:
                self._think(self._space)
            self._space, self._newlines, self._state = "", 2, _State.AFTER
        elif mark == family.end and state is _State.AFTER and self._newlines == 2:
            pass
        elif calls and state in (_State.FRESH, _State.INSIDE):
            if state is _State.FRESH:
                self._think(self._space)
            self._space, self._calls, self._state = mark, calls, _State.CALL
            self._text("")
        else:
            self._text(mark)

    def _text(self, new: str) -> None:
        """Text without a mark that counts."""
        if self._state is _State.OPEN:
            self._space += new
            if self._space.strip():
                self._emit(False, self._space)
                self._space, self._state = "", _State.OUTSIDE
        elif self._state is _State.FRESH:
            self._space += new
            if self._label and self._label.startswith(self._space):
                return  # a part of the label, which may be all of it
            if self._space.strip():
                self._think(self._space)
                self._space, self._state = "", _State.INSIDE
        elif self._state is _State.INSIDE:
            self._emit(True, new)
        elif self._state is _State.CALL:
            self._space += new
            self._decide_call()
        elif self._state is _State.CALLED:
            self._space += new
        elif self._state is _State.AFTER:
            while self._newlines and new.startswith("\n"):
                new, self._newlines = new[1:], self._newlines - 1
            if new:
                self._emit(False, new)
                self._state = _State.OUTSIDE
        else:
            self._emit(False, new)

    def _think(self, text: str) -> None:
        """The beginning of the thinking, without its label and newline."""
        if self._label:
            if text.startswith(self._label):
                text = text[len(self._label) :]
                self._newlines = 0  # the label ends with it
            elif self._label.startswith(text):
                text = ""  # a part of the mark
            self._label = ""
        if self._newlines and text.startswith("\n"):
            text = text[1:]
        self._newlines = 0
        self._emit(True, text)

    def _decide_call(self) -> None:
        """In CALL: whether the held text is the beginning of a call, no call, or not known yet."""
        for call in self._calls:
            rest = self._space[len(call.mark) :].lstrip()
            if rest.startswith(call.follows):
                self._state = _State.CALLED
                return
        if not any(call.follows.startswith(self._space[len(call.mark) :].lstrip()) for call in self._calls):
            self._emit(True, self._space)
            self._space, self._state = "", _State.INSIDE

    def _emit(self, is_thinking: bool, text: str) -> None:
        if text:
            self._out.append((is_thinking, text))


def first_of(text: str, marks: Iterable[str]) -> tuple[int, str | None]:
    """Where the first mark begins in a text, and which one; of two at one place the longer. None if none."""
    found = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
    if not found:
        return len(text), None
    at, _, mark = min(found)
    return at, mark


def num_held(text: str, marks: Iterable[str]) -> int:
    """The characters at the end of a text that are a proper beginning of a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest
