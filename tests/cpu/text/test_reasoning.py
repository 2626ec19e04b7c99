"""The thinking of answers is separated from their text, however they are cut into pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.reasoning.answers import ThinkingStream
from nanovllm.reasoning.harmony import Harmony
from nanovllm.reasoning.marks import REASONING, Channels, Mark, Thinking
from nanovllm.reasoning.splitter import Begin, Split, Splits, Splitter

THINKING = {name: each for name, each in REASONING.items() if isinstance(each, Thinking)}
HARMONY = REASONING["openai_gptoss"]
assert isinstance(HARMONY, Channels)
INSIDE, OPEN, OUTSIDE = Begin.INSIDE, Begin.OPEN, Begin.OUTSIDE


def marks_of(name: str) -> tuple[str, ...]:
    family = REASONING[name]
    if isinstance(family, Channels):
        return family.marks
    return family.start, family.end, *(call.mark for call in family.calls)


def splits_of(name: str, begin: Begin, searched: Iterable[str], behind: str = "") -> Splits:
    """behind: what the prompt has behind the start mark and its label."""
    family = REASONING[name]
    if isinstance(family, Channels):
        return Harmony(family, "assistant", searched)
    return Splitter(family, begin, searched, family.label + behind if begin is INSIDE else "")


def joined(splits: Splits, pieces: Iterable[str]) -> Split:
    parts = [*(splits.feed(piece) for piece in pieces), splits.finish()]
    return Split("".join(part.reasoning for part in parts), "".join(part.text for part in parts))


def as_tokens(answer: str, marks: Iterable[str]) -> list[str]:
    """The answer with each mark as a token, and text between as one string."""
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    parts = re.split(f"({pattern})", answer)
    return [Mark(part) if index % 2 else part for index, part in enumerate(parts) if part]


def ways(name: str, answer: str) -> Iterator[tuple[Iterable[str], list[str]]]:
    """(what text is searched for, pieces): marks as text and as tokens, whole, by letters, and cut at every
    place."""
    marks = marks_of(name)
    yield marks, [answer]
    yield marks, list(answer)
    for at in range(len(answer) + 1):
        yield marks, [answer[:at], answer[at:]]
        yield marks, [answer[:at], answer[at : at + 1], answer[at + 1 :]]
        yield marks, [answer[:at], answer[at : at + 7], answer[at + 7 :]]
    tokens = as_tokens(answer, marks)
    yield (), tokens
    yield (), [letter for piece in tokens for letter in ([piece] if isinstance(piece, Mark) else piece)]
    for index, piece in enumerate(tokens):
        for at in range(0 if isinstance(piece, Mark) else len(piece)):
            yield (), [*tokens[:index], piece[:at], piece[at:], *tokens[index + 1 :]]


def check(name: str, begin: Begin, answer: str, reasoning: str, text: str, behind: str = "") -> None:
    for searched, pieces in ways(name, answer):
        found = joined(splits_of(name, begin, searched, behind), pieces)
        assert found == Split(reasoning, text), pieces


@pytest.mark.parametrize("name", THINKING)
def test_every_family(name: str) -> None:
    family = THINKING[name]
    start, end = family.start + family.label, family.end
    newline = "" if family.label else "\n"
    check(name, OPEN, f"{start}{newline}one < two\n{end}\n\nYes", "one < two\n", "Yes")
    check(name, OPEN, f"\n{start}one{end}Yes", "one", "Yes")
    check(name, INSIDE, f"one{end}\n\nYes\n", "one", "Yes\n")
    check(name, INSIDE, f"{newline}one{end}Yes", "one", "Yes")
    check(name, INSIDE, f"{start}{newline}one{end}Yes", "one", "Yes")  # opened twice
    check(name, OUTSIDE, "\n\nYes", "", "\n\nYes")
    check(name, OPEN, "Yes and no", "", "Yes and no")
    check(name, OPEN, f"{start}{newline}\n{end}\n\nYes", "\n", "Yes")


@pytest.mark.parametrize("name", THINKING)
def test_an_answer_that_is_cut_off(name: str) -> None:
    family = THINKING[name]
    answer = f"{family.start}{family.label}one two{family.end}\n\nYes"
    behind = len(family.start + family.label)
    for length in range(behind, len(answer) + 1):
        cut = answer[:length]
        reasoning, end, text = cut[behind:].partition(family.end)
        check(name, OPEN, cut, reasoning, text.removeprefix("\n").removeprefix("\n") if end else "")
    check(name, INSIDE, "one two", "one two", "")
    check(name, INSIDE, family.end[:-1], family.end[:-1], "")  # a part of a mark is text where it stands
    check(name, INSIDE, "", "", "")
    if not family.label:
        check(name, OPEN, family.start[:-1], "", family.start[:-1])
    check(name, OPEN, " \n", "", " \n")


def test_a_label_that_is_cut_off_is_no_thinking() -> None:
    for length in range(len("thought\n") + 1):
        check("gemma4", OPEN, f"<|channel>{'thought'[:length]}", "", "")
    check("gemma4", OPEN, "<|channel>through", "through", "")


@pytest.mark.parametrize("name", THINKING)
def test_marks_that_do_not_count(name: str) -> None:
    family = THINKING[name]
    start, end = family.start + family.label, family.end
    check(name, INSIDE, f"a{family.start}b{end}c", f"a{family.start}b", "c")  # a second start mark
    check(name, INSIDE, f"a{end}{end}\nc{end}d", "a", f"c{end}d")  # doubled, then once more
    check(name, INSIDE, f"a{end}b{start}c", "a", f"b{start}c")
    check(name, OPEN, f"b {start}c{end}", "", f"b {start}c{end}")  # text came first
    check(name, OPEN, f"{end}\nb", "", "b")  # an answer without thinking
    check(name, OUTSIDE, f"{start}b{end}", "", f"{start}b{end}")


def test_newlines_are_dropped_as_templates_write_them() -> None:
    """Code keeps its indentation."""
    check("qwen3", OPEN, "<think>\n\n  a\n</think>\n\n\n    b\n", "\n  a\n", "\n    b\n")
    check(
        "qwen3", INSIDE, "\n  a</think>\n    b", "\n  a", "    b", behind="\n"
    )  # the prompt has the newline
    check("qwen3", OPEN, "<think>\n\n</think>\n\nb", "\n", "b")


CALLS = [(name, call) for name, family in THINKING.items() for call in family.calls]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_call_ends_the_thinking_unless_its_end_comes_later(name: str, call: object) -> None:
    mark, follows = call  # type: ignore[misc]
    end = THINKING[name].end
    begun = f"{mark}{follows}f>"
    check(name, INSIDE, f"a\n{begun} x", "a\n", f"{begun} x")
    check(name, INSIDE, begun, "", begun)
    check(name, INSIDE, f"a {begun} no{end}\n\nYes", f"a {begun} no", "Yes")  # a quotation
    if follows:
        check(name, INSIDE, f"a {mark} is a mark", f"a {mark} is a mark", "")
        check(name, INSIDE, f"a {mark}", f"a {mark}", "")
        check(name, INSIDE, f"a {mark}{mark}\n{follows}", f"a {mark}", f"{mark}\n{follows}")


def test_a_mark_in_ordinary_tokens_is_a_quotation() -> None:
    splits = splits_of("qwen3", INSIDE, ())
    assert joined(splits, ["say </think>", " twice", Mark("</think>"), "b"]) == ("say </think> twice", "b")


def harmony(*messages: str) -> str:
    """An answer, whose first `<|start|>assistant` the prompt has."""
    return "<|start|>assistant".join(messages)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>one <two<|end|>", "<|channel|>final<|message|>Yes"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
RAW_CALL = '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>'
OTHER_CALL = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>"


@pytest.mark.parametrize(
    ("messages", "reasoning", "text"),
    [
        ([ANALYSIS, FINAL], "one <two", "Yes"),
        ([ANALYSIS, FINAL + "<|return|>"], "one <two", "Yes"),
        ([FINAL], "", "Yes"),
        ([ANALYSIS, ANALYSIS, FINAL], "one <two\none <two", "Yes"),
        ([ANALYSIS, CALL], "one <two", RAW_CALL),
        ([ANALYSIS, OTHER_CALL], "one <two", RAW_CALL),
        ([ANALYSIS, PREAMBLE, FINAL], "one <two", "I look.\nYes"),
        ([ANALYSIS[:-7]], "one <two", ""),
        (["<|channel|>ana"], "", ""),
        ([ANALYSIS, "<|channel|>fin"], "one <two", ""),
        (["Yes without marks"], "", "Yes without marks"),
        (["  together"], "", "  together"),
        (["to"], "", "to"),
        ([""], "", ""),
    ],
)
def test_harmony(messages: list[str], reasoning: str, text: str) -> None:
    check("openai_gptoss", OPEN, harmony(*messages), reasoning, text)


def test_harmony_goes_on_where_the_prompt_ends() -> None:
    for prompt, answer, expected in [
        ("assistant<|channel|>analysis<|message|>Well, ", "one<|end|>", ("one", "")),
        ("assistant<|channel|>final<|message|>", "Yes", ("", "Yes")),
        ("assistant<|channel|>", "analysis<|message|>one", ("one", "")),
    ]:
        assert joined(Harmony(HARMONY, prompt, HARMONY.marks), list(answer)) == expected


PARTS = ["a", "\n", " ", "<", "</", "<think>", "</think>", "<tool_call>", "<function=", "thi", "nk>", "b\n\n"]
HARMONY_PARTS = [
    *HARMONY.marks,
    "analysis",
    "final",
    " to=functions.f",
    "commentary",
    "a",
    "\n",
    "<|",
    "assistant",
]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_joined_pieces_are_the_whole(data: st.DataObject) -> None:
    """For any answer, and nothing is lost between the marks."""
    name = data.draw(st.sampled_from(["qwen3", "gemma4", "glm45", "openai_gptoss"]))
    parts = HARMONY_PARTS if name == "openai_gptoss" else PARTS
    parts = (
        [*parts, "<|channel>", "thought\n", "<channel|>", "<|tool_call>", "call:"]
        if name == "gemma4"
        else parts
    )
    answer = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    begin = data.draw(st.sampled_from(Begin))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    marks = marks_of(name)
    whole = joined(splits_of(name, begin, marks), [answer])
    assert joined(splits_of(name, begin, marks), pieces) == whole
    tokens = as_tokens(answer, marks)
    letters = [letter for piece in tokens for letter in ([piece] if isinstance(piece, Mark) else piece)]
    assert joined(splits_of(name, begin, ()), tokens) == joined(splits_of(name, begin, ()), letters)
    plain = "".join(piece for piece in as_tokens(answer, marks) if not isinstance(piece, Mark))
    if name not in ("gemma4", "openai_gptoss"):
        kept = "".join(whole).replace("\n", "")
        assert all(letter in kept for letter in plain.replace("\n", "").replace(" ", ""))


class Letters:
    """Decodes token i as its string."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def append(self, token_id: int) -> str:
        return self.tokens[token_id]


def test_a_stream_of_tokens_keeps_the_thinking_and_counts_it() -> None:
    tokens = ["<think>", "\n", "one", "</think>", "\n\n", "Yes", "."]
    splits = splits_of("qwen3", OPEN, ())
    marks = {0: Mark("<think>"), 3: Mark("</think>")}
    stream = ThinkingStream(lambda before: Letters(tokens), [], splits, marks)
    texts = [stream.append(index) for index in range(len(tokens))]
    assert texts == ["", "", "", "", "", "Yes", "."] and stream.finish() == ""
    assert stream.reasoning == stream.take() == "one" and stream.take() == ""
    assert stream.num_reasoning_tokens == 4
