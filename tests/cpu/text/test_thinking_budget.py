"""A budget closes the thinking after its number of tokens, also where tokens are read one step late."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mark_tokenizer import MarkTokenizer

from nanovllm.reasoning.budget import RECHECKED, ThinkingBudget, budget_marks
from nanovllm.reasoning.gate import ThinkingGate, gate_of
from nanovllm.reasoning.marks import REASONING
from nanovllm.reasoning.parsers import marks_of
from nanovllm.reasoning.prompts import Vocabulary, begin

MARKS = ["<think>", "</think>", "<tool_call>", "<|im_start|>", "<|channel>", "<channel|>", "<|tool_call>"]
MARKS += ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
TOKENIZER = MarkTokenizer(MARKS)
VOCABULARY_WORDS = (TOKENIZER.first + len(MARKS) + 31) // 32
NEWLINES = "\n</think>\n\n"


def write(name: str, prompt: str, wanted: str, budget: int, late: int = 0, length: int = 40) -> str:
    """What is written of an answer by a model that wants to write `wanted`, and then goes on there.

    late: how many drawn tokens are not read yet when a step is planned.
    """
    family = REASONING[name]
    vocabulary = Vocabulary(TOKENIZER, marks_of(family))  # type: ignore[arg-type]
    prompt_ids = TOKENIZER.encode(prompt)
    is_open = begin(family, vocabulary, prompt_ids).is_open
    rule = ThinkingBudget(budget_marks(family, vocabulary), budget, is_open)
    token_ids, source = list(prompt_ids), iter(TOKENIZER.encode(wanted))
    wakes = len(prompt_ids)
    while len(token_ids) - len(prompt_ids) < length:
        known = token_ids[: max(len(token_ids) - late, len(prompt_ids))]
        if wakes <= len(token_ids):
            wakes = rule.wakes(known, len(prompt_ids))
        drawn = next(draw(rule, wakes <= len(token_ids), token_ids, len(prompt_ids), source), None)
        if drawn is None:
            break
        token_ids.append(drawn)
    return TOKENIZER.decode(token_ids[len(prompt_ids) :])


def draw(
    rule: ThinkingBudget, may_act: bool, token_ids: list[int], start: int, source: Iterator[int]
) -> Iterator[int]:
    """The next token: the forced one, or the one that the model wants."""
    bits = np.full(VOCABULARY_WORDS, -1, np.int32)
    if may_act:
        rule.restrict(bits, token_ids, start)
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    if len(allowed) == 1:
        yield int(allowed[0])
    else:
        assert len(allowed) == 32 * VOCABULARY_WORDS  # all or one
        yield from source


@pytest.mark.parametrize(
    ("prompt", "wanted", "budget", "expected"),
    [
        ("<think>\n", "abcdef", 3, f"abc{NEWLINES}def"),
        ("<think>\n", "abc</think>def", 3, f"abc{NEWLINES}</think>def"),  # the model ends a token too late
        ("<think>\n", "ab</think>def", 3, "ab</think>def"),
        ("<think>\n", "abcdef", 0, f"{NEWLINES}abcdef"),
        ("<think>\n", "abc", 100, "abc"),
        ("", "<think>abcdef", 3, f"<think>abc{NEWLINES}def"),
        ("", "<think>abcdef", 0, f"<think>{NEWLINES}abcdef"),
        ("", "abcdef", 0, "abcdef"),  # no thinking at all
        ("<think>\n\n</think>", "abcdef", 2, "abcdef"),
        ("<think>\n", "ab<tool_call>cdef", 3, "ab<tool_call>cdef"),  # a call is not interrupted
        ("<think>\n", "ab</think>c<think>defg", 3, f"ab</think>c<think>d{NEWLINES}efg"),  # what is left
    ],
)
def test_qwen(prompt: str, wanted: str, budget: int, expected: str) -> None:
    for late in (0, 1):
        assert write("qwen3", f"<|im_start|>assistant\n{prompt}", wanted, budget, late) == expected


@pytest.mark.parametrize("first", ["", "\n", NEWLINES[:1] * 3])  # the closing begins with a newline, too
def test_a_block_that_is_opened_when_nothing_is_left_is_closed_soon(first: str) -> None:
    """At the same place, however late tokens are read."""
    for number in (0, 2, RECHECKED - 9, RECHECKED):
        wanted = "a" * number + "<think>" + first + "d" * 40
        found = [write("qwen3", "<think>", f"abc{wanted}", 2, late, 120) for late in (0, 1)]
        assert found[0] == found[1]
        before, _, rest = found[0].partition(f"ab{NEWLINES}c{'a' * number}<think>")
        inside, closing, after = rest.partition(NEWLINES)
        assert before == "" and closing and len(inside) <= RECHECKED
        assert inside + after == first + "d" * 40


def test_tokens_before_the_budget_need_no_mask() -> None:
    """A rule is asked rarely, so that its rows run as others do."""
    marks = budget_marks(REASONING["qwen3"], Vocabulary(TOKENIZER, ("<think>", "</think>")))  # type: ignore
    rule = ThinkingBudget(marks, 1000, is_open=True)
    assert rule.wakes([5] * 7, 4) == 4 + 1000
    assert rule.wakes([5] * 504, 4) == 4 + 1000
    closed = [5] * 504 + list(TOKENIZER.encode("</think>"))
    assert rule.wakes(closed, 4) == len(closed) + 1 + 500  # another block could take what is left


def test_other_marks() -> None:
    final = "<|end|><|start|>assistant<|channel|>final<|message|>"
    answer = "<|channel|>analysis<|message|>abcd"
    for late in (0, 1):
        found = write("gemma4", "", "<|channel>thought\nabcd", 2, late)
        assert found == "<|channel>thought\nab<channel|>cd"
        # its label in other tokens, as many
        found = write("gemma4", "", "<|channel>THOUGHT\nabcd", 2, late)
        assert found == "<|channel>THOUGHT\nab<channel|>cd"
        found = write("gemma4", "", "<|channel><channel|>ab<|channel>thought\ncdefg", 2, late, 60)
        assert found == "<|channel><channel|>ab<|channel>thought\ncd<channel|>efg"
        found = write("openai_gptoss", "<|start|>assistant", answer, 2, late, 100)
        assert found == f"<|channel|>analysis<|message|>ab{final}cd"


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "text"),
    [
        ("qwen3", "<think>\n", "ab</think>cd", "cd"),
        ("qwen3", "<think>\n", "ab", None),
        ("qwen3", "<think>\n\n</think>", "ab", "ab"),
        ("qwen3", "", "<think>ab</think>cd", "cd"),
        ("qwen3", "", "ab<think>c</think>", "ab<think>c</think>"),  # the first token decides
        ("qwen3", "<think>\n", "a<think>b</think>c</think>d", "c</think>d"),
        ("glm45", "", "\n<think>ab</think>cd", "cd"),
        ("glm45", "", "\n", None),  # then only a start mark may follow
        ("gemma4", "", "<|channel>thought\na<channel|>b", "b"),
        ("openai_gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>a<|end|>", None),
        ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>", "a", "a"),
        (
            "openai_gptoss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            "b",
        ),
    ],
)
def test_the_text_begins_behind_the_thinking(name: str, prompt: str, answer: str, text: str | None) -> None:
    """As the tokens come, one by one or several at once."""
    family = REASONING[name]
    vocabulary = Vocabulary(TOKENIZER, marks_of(family))  # type: ignore[arg-type]
    prompt_ids = TOKENIZER.encode(f"<|im_start|>{prompt}")
    token_ids, start = prompt_ids + TOKENIZER.encode(answer), len(prompt_ids)
    for step in (1, 3, 100):
        gate = ThinkingGate(*gate_of(family, vocabulary, prompt_ids))
        assert bool(gate.openers) is (prompt == "")
        for end in [*range(start, len(token_ids), step), len(token_ids)]:
            found = gate.text_start(token_ids[:end], start)
        assert (None if found is None else TOKENIZER.decode(token_ids[found:])) == text
        assert bool(gate.openers) is (answer in ("", "\n") and prompt == "")


def test_an_end_mark_of_several_tokens_is_refused() -> None:
    vocabulary = Vocabulary(MarkTokenizer(["<|im_start|>"]), ("<think>", "</think>"))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"needs an end mark that is one token, and this tokenizer has no .*</think>"
    ):
        budget_marks(REASONING["olmo3"], vocabulary)
    with pytest.raises(
        ValueError, match=r"need marks that are one token, and this tokenizer has no .*<think>"
    ):
        gate_of(REASONING["olmo3"], vocabulary, [5])
