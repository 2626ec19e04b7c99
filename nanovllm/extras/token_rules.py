"""Token rules: which tokens may follow the output of a sequence, as bits.

A rule belongs to one sequence. Knows neither text nor logits; the device applies the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from nanovllm.reasoning.budget import ThinkingBudget
from nanovllm.reasoning.gate import ThinkingGate
from nanovllm.text.prompts import Request

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_ALL_TOKENS = -1  # a word of bits that allows all of its 32 tokens
SHARED_TOKENS = 32  # the longest outputs that are looked at for equal ones
MOST_ENDS = 256  # outputs of a grammar of which is kept how they must end
MOST_FORCED = 64  # tokens of an end that is kept: a look takes time by their square


class _TokenRule(Protocol):
    """Restricts the next token of one sequence."""

    def restrict(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        """Clear the bits of tokens that may not follow `token_ids`, whose output begins at `start`.

        bits: [ceil(V / 32)] int32; bit i % 32 of word i // 32 is token i.
        """


class TokenSet:
    """A set of token ids, stored as its non-zero words of bits."""

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


_token_set = lru_cache(64)(TokenSet)  # of frozen sets, as of the tokens that end outputs


class AllowedTokens:
    """Allows only some tokens, at any position."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._allowed = TokenSet(token_ids)
        self._mask: np.ndarray | None = None  # as long as the bits

    def restrict(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        if self._mask is None:
            self._mask = np.zeros_like(bits)
            self._allowed.add_to(self._mask)
        bits &= self._mask


class Replay:
    """Allows only the next token of a known output, whatever the other rules say."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def restrict(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        place = len(token_ids) - start
        bits[:] = 0
        TokenSet(self._token_ids[place : place + 1]).add_to(bits)


class MinTokens:
    """Forbids tokens that end texts before the output has `min_tokens` tokens."""

    def __init__(self, min_tokens: int, stop_ids: Iterable[int]) -> None:
        self._min_tokens = min_tokens
        self._stops = TokenSet(stop_ids)

    def restrict(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        if len(token_ids) - start < self._min_tokens:
            self._stops.take_from(bits)


class BadWords:
    """Forbids words, which are token sequences: the last token of a word may not follow its other tokens."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: non-empty token sequences."""
        self._lasts: dict[tuple[int, ...], list[int]] = {}  # by the tokens before
        for word in words:
            *before, last = word
            self._lasts.setdefault(tuple(before), []).append(last)
        self._sets: dict[tuple[int, ...], TokenSet] = {}  # the same, of those that occurred
        self._lengths = sorted(set(map(len, self._lasts)))

    def restrict(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        for length in self._lengths:
            begin = len(token_ids) - length
            if begin < start:
                break
            before = tuple(token_ids[begin:])
            if before in self._lasts:
                if before not in self._sets:
                    self._sets[before] = TokenSet(self._lasts[before])
                self._sets[before].take_from(bits)


class Ends:
    """The forced ends of a grammar's outputs: the tokens that must follow, `token_id` as the last."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._are_rare = False  # none of the first ones is forced: such a grammar is not worth the look

    def after(self, token_ids: Sequence[int], look: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """The tokens that must follow an output up to its end; () if others may. `look` says it of an output
        that is not known."""
        if self._are_rare:
            return ()
        key = tuple(token_ids)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_ENDS:
                self._are_rare = not any(self._known.values())
                self._known.clear()
            found = self._known[key] = look()
        return found


class Matchers(Protocol):
    """Creates the matchers of one grammar, in their initial state, with masks as long as the rows of bits."""

    executor: LLExecutor  # processes many matchers in parallel
    ends: Ends  # of the tokenizer's token that ends a text

    def new(self) -> LLMatcher:
        """A matcher for one output; it may share memory, and thus limits, with other matchers."""

    def alone(self) -> LLMatcher:
        """A matcher that shares nothing."""


class Grammar:
    """Enforces the form of the text, such as a JSON schema, followed by a token that ends the output.

    Where the text may end, all stop tokens are allowed; where it must end, the tokenizer's own. If llguidance
    fails, for example because a state exceeds its limits, no token is allowed.
    """

    def __init__(self, matchers: Matchers, stop_ids: Iterable[int], gate: ThinkingGate | None = None) -> None:
        """stop_ids: all tokens that end the output, including those of the matchers' tokenizer. gate: where
        the text begins, if the model may think before it; until then no token is forbidden but those that
        end."""
        self.executor = matchers.executor
        self._gate = gate
        self._matchers = matchers
        self._matcher: LLMatcher | None = None  # created when the sequence begins
        self._stop_ids = frozenset(stop_ids)
        self._stops = _token_set(self._stop_ids)
        self._num_consumed = 0
        self._may_end = False
        self.dead_end: str | None = None  # why no token may follow: llguidance's message, or ""

    @property
    def may_think(self) -> bool:
        """Whether the text may begin after some thinking."""
        return self._gate is not None

    def look_ahead(self, token_ids: Sequence[int], stop_ids: Collection[int], bits: np.ndarray) -> int:
        """After `complete`, if nothing is thought: fill a row of bits for the token after each guessed one.

        Return how many rows are filled: up to the first guess that may not follow, or that ends the output.
        The matcher is as before.
        """
        matcher, number = self._matcher, 0
        assert matcher is not None and self._gate is None
        if matcher.is_error() or matcher.is_stopped():
            return 0
        for token_id, row in zip(token_ids, bits, strict=True):
            if token_id in stop_ids or not matcher.try_consume_tokens([token_id]):
                break
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if matcher.is_error():
                break
            number += 1
            if matcher.is_accepting() and not self._is_over(matcher):
                self._stops.add_to(row)
        if matcher.is_error():  # perhaps at a limit that it shares with other matchers
            self._matcher = None
            self._num_consumed = 0
            return 0
        if number:
            matcher.rollback(number)
        return number

    def text_start(self, token_ids: Sequence[int], start: int) -> int | None:
        """Where the text begins in an output that begins at `start`; None while the model thinks."""
        return start if self._gate is None else self._gate.text_start(token_ids, start)

    def sleep(self, bits: np.ndarray) -> None:
        """Allow all tokens but those that end the output, which would have no text; where the thinking is
        being opened, the next token of that."""
        if self._gate is not None and self._gate.openers:
            bits[:] = 0
            TokenSet(self._gate.openers).add_to(bits)
            return
        bits[:] = _ALL_TOKENS
        self._stops.take_from(bits)

    def advance(self, token_ids: Sequence[int], start: int) -> tuple[LLMatcher, list[int]]:
        """Consume the new tokens of an output that begins at `start`, except the last.

        Returns the matcher, and a list of the last new token, which the matcher must still consume.
        """
        if self._matcher is None:
            self._matcher = self._matchers.new()
        new = list(token_ids[start + self._num_consumed :])
        self._num_consumed += len(new)
        if len(new) > 1:
            self._matcher.consume_tokens(new[:-1])
        return self._matcher, new[-1:]

    def complete(self, bits: np.ndarray, token_ids: Sequence[int], start: int) -> None:
        """Add the request's stop tokens to the mask that the matcher computed."""
        assert self._matcher is not None
        if self._matcher.is_error():  # perhaps at a limit that it shares with other matchers
            self._matcher = self._matchers.alone()
            self._matcher.consume_tokens(list(token_ids[start:]))
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._gate is not None and self._gate.openers:
            TokenSet(self._gate.openers).add_to(bits)
        self._may_end = self._matcher.is_accepting()
        self.dead_end = None
        if self._may_end:
            if not self._is_over(self._matcher):
                self._stops.add_to(bits)
        elif self._matcher.is_error():
            bits[:] = 0
            why = self._matcher.get_error().strip().partition("\n")[0]
            self.dead_end = "" if why.startswith("NoExtension") else why
        elif not bits.any():
            self.dead_end = ""

    def forced_end(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must follow the output, up to the one that ends it; () if others may follow. ()
        also of outputs that are too long or too different for a look to be worth it.

        Of a text that is forced, llguidance allows only the first token of the tokenizer's encoding, and
        encodes the rest anew after it, perhaps in another way. So one token is taken of each encoding.
        """
        if self._gate is not None or len(token_ids) > SHARED_TOKENS:
            return ()

        def look() -> tuple[int, ...]:
            matcher, last = self.advance(token_ids, 0)
            if last:
                matcher.consume_token(last[0])
            if matcher.is_error():
                return ()
            ahead, found = matcher.deep_copy(), []
            while not self._is_over(ahead):
                forced = ahead.compute_ff_tokens()
                found += forced[:1]
                if not forced or len(found) + len(forced) > MOST_FORCED or not ahead.consume_token(forced[0]):
                    return ()
            return (*found, self._matchers.ends.token_id) if ahead.is_accepting() else ()

        return self._matchers.ends.after(token_ids, look)

    def _is_over(self, matcher: LLMatcher) -> bool:
        """Whether only the tokenizer's token that ends a text may follow; it ends the output."""
        return (
            matcher.is_stopped() and not matcher.is_error() and self._matchers.ends.token_id in self._stop_ids
        )

    def state(self, token_ids: Sequence[int]) -> object:
        """What the mask after an output depends on; None if it is unlikely that another output has the same.
        Masks of equal states are equal, so one row can take that of another. Its matcher consumes the tokens
        later, if it ever has to."""
        if self._gate is not None or len(token_ids) > SHARED_TOKENS:
            return None
        return self._matchers, self._stop_ids, tuple(token_ids)

    def end(self, bits: np.ndarray) -> None:
        """If the text may end and other rules left no token, allow the stop tokens."""
        if self._may_end and not bits.any():
            self._stops.add_to(bits)


Rule = _TokenRule | Grammar


class RuledRow(NamedTuple):
    """A sequence with rules, and its row of bits."""

    row: int
    rules: Sequence[Rule]  # at most one Grammar
    token_ids: Sequence[int]  # of which the output is known; between calls they grow by allowed tokens
    start: int  # where the output begins


def restrict_all(rows: Sequence[RuledRow], bits: np.ndarray) -> None:
    """Fill a row of bits for each sequence: the tokens that all of its rules allow.

    bits: [M, ceil(V / 32)] int32, contiguous; rows not in `rows` keep their values. A row may end up with no
    token, for example if all allowed tokens are bad words. But where a `Grammar` lets the text end, the
    output can always end.
    """
    assert bits.flags.c_contiguous and bits.dtype == np.int32
    grammars: list[tuple[RuledRow, Grammar, LLMatcher, list[int]]] = []
    for each in rows:
        grammar = next((rule for rule in each.rules if isinstance(rule, Grammar)), None)
        if grammar is None:
            bits[each.row] = _ALL_TOKENS
            continue
        start = grammar.text_start(each.token_ids, each.start)
        if start is None:
            grammar.sleep(bits[each.row])
        else:
            awake = each._replace(start=start)
            grammars.append((awake, grammar, *grammar.advance(each.token_ids, start)))
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


def make_rules(request: Request, eos_token_ids: Iterable[int] = ()) -> list[Rule]:
    """The rules of one sequence. eos_token_ids: the model's, which `min_tokens` forbids even if they end
    nothing (`ignore_eos`), as in vLLM."""
    params, stop_ids, constraint = request.params, request.stop_token_ids, request.constraint
    rules: list[Rule] = []
    if constraint is not None:
        gate = None if request.thinking is None else request.thinking.new_gate()
        rules.append(Grammar(constraint, stop_ids, gate))
    if params.allowed_token_ids is not None:
        rules.append(AllowedTokens(params.allowed_token_ids))
    if params.min_tokens:
        rules.append(MinTokens(params.min_tokens, stop_ids.union(eos_token_ids)))
    if request.bad_words:
        rules.append(BadWords(request.bad_words))
    if (
        params.thinking_token_budget is not None
    ):  # the last one: what it writes is allowed whatever others say
        rules.append(request.thinking.new_budget(params.thinking_token_budget))
    if params.trace_decode_token_ids is not None:
        rules.append(Replay(params.trace_decode_token_ids))
    return rules


def only_budget(rules: Sequence[Rule]) -> ThinkingBudget | None:
    """The budget of a sequence that has no other rule: it says from which token on it acts."""
    [rule] = rules if len(rules) == 1 else [None]
    return rule if isinstance(rule, ThinkingBudget) else None


def only_grammar(rules: Sequence[Rule]) -> Grammar | None:
    """The grammar of a sequence that has no other rule."""
    [rule] = rules if len(rules) == 1 else [None]
    return rule if isinstance(rule, Grammar) else None
