"""Token rules: which tokens may follow the output of a sequence, as bits.

A rule belongs to one sequence. Knows neither texts nor logits; who applies the bits is the device's side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

ALL_TOKENS = -1  # a word of bits that allows all of its 32 tokens


class TokenRule(Protocol):
    """What may follow the output of one sequence."""

    def restrict(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        """Clear in `bits` what may not follow `token_ids`, whose output begins at `start`.

        bits: [ceil(V / 32)] int32; bit i % 32 of word i // 32 is token i.
        """


class TokenSet:
    """Token ids as the words of bits that hold any of them."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        ids = np.fromiter(token_ids, np.int64)
        is_in = np.zeros(32 * (1 + int(ids.max(initial=-1)) // 32), np.bool_)
        is_in[ids] = True
        bits = np.packbits(is_in, bitorder="little").view(np.int32)
        self._words = np.flatnonzero(bits)
        self._bits = bits[self._words]

    def add_to(self, bits: np.ndarray) -> None:
        bits[self._words] |= self._bits

    def take_from(self, bits: np.ndarray) -> None:
        bits[self._words] &= ~self._bits


class AllowedTokens:
    """Nothing but some tokens, at any place."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._allowed = TokenSet(token_ids)
        self._mask: np.ndarray | None = None  # as long as the bits

    def restrict(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        if self._mask is None:
            self._mask = np.zeros_like(bits)
            self._allowed.add_to(self._mask)
        bits &= self._mask


class MinTokens:
    """No token that ends the output before it has `min_tokens` others."""

    def __init__(self, min_tokens: int, stop_ids: Iterable[int]) -> None:
        self._min_tokens = min_tokens
        self._stops = TokenSet(stop_ids)

    def restrict(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        if len(token_ids) - start < self._min_tokens:
            self._stops.take_from(bits)


class BadWords:
    """No word, a sequence of tokens, anywhere in the output: its last token may not follow the others."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: none of them empty."""
        lasts: dict[tuple[int, ...], list[int]] = {}  # by the tokens before
        for word in words:
            *before, last = word
            lasts.setdefault(tuple(before), []).append(last)
        self._lasts = {before: TokenSet(ids) for before, ids in lasts.items()}
        self._lengths = sorted({len(before) for before in lasts})

    def restrict(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        for length in self._lengths:
            begin = len(token_ids) - length
            if begin < start:
                break
            lasts = self._lasts.get(tuple(token_ids[begin:]))
            if lasts is not None:
                lasts.take_from(bits)


class Matchers(Protocol):
    """Makes the matchers of one grammar, each at its beginning, with a mask as long as the rows of bits."""

    executor: LLExecutor  # works on many matchers side by side

    def new(self) -> LLMatcher:
        """A matcher for one output; it may share memory, and thus limits, with others."""

    def alone(self) -> LLMatcher:
        """One that shares nothing."""


class Grammar:
    """A text of a given form, such as a JSON schema's, followed by a token that ends the output.

    Where the text may end, all stop tokens are allowed; where it must end, nothing else is. When llguidance
    gives up, as a state grows beyond its limits, no token is allowed.
    """

    def __init__(self, matchers: Matchers, stop_ids: Iterable[int]) -> None:
        """stop_ids: all that end the output, those of the matchers' tokenizer included."""
        self.executor = matchers.executor
        self._matchers = matchers
        self._matcher: LLMatcher | None = None  # made when the sequence begins
        self._stops = TokenSet(stop_ids)
        self._num_consumed = 0
        self._may_end = False

    def advance(self, token_ids: Sequence[int], start: int) -> tuple[LLMatcher, list[int]]:
        """Take in the new tokens of an output that begins at `start`, all but the last.

        Returns the matcher, and that last one for it to consume, if there is a new one.
        """
        if self._matcher is None:
            self._matcher = self._matchers.new()
        new = list(token_ids[start + self._num_consumed :])
        self._num_consumed += len(new)
        if len(new) > 1:
            self._matcher.consume_tokens(new[:-1])
        return self._matcher, new[-1:]

    def complete(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        """Bring the mask that the matcher has computed in line with the request's stop tokens."""
        assert self._matcher is not None
        if self._matcher.is_error():  # perhaps at a limit that others have used up
            self._matcher = self._matchers.alone()
            self._matcher.consume_tokens(list(token_ids[start:]))
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._may_end = self._matcher.is_accepting()
        if self._may_end:
            self._stops.add_to(bits)
        elif self._matcher.is_error():
            bits[:] = 0

    def end(self, bits: np.ndarray) -> None:
        """Let the output end where it may and other rules have left nothing."""
        if self._may_end and not bits.any():
            self._stops.add_to(bits)


Rule = TokenRule | Grammar


class RuledRow(NamedTuple):
    """A sequence with rules, and its row of bits."""

    row: int
    rules: Sequence[Rule]  # at most one grammar
    token_ids: Sequence[int]  # all known ones; from call to call they grow by tokens that were allowed
    start: int  # where the output begins


def restrict_all(rows: Sequence[RuledRow], bits: np.ndarray) -> None:
    """Fill a row of bits for each sequence: what all of its rules allow.

    bits: [M, ceil(V / 32)] int32, contiguous; rows that are not named stay as they are. A row may be left
    without any token, as when allowed tokens are bad words; but a `Grammar` whose text is complete always
    lets the output end.
    """
    assert bits.flags.c_contiguous and bits.dtype == np.int32
    grammars: list[tuple[RuledRow, Grammar, LLMatcher, list[int]]] = []
    for each in rows:
        grammar = next((rule for rule in each.rules if isinstance(rule, Grammar)), None)
        if grammar is None:
            bits[each.row] = ALL_TOKENS
        else:
            grammars.append((each, grammar, *grammar.advance(each.token_ids, each.start)))
    if grammars:
        executor = grammars[0][1].executor
        drawn = [(matcher, new[0]) for *_, matcher, new in grammars if new]
        if drawn:
            executor.consume_token_par(drawn)
        matchers = [(matcher, each.row) for each, _, matcher, _ in grammars]
        executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))
        for each, grammar, *_ in grammars:
            grammar.complete(bits[each.row], each.token_ids, each.start)
    for each in rows:
        for rule in each.rules:
            if not isinstance(rule, Grammar):
                rule.restrict(bits[each.row], each.token_ids, each.start)
    for each, grammar, *_ in grammars:
        grammar.end(bits[each.row])
