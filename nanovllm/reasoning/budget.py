"""ThinkingBudget: a token rule that closes the thinking of an answer after a number of tokens.

Knows neither text nor logits: marks are tokens here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nanovllm.reasoning.marks import Channels, Thinking
from nanovllm.reasoning.prompts import Vocabulary

_BITS = 32
RECHECKED = 32  # tokens between the places at which a block is closed that is opened when nothing is left


class BudgetMarks(NamedTuple):
    """The tokens that a budget looks for and writes.

    start, ends: what begins the thinking, and the single tokens that end it. calls: tokens that begin a tool
    call, which ends the count. closing: what is written when the budget is spent; it holds one of `ends`.
    num_label: tokens of a label behind `start`, which do not count.
    """

    start: tuple[int, ...]
    ends: frozenset[int]
    calls: frozenset[int]
    closing: tuple[int, ...]
    num_label: int = 0


def budget_marks(family: Thinking | Channels, vocabulary: Vocabulary) -> BudgetMarks:
    """The tokens of a family's marks. ValueError if an end mark is no single token: then it cannot be
    recognised, however a model writes it. A start mark that is one token is recognised whatever the tokens
    of its label are."""
    ids = {str(mark): token_id for token_id, mark in vocabulary.mark_of.items()}
    ends = family.ends if isinstance(family, Channels) else (family.end,)
    if missing := [end for end in ends[:1] if end not in ids]:
        raise ValueError(
            f"thinking_token_budget needs an end mark that is one token, and this tokenizer has no token "
            f"{missing[0]!r}; leave it out, or limit the answer by max_tokens"
        )
    encode = vocabulary.encode
    if isinstance(family, Channels):
        start, closing = encode(family.thought), encode(f"{ends[0]}{family.begin}assistant{family.text}")
        return BudgetMarks(start, frozenset(ids[end] for end in ends if end in ids), frozenset(), closing)
    calls = frozenset(ids[call.mark] for call in family.calls if call.mark in ids)
    closing = encode(family.end if family.label else f"\n{family.end}\n\n")
    whole = encode(family.start + family.label)
    start = (ids[family.start],) if family.start in ids else whole
    return BudgetMarks(start, frozenset([ids[family.end]]), calls, closing, len(whole) - len(start))


class ThinkingBudget:
    """Closes the thinking of one answer once it has `budget` tokens, without its marks.

    It counts the tokens of all blocks of thinking. A block that the model opens when nothing is left is
    closed at one of few places, so that steps between them need no mask. Tokens of the closing that are being
    written do not count. A tool call that begins inside, and an end mark that the model writes itself, end
    the block.
    """

    def __init__(self, marks: BudgetMarks, budget: int, is_open: bool) -> None:
        """budget: tokens, at least 0. is_open: whether the prompt ends inside the thinking."""
        self._marks, self._budget, self._is_open = marks, budget, is_open
        self._has_begun = is_open
        self._is_late = False  # whether nothing was left when the block was opened
        self._spent_at = 0  # the place in the output behind the last block that was not late, and its closing
        self._count = 0
        self._label_left = 0  # tokens of a label that are still to come
        self._num_read = 0  # tokens of the output
        self._num_closed = 0  # tokens of the closing that stand at the end of the output

    def _read(self, token_ids: Sequence[int], start: int) -> None:
        """Follow the new tokens of an output that begins at `start`."""
        marks = self._marks
        for at in range(start + self._num_read, len(token_ids)):
            token_id = token_ids[at]
            if self._num_closed or (self._is_open and not self._is_late):
                self._spent_at = at + 1 - start
            if self._num_closed:  # forced tokens
                self._num_closed = (self._num_closed + 1) % len(marks.closing)
            elif self._closes_at(at - start) and token_id == marks.closing[0]:
                self._num_closed = 1 % len(marks.closing)
                self._is_open = False
            elif self._is_open:
                self._is_open = token_id not in marks.ends and token_id not in marks.calls
                if self._label_left:
                    self._label_left -= 1
                else:
                    self._count += self._is_open
            else:
                begin = at + 1 - len(marks.start)
                if begin >= start and tuple(token_ids[begin : at + 1]) == marks.start:
                    self._is_late = self._has_begun and self._count >= self._budget
                    self._is_open = self._has_begun = True
                    self._label_left = marks.num_label
        self._num_read = len(token_ids) - start

    def _closes_at(self, place: int) -> bool:
        """Whether it closes the thinking by the token at a place of the output. That follows from the tokens
        before it alone, however late they are read."""
        if self._is_late:
            return self._is_open and (place - self._spent_at) % RECHECKED == 0
        return self._is_open and self._count >= self._budget and not self._label_left

    def wakes(self, token_ids: Sequence[int], start: int) -> int:
        """The place of the first token that it may restrict, as far as `token_ids` tell; places count from
        the beginning of `token_ids`. Tokens before it need no mask, so a step may draw them as it draws
        others."""
        self._read(token_ids, start)
        left = max(self._budget - self._count, 0)
        if self._num_closed:
            return len(token_ids)
        if self._is_late if self._is_open else self._has_begun and not left:
            passed = len(token_ids) - start - self._spent_at
            return start + self._spent_at + RECHECKED * max(1, -(-passed // RECHECKED))
        if self._is_open:
            return len(token_ids) + self._label_left + left
        return len(token_ids) + len(self._marks.start) + self._marks.num_label + left

    def restrict(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        """As of the rules in `extras/token_rules.py`. Where it closes, its token is the only one that is
        allowed, whatever other rules say."""
        self._read(token_ids, start)
        if self._num_closed:
            self._force(bits, self._marks.closing[self._num_closed])
        elif self._closes_at(len(token_ids) - start):
            self._force(bits, self._marks.closing[0])

    def _force(self, bits: np.ndarray, token_id: int) -> None:
        bits[:] = 0
        bits.view(np.uint32)[token_id // _BITS] = 1 << (token_id % _BITS)
