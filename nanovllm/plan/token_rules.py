"""Token rules: which tokens may follow the output of a sequence, as bits.

A rule belongs to one sequence. Knows neither texts nor logits; who applies the bits is the device's side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

ALL_TOKENS = -1  # a word of bits that allows all of its 32 tokens


class TokenRule(Protocol):
    """What may follow the output of one sequence."""

    def restrict(self, bits: np.ndarray, output_ids: Sequence[int]) -> None:
        """Clear in `bits` what may not follow `output_ids`.

        bits: [ceil(V / 32)] int32; bit i % 32 of word i // 32 is token i. output_ids: all known tokens of the
        output. From call to call they stay the same or grow by tokens that were allowed.
        """


class TokenSet:
    """Token ids as the words of bits that hold any of them."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        ids = np.unique(np.fromiter(token_ids, np.int64))
        self._words, first = np.unique(ids // 32, return_index=True)
        self._bits = (np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32)
        self._bits = np.bitwise_or.reduceat(self._bits, first) if len(ids) else self._bits

    def add_to(self, bits: np.ndarray) -> None:
        bits[self._words] |= self._bits

    def take_from(self, bits: np.ndarray) -> None:
        bits[self._words] &= ~self._bits


class AllowedTokens:
    """Nothing but some tokens, at any place."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._allowed = TokenSet(token_ids)
        self._mask: np.ndarray | None = None  # as long as the bits

    def restrict(self, bits: np.ndarray, output_ids: Sequence[int]) -> None:
        if self._mask is None:
            self._mask = np.zeros_like(bits)
            self._allowed.add_to(self._mask)
        bits &= self._mask


class MinTokens:
    """No token that ends the output before it has `min_tokens` others."""

    def __init__(self, min_tokens: int, stop_ids: Iterable[int]) -> None:
        self._min_tokens = min_tokens
        self._stops = TokenSet(stop_ids)

    def restrict(self, bits: np.ndarray, output_ids: Sequence[int]) -> None:
        if len(output_ids) < self._min_tokens:
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

    def restrict(self, bits: np.ndarray, output_ids: Sequence[int]) -> None:
        for length in self._lengths:
            start = len(output_ids) - length
            if start < 0:
                break
            lasts = self._lasts.get(tuple(output_ids[start:]))
            if lasts is not None:
                lasts.take_from(bits)


class Grammar:
    """A text of a given form, such as a JSON schema's, followed by a token that ends the output.

    Where the text may end, all stop tokens are allowed; where it must end, nothing else is. When llguidance
    gives up, as a state grows beyond its limits, no token is allowed.
    """

    def __init__(
        self, new_matcher: Callable[[], LLMatcher], executor: LLExecutor, stop_ids: Iterable[int]
    ) -> None:
        """new_matcher: makes the matcher of this sequence, at its beginning, with a mask as long as the bits;
        called once, when the sequence begins. executor: computes the masks of many matchers side by side.
        stop_ids: all that end the output, those of the matcher's tokenizer included.
        """
        self.executor = executor
        self._new_matcher = new_matcher
        self._matcher: LLMatcher | None = None
        self._stops = TokenSet(stop_ids)
        self._num_consumed = 0
        self._may_end = False

    def restrict(self, bits: np.ndarray, output_ids: Sequence[int]) -> None:
        own = np.empty_like(bits)
        self.advance(output_ids).unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        self.complete(own)
        bits &= own
        self.end(bits)

    def advance(self, output_ids: Sequence[int]) -> LLMatcher:
        """Take in the tokens of the output that are new; return the matcher behind them."""
        if self._matcher is None:
            self._matcher = self._new_matcher()
        if len(output_ids) > self._num_consumed:
            self._matcher.consume_tokens(list(output_ids[self._num_consumed :]))
            self._num_consumed = len(output_ids)
        return self._matcher

    def complete(self, bits: np.ndarray) -> None:
        """Bring the mask that the matcher has computed in line with the request's stop tokens."""
        assert self._matcher is not None
        self._may_end = self._matcher.is_accepting()
        if self._may_end:
            self._stops.add_to(bits)
        elif self._matcher.is_error():
            bits[:] = 0

    def end(self, bits: np.ndarray) -> None:
        """Let the output end where it may and other rules have left nothing."""
        if self._may_end and not bits.any():
            self._stops.add_to(bits)


def restrict_all(rows: Sequence[tuple[int, Sequence[TokenRule], Sequence[int]]], bits: np.ndarray) -> None:
    """Fill a row of bits for each sequence: what all of its rules allow.

    rows: (row of `bits`, the sequence's rules, the known tokens of its output). bits: [M, ceil(V / 32)]
    int32, contiguous; rows that are not named stay as they are. A row may be left without any token, as when
    allowed tokens are bad words; but a `Grammar` whose text is complete always lets the output end.
    """
    assert bits.flags.c_contiguous and bits.dtype == np.int32
    grammars: list[tuple[int, Grammar]] = []
    matchers: list[tuple[LLMatcher, int]] = []
    for row, rules, output_ids in rows:
        own = [rule for rule in rules if isinstance(rule, Grammar)]
        for grammar in own:  # at most one, whose mask is written over the row
            grammars.append((row, grammar))
            matchers.append((grammar.advance(output_ids), row))
        if not own:
            bits[row] = ALL_TOKENS
    if grammars:
        executor = grammars[0][1].executor
        executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))
        for row, grammar in grammars:
            grammar.complete(bits[row])
    for row, rules, output_ids in rows:
        for rule in rules:
            if not isinstance(rule, Grammar):
                rule.restrict(bits[row], output_ids)
    for row, grammar in grammars:
        grammar.end(bits[row])
