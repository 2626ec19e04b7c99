"""Harmony: separates an answer of gpt-oss or Muse Glimmer, which is a list of messages. Knows no token.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
 to=self<|message|>...<|eom|><|start|>assistant to=user<|message|>...<|eot|>
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nanovllm.reasoning.marks import Channels, Mark
from nanovllm.reasoning.splitter import Split, first_of, num_held

_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_BARE = re.compile(r"\sto=[^\s<]+$")  # a header behind a message without an end
_MAY_BE_BARE = re.compile(r"\s(?:to?|to=[^\s<]*)?$")


class Harmony:
    """`Splits` of harmony. Messages in the channel analysis, or to the model itself, are thinking; others are
    text. A message to another recipient is a tool call: it stays in the text with its marks, for a parser of
    calls.

    Two messages of one part are joined by a newline. A header that is cut off is dropped. An answer that does
    not begin with a header is text. Where headers name readers, one may follow a message that has no end.
    """

    def __init__(self, marks: Channels, prompt: str, searched: Iterable[str]) -> None:
        """prompt: what stands behind the last `<|start|>` of the prompt. searched: as of a `Splitter`."""
        self._marks = marks
        self._header: str | None = ""  # of the message so far; None outside a header
        self._part: bool | None = None  # of a body: whether it is thinking; None outside a body
        self._is_call = False
        self._space = ""  # that stands between messages
        self._held = prompt
        self._searched = frozenset(marks.marks)
        self._begins: str | None = None  # what has come of an answer whose first header has no mark yet
        self._clear()
        self._drain(final=True)
        self._clear()
        self._searched &= frozenset(searched)
        seen = marks.channel or "to="
        self._begins = "" if self._header is not None and seen not in self._header else None

    def _clear(self) -> None:
        self._out: dict[bool, list[str]] = {True: [], False: []}
        self._has = {True: False, False: False}  # whether a message of this part has come

    @property
    def is_open(self) -> bool:
        return self._part is True

    @property
    def is_held(self) -> bool:
        return False

    @property
    def is_text(self) -> bool:
        return self._part is False and not self._is_call

    def feed(self, piece: str) -> Split:
        if isinstance(piece, Mark):
            self._drain(final=True, before=piece)
            self._mark(piece)
        else:
            self._held += piece
            self._drain(final=False)
        return self._taken()

    def finish(self) -> Split:
        self._drain(final=True)
        if self._begins:
            self._out[False].append(self._begins)
        self._begins = None
        return self._taken()

    def _taken(self) -> Split:
        found = Split("".join(self._out[True]), "".join(self._out[False]))
        self._out = {True: [], False: []}
        return found

    def _drain(self, final: bool, before: str = "") -> None:
        """Process the held text; unless `final`, all but an end that may begin a mark or a header. before:
        the mark behind it."""
        while self._held:
            at, mark = first_of(self._held, self._searched)
            if mark is None:
                end = len(self._held) - (0 if final else num_held(self._held, self._searched))
                if not final and self._marks.readers:
                    found = _MAY_BE_BARE.search(self._held[:end])
                    end = end if found is None else found.start()
                new, self._held = self._held[:end], self._held[end:]
                self._text(self._without_header(new, before))
                return
            new, self._held = self._held[:at], self._held[at + len(mark) :]
            self._text(self._without_header(new, mark))
            self._mark(mark)

    def _without_header(self, new: str, mark: str) -> str:
        """The text of a message before a mark; a header at its end is taken as the next message's."""
        found = _BARE.search(new) if mark == self._marks.body and self._marks.readers else None
        if found is None:
            return new
        self._text(new[: found.start()])  # which may begin a message
        if self._part is None:
            return found[0]
        self._header, self._part = found[0], None
        return ""

    def _mark(self, mark: str) -> None:
        marks, self._begins, self._space = self._marks, None, ""
        if mark == marks.begin:
            self._header, self._part = "", None
        elif mark in marks.ends:
            if self._is_call and self._part is not None:
                self._text(mark)
            self._header, self._part, self._is_call = None, None, False
        elif mark == marks.body and self._header is not None:
            self._begin_body(self._header)
        elif self._header is not None or mark == marks.channel:  # a header without its beginning
            self._header, self._part = (self._header or "") + mark, None
        else:
            self._text(mark)

    def _begin_body(self, header: str) -> None:
        marks = self._marks
        found = _RECIPIENT.search(header.replace(marks.channel, " ") if marks.channel else header)
        recipient, name, lead = None if found is None else found[1], "", f"{marks.begin}assistant"
        if marks.channel:
            channel = re.match(r"\s*\w*", header.partition(marks.channel)[2])
            name = channel[0].strip() if channel else ""
            lead = f"{marks.channel}{name}"
        elif recipient in marks.readers:
            name, recipient = recipient or "", None
        self._is_call = recipient is not None
        self._part = name == marks.thinking and recipient is None
        self._header = None
        if self._has[self._part]:
            self._out[self._part].append("\n")
        self._has[self._part] = True
        if recipient is not None:
            self._out[False].append(f"{lead} to={recipient}{marks.body}")

    def _text(self, new: str) -> None:
        if self._begins is not None:
            self._begins += new
            if not "to=".startswith(self._begins.strip()[:3]):
                new, self._begins, self._header, self._part = self._begins, None, None, False
        if self._header is not None:
            self._header += new
        elif self._part is not None:
            self._out[self._part].append(new)
        else:  # between messages, where only a mark may stand
            self._space += new
            if self._space.strip():
                self._part = False
                self._out[False].append(self._space)
