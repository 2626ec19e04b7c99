"""Token rules against brute force: the test checks every token of a small vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm
from nanovllm.extras import token_rules
from nanovllm.extras.token_rules import (
    MOST_ENDS,
    AllowedTokens,
    BadWords,
    Ends,
    Grammar,
    MinTokens,
    Replay,
    Rule,
    RuledRow,
    TokenSet,
    restrict_all,
)

PROMPT = [1, 2, 0]
V = 75  # three words of bits, the last one partly used
IDS = st.integers(0, V - 1)
WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)
EOS, OTHER_STOP = 2, 7
TOKENIZER = Path(nanovllm.demo_model_path()) / "tokenizer.json"
TOKENS = llguidance.LLTokenizer(str(TOKENIZER), n_vocab=540, eos_token=EOS)


def ids_of(bits: np.ndarray, vocab_size: int = V) -> set[int]:
    return {i for i in range(vocab_size) if bits[i // 32] >> (i % 32) & 1}


def allowed(rule: AllowedTokens | MinTokens | BadWords | Replay, output_ids: Sequence[int]) -> set[int]:
    bits = np.full(-(-V // 32), -1, np.int32)
    rule.restrict(bits, [*PROMPT, *output_ids], len(PROMPT))
    return ids_of(bits)


@given(st.sets(IDS, min_size=1))
def test_allowed_tokens(ids: set[int]) -> None:
    assert allowed(AllowedTokens(ids), []) == allowed(AllowedTokens([*ids, *ids]), [1, 2]) == ids


@given(st.integers(0, 4), st.sets(IDS), st.lists(IDS, max_size=6))
def test_min_tokens(min_tokens: int, stop_ids: set[int], output_ids: list[int]) -> None:
    banned = stop_ids if len(output_ids) < min_tokens else set()
    assert allowed(MinTokens(min_tokens, stop_ids), output_ids) == set(range(V)) - banned


@given(WORDS, st.lists(st.integers(0, 3), max_size=8))
def test_bad_words(words: list[list[int]], output_ids: list[int]) -> None:
    banned = {i for i in range(V) for word in words if [*output_ids, i][-len(word) :] == word}
    assert allowed(BadWords(words), output_ids) == set(range(V)) - banned


def test_a_replay_allows_its_next_token() -> None:
    rule = Replay([5, 40, 5])
    assert [allowed(rule, output) for output in ([], [5], [5, 40])] == [{5}, {40}, {5}]
    bits = np.zeros((1, 3), np.int32)
    rules: list[Rule] = [AllowedTokens([7]), rule]
    restrict_all([RuledRow(0, rules, [9, 9, 5], 2)], bits)
    assert ids_of(bits[0]) == {40}, "whatever the other rules say"


def test_bad_words_become_bits_where_they_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with thousands of words starts at once: only the words that the output begins cost anything."""
    made = []
    monkeypatch.setattr(token_rules, "TokenSet", lambda ids: made.append(list(ids)) or TokenSet(ids))
    rule = BadWords([index // 75, index % 75] for index in range(75 * 66))
    assert not made
    assert allowed(rule, [4]) == allowed(rule, [9, 4]) == set() and made == [list(range(75))]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sets(IDS, min_size=1), st.integers(0, 3), WORDS, st.lists(IDS, max_size=5))))
def test_all_rows(cases: list[tuple[set[int], int, list[list[int]], list[int]]]) -> None:
    """The rows of bits come in any order, and other rows stay unchanged."""
    rules = [[AllowedTokens(ids), MinTokens(n, [0, 40]), BadWords(words)] for ids, n, words, _ in cases]
    bits = np.full((len(cases) + 2, -(-V // 32)), 12345, np.int32)
    rows = [
        RuledRow(len(cases) - row, rules[row], [*PROMPT, *case[3]], len(PROMPT))
        for row, case in enumerate(cases)
    ]
    restrict_all(rows, bits)
    assert (bits[[0, -1]] == 12345).all()
    for case, row in zip(cases, rows, strict=True):
        assert ids_of(bits[row.row]) == set.intersection(*[allowed(rule, case[3]) for rule in row.rules])


class Copies:
    """Matchers that are copies of one original and share its lexer's states."""

    executor = llguidance.LLExecutor()
    tokens = TOKENS

    def __init__(self, kind: str, text: str, **limits: int) -> None:
        grammar = llguidance.grammar_from(kind, text) if kind else text
        limits = llguidance.LLParserLimits(**limits) if limits else None
        self.alone = partial(llguidance.LLMatcher, self.tokens, grammar, log_level=0, limits=limits)
        original = self.alone()
        assert not original.is_error(), original.get_error()
        self.new = original.deep_copy
        self.ends = Ends(EOS)


def grammar(kind: str, text: str, stop_ids: Iterable[int] = (EOS,)) -> Grammar:
    return Grammar(Copies(kind, text), stop_ids)


CHOICES = [
    ["yes", "no", "yes, but"],
    ["a", "ab", "abc", "b"],
    ["", "é", "éè", "\U0001f600"],
    ["one two three", 'quo"ted', "back\\slash", "new\nline"],
]


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_grammar_of_choices(choices: list[str]) -> None:
    """The text continues with each choice that it begins, and any stop token may follow a complete choice;
    only the tokenizer's own where nothing else may.

    Where all choices continue alike, llguidance allows only the tokenizer's own encoding.
    """
    ends = [choice.encode() for choice in choices]
    rng = np.random.default_rng(0)
    for _ in range(20):
        rule, output_ids, text = grammar("choice", json.dumps(choices), [EOS, OTHER_STOP]), [], b""
        forced: list[int] = []  # the tokens that must follow up to the end, once that is known
        while True:
            bits = np.empty((1, 17), np.int32)
            for _ in range(2):  # a preempted sequence asks again
                restrict_all([RuledRow(0, [rule], output_ids, 0)], bits)
                ids = ids_of(bits[0], 540)
                stops, others = ids & {EOS, OTHER_STOP}, ids - {EOS, OTHER_STOP}
                is_over = text in ends and not others
                assert stops == ({EOS} if is_over else {EOS, OTHER_STOP} if text in ends else set())
                forced = forced or list(rule.forced_end(output_ids))
                assert ids == {forced[0]} if forced else not is_over
                longer = [text + TOKENS.decode_bytes([i]) for i in others]
                assert all(any(end.startswith(each) for end in ends) for each in longer)
                next_bytes = {each[len(text)] for each in longer}
                assert next_bytes == {end[len(text)] for end in ends if end.startswith(text) and end != text}
            output_ids.append(int(rng.choice(sorted(ids))))
            forced = forced[1:]
            if output_ids[-1] in stops:
                break
            text = TOKENS.decode_bytes(output_ids)
        assert not forced


def test_grammars_whose_outputs_do_not_end_soon_are_no_longer_looked_at() -> None:
    """Of others a few outputs are kept, and an equal output is looked at once."""
    looks = [0]

    def look(is_forced: bool) -> Callable[[], tuple[int, ...]]:
        def counted() -> tuple[int, ...]:
            looks[0] += 1
            return (9, EOS) if is_forced else ()

        return counted

    rare, often = Ends(EOS), Ends(EOS)
    for number in range(3 * MOST_ENDS):
        assert rare.after([number], look(False)) == ()
        assert often.after([number], look(number % 2 > 0)) == ((9, EOS) if number % 2 else ())
        assert often.after([number], look(False)) == ((9, EOS) if number % 2 else ())
    assert looks[0] == MOST_ENDS + 1 + 3 * MOST_ENDS


def test_an_end_is_forced_only_by_a_token_that_ends_the_output() -> None:
    [digit] = TOKENS.tokenize_str("7")
    assert grammar("regex", "7").forced_end([digit]) == (EOS,)
    assert grammar("regex", "7+").forced_end([digit]) == ()
    assert grammar("regex", "7", [OTHER_STOP]).forced_end([digit]) == ()
    rule = grammar("regex", "7")
    bits = np.empty((1, 17), np.int32)
    for output_ids in ([], [digit]):  # a look between two masks changes neither
        rule.forced_end(output_ids)
        restrict_all([RuledRow(0, [rule], output_ids, 0)], bits)
        assert ids_of(bits[0], 540) == ({EOS} if output_ids else {digit})


TEXTS = [
    ("regex", "(ab|ac){3,5}foo bar"),
    ("regex", "[0-9]{2}-XYZ"),
    ("grammar", 'start: "x" | "(" start ")"'),
    ("json", '{"enum": ["good", "bad", 12, 1.5, null, {"a": [1, true]}]}'),
    (
        "json",
        '{"type": "object", "properties": {"label": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}}, '
        '"required": ["label", "sure"], "additionalProperties": false}',
    ),
]


@pytest.mark.parametrize(("kind", "text"), TEXTS, ids=str)
def test_a_forced_end_has_the_tokens_of_the_masks(kind: str, text: str) -> None:
    if kind == "json":
        made = llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    else:
        made = llguidance.grammar_from(kind, text)
    matchers, rng, num_forced = Copies("", made), np.random.default_rng(2), 0
    for _ in range(60):
        rule, output_ids, forced = Grammar(matchers, [EOS, OTHER_STOP]), [], ()
        bits = np.empty((1, 17), np.int32)
        while output_ids[-1:] != [EOS] and len(output_ids) < 40:
            forced = forced or rule.forced_end(output_ids)
            restrict_all([RuledRow(0, [rule], output_ids, 0)], bits)
            ids = sorted(ids_of(bits[0], 540) - {OTHER_STOP})
            if forced:
                assert ids_of(bits[0], 540) == {forced[0]}
                forced, num_forced = forced[1:], num_forced + 1
            output_ids.append(int(rng.choice(ids)))
        assert not forced
    assert num_forced > 60


def test_a_forced_end_is_encoded_anew_after_each_token() -> None:
    """Llama 3 encodes a backslash and n after a sign as two tokens, and alone as one. llguidance forgets the
    sign where its character has several tokens."""
    content = json.loads(TOKENIZER.read_text())
    content["model"]["vocab"]["\\n"] = len(content["model"]["vocab"])
    content["model"]["merges"].append(["\\", "n"])
    words = {"Regex": r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+"}
    split = {"type": "Split", "pattern": words, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"]["pretokenizers"] = [split, content["pre_tokenizer"]["pretokenizers"][-1]]
    content["pre_tokenizer"]["pretokenizers"][-1]["use_regex"] = False
    tokens = llguidance.LLTokenizer(json.dumps(content), n_vocab=540, eos_token=EOS)
    matchers = type("Others", (Copies,), {"tokens": tokens})("choice", json.dumps(["a\u20ac\\n!", "b"]))
    output_ids, bits = tokens.tokenize_str("a"), np.empty((1, 17), np.int32)
    forced, rule = Grammar(matchers, [EOS]).forced_end(output_ids), Grammar(matchers, [EOS])
    for token_id in forced:
        restrict_all([RuledRow(0, [rule], output_ids, 0)], bits)
        assert ids_of(bits[0], 540) == {token_id}
        output_ids.append(token_id)
    assert [tokens.decode_bytes([token_id]) for token_id in forced[3:-1]] == [b"\\n", b"!"]
    assert forced[-1] == EOS and len(tokens.tokenize_str("\u20ac\\n!")) == len(forced) == 6


def test_rows_with_grammars_are_the_rows_alone() -> None:
    kinds = [("regex", "[0-9]{1,3}"), ("choice", '["12", "34"]'), ("json", '{"type": "integer"}')] * 4
    together = [grammar(*kind) for kind in kinds]
    alone = [grammar(*kind) for kind in kinds]
    outputs: list[list[int]] = [[] for _ in kinds]
    rng = np.random.default_rng(1)
    for _ in range(6):
        bits = np.empty((len(kinds), 17), np.int32)
        restrict_all([RuledRow(row, [rule], outputs[row], 0) for row, rule in enumerate(together)], bits)
        for row, rule in enumerate(alone):
            own = np.empty((1, 17), np.int32)
            restrict_all([RuledRow(0, [rule], outputs[row], 0)], own)
            assert (own[0] == bits[row]).all()
            ids = ids_of(own[0], 540) - {EOS}
            outputs[row] += [int(rng.choice(sorted(ids)))] if ids else []


def test_a_complete_text_ends_whatever_other_rules_say() -> None:
    def ask(rules: list[Rule], output_ids: list[int]) -> set[int]:
        bits = np.empty((1, 17), np.int32)
        restrict_all([RuledRow(0, rules, [*PROMPT, *output_ids], len(PROMPT))], bits)
        return ids_of(bits[0], 540)

    [digit] = TOKENS.tokenize_str("7")
    rules = [grammar("regex", "7{1,2}"), MinTokens(5, [EOS]), BadWords([[digit, digit, EOS]])]
    assert ask(rules, []) == {digit}
    assert ask(rules, [digit]) == {digit}  # it may end here, but not yet
    assert ask(rules, [digit, digit]) == {EOS}
    assert ask([grammar("regex", "7"), AllowedTokens([EOS])], []) == set()  # no token is left


def test_a_grammar_beyond_its_limits_allows_nothing() -> None:
    matchers = Copies("grammar", 'start: a a a a\na: ("x" | "y" | a "z")*', step_max_items=2)
    bits = np.empty((1, 17), np.int32)
    rule = Grammar(matchers, [EOS])
    restrict_all([RuledRow(0, [rule], [], 0)], bits)
    assert not bits.any() and rule.dead_end is not None and "many items" in rule.dead_end
    rule = grammar("grammar", 'start: "7" /[^\\s\\S]/')
    ends = []
    for output_ids in ([], TOKENS.tokenize_str("7")):
        restrict_all([RuledRow(0, [rule], output_ids, 0)], bits)
        ends.append((rule.dead_end, bits.any()))
    assert ends == [(None, True), ("", False)]


def test_a_row_continues_after_others_exhaust_the_shared_lexer() -> None:
    """Random texts use new states of the lexer, whose limit is enough for few of them."""
    matchers, rng = Copies("regex", "[ab]*a[ab]{8}b", max_lexer_states=500), np.random.default_rng(0)
    bits = np.empty((1, 17), np.int32)
    mate = matchers.new()
    while not mate.is_error():
        mate = matchers.new()
        for _ in range(40):
            mate.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if not mate.is_error():
                mate.consume_tokens([int(rng.choice(sorted(ids_of(bits[0], 540) - {EOS})))])
    [a, b] = TOKENS.tokenize_str("a") + TOKENS.tokenize_str("b")
    rule = Grammar(matchers, [EOS])
    for token_ids in ([], [a], [a, *[b] * 9]):
        restrict_all([RuledRow(0, [rule], token_ids, 0)], bits)
        assert ids_of(bits[0], 540) - {EOS} >= {a, b}
    assert EOS in ids_of(bits[0], 540)
