"""Places: where each run of tokens occurs in a text that grows. Answers: the same of earlier answers.

Finds equal runs; guesses nothing. Needs no torch.
"""

from __future__ import annotations

from array import array
from collections import deque

_BYTES = 4  # of a token
_END = -1  # between two answers
MOST_TOKENS = 2**19  # of earlier answers, whatever their number


class Places:
    """The tokens of a text, and for each run of `width` tokens the places where it ends.

    Adding a token takes one look into a table of hashes. A place is the index of the last token of a run.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.ids: array[int] = array("i")
        self._last: dict[bytes, int] = {}  # the last place of each run
        self._before: array[int] = array("i")  # the place before, of the run that ends at each place; or -1

    def extend(self, new: array[int]) -> None:
        """Add tokens, int32, to the end of the text."""
        start, width = max(len(self.ids), self.width - 1), self.width
        self.ids.extend(new)
        self._before.extend([-1] * (len(self.ids) - len(self._before)))
        first = max(0, start - width + 1)
        raw, last, before = self.ids[first:].tobytes(), self._last, self._before
        size = width * _BYTES
        for place, begin in zip(range(start, len(self.ids)), range(0, len(raw), _BYTES), strict=False):
            run = raw[begin : begin + size]
            before[place] = last.get(run, -1)
            last[run] = place

    def earlier(self, most: int) -> list[int]:
        """Up to `most` places where the last run of the text ended before, the latest first."""
        return self._chain(self._before[-1] if len(self.ids) else -1, most)

    def of(self, text: Places, most: int) -> list[int]:
        """Up to `most` places here of the last run of another text of the same width, the latest first."""
        if len(text.ids) < self.width:
            return []
        return self._chain(self._last.get(text.ids[-self.width :].tobytes(), -1), most)

    def _chain(self, place: int, most: int) -> list[int]:
        found: list[int] = []
        while place >= 0 and len(found) < most:
            found.append(place)
            place = self._before[place]
        return found

    def matched(self, place: int, text: array[int], most: int) -> int:
        """How many tokens up to and including `place` equal the last tokens of `text`, at most `most`."""
        ids, count, last = self.ids, 0, len(text) - 1
        most = min(most, place + 1, last + 1)
        while count < most and ids[place - count] == text[last - count]:
            count += 1
        return count


class Answers(Places):
    """The outputs of sequences that ended, the newest `most_answers` and MOST_TOKENS of them."""

    def __init__(self, width: int, most_answers: int) -> None:
        super().__init__(width)
        self._most = most_answers
        self._outputs: deque[array[int]] = deque()

    def add(self, output: array[int]) -> None:
        """Add the output of a sequence, int32. When there are too many, the older half is forgotten."""
        if not self._most or len(output) < self.width:
            return
        self._outputs.append(output)
        if len(self._outputs) <= self._most and len(self.ids) + len(output) <= MOST_TOKENS:
            self.extend(output + array("i", [_END]))
            return
        self._keep_newest()

    def _keep_newest(self) -> None:
        """Begin again with the newer half of what fits."""
        kept, total = 0, 0
        for output in reversed(self._outputs):
            if kept and (kept >= (self._most + 1) // 2 or total + len(output) > MOST_TOKENS // 2):
                break
            kept, total = kept + 1, total + len(output) + 1
        newest = [*self._outputs][len(self._outputs) - kept :]
        super().__init__(self.width)
        self._outputs = deque(newest)
        for output in newest:
            self.extend(output + array("i", [_END]))
