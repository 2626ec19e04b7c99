"""Answers as tokens of real tokenizers: separated token by token and at the end, with the same result."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_texts import KINDS, make_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from nanovllm.extras.stop_strings import StopSearch
from nanovllm.reasoning.parsers import AnswerParsers, Asked, Parsed
from nanovllm.text.detokenizer import Detokenizer

MARKS = {
    "qwen3": (["<think>", "</think>", "<tool_call>", "</tool_call>"], False),
    "gemma4": (["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'], True),
    "openai_gptoss": (
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"],
        True,
    ),
    "olmo3": ([], False),
}
TOOLS = {"qwen3": "hermes", "gemma4": "gemma4", "openai_gptoss": "openai", "olmo3": "hermes"}
TOOLS_GIVEN = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@lru_cache
def tokenizer_of(kind: str, name: str) -> PreTrainedTokenizerFast:
    """One whose added marks are special as in the family's."""
    tokenizer = make_tokenizer(kind)
    marks, special = MARKS[name]
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return tokenizer


def ids_of(kind: str, name: str, text: str) -> list[int]:
    return list(tokenizer_of(kind, name)(text, add_special_tokens=False)["input_ids"])


def answer_ids(kind: str, name: str, prompt: str, answer: str) -> list[int]:
    """The tokens of an answer behind its prompt."""
    before, both = ids_of(kind, name, prompt), ids_of(kind, name, prompt + answer)
    assert both[: len(before)] == before
    return both[len(before) :]


def by_tokens(parsers: AnswerParsers, detokenizer: Detokenizer, asked: Asked, token_ids: list[int]) -> Parsed:
    """The answer by a stream whose parts are joined."""
    stream = parsers.stream(detokenizer, asked, StopSearch([]))
    texts, thoughts = [], []
    for token_id in token_ids:
        assert not stream.append(token_id)
        texts.append(stream.take())
        thoughts.append(stream.take_reasoning() or "")
    found = stream.parsed()
    text, thinking = "".join(texts), "".join(thoughts)
    assert found.text.startswith(text) and (found.reasoning or "").startswith(thinking)
    return found


def parse(kind: str, name: str, prompt: str, answer: str | list[int], tools: str | None = None) -> Parsed:
    """The answer, the same by a stream and at the end."""
    tokenizer = tokenizer_of(kind, name)
    parsers, detokenizer = AnswerParsers(tokenizer, name, tools), Detokenizer(tokenizer)
    asked = Asked(ids_of(kind, name, prompt), 0, TOOLS_GIVEN)
    token_ids = answer_ids(kind, name, prompt, answer) if isinstance(answer, str) else answer
    found = parsers.whole(detokenizer, asked, token_ids)
    assert by_tokens(parsers, detokenizer, asked, token_ids) == found
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_thinking_and_text(kind: str) -> None:
    for name in ("qwen3", "olmo3"):
        found = parse(kind, name, "I say:", "<think>\nthe wörld 🌍</think>\n\nHello 日本語")
        assert found[:4] == ("the wörld 🌍", "Hello 日本語", None, None)
        found = parse(kind, name, "I say:<think>\n", "the world")
        assert found[:2] == ("the world", "")
    found = parse(kind, "gemma4", "I say:", "<|channel>thought\nthe world<channel|>Hello")
    assert found[:2] == ("the world", "Hello")  # the marks are special, and no text
    answer = (
        "<|channel|>analysis<|message|>the world<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    )
    assert parse(kind, "openai_gptoss", "<|start|>assistant", answer)[:2] == ("the world", "Hello")


@pytest.mark.parametrize("kind", KINDS)
def test_calls(kind: str) -> None:
    body = json.dumps({"name": "f", "arguments": {"a": "</think>"}})
    answers = {
        "qwen3": f"<think>\nI say</think>\n\nHello\n<tool_call>\n{body}\n</tool_call>",
        "olmo3": f"<think>\nI say</think>\n\nHello\n<tool_call>\n{body}\n</tool_call>",
        "gemma4": "<|channel>thought\nI say<channel|>Hello"
        '<|tool_call>call:f{a:<|"|></think><|"|>}<tool_call|>',
        "openai_gptoss": "<|channel|>analysis<|message|>I say<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Hello<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        '<|message|>{"a": "</think>"}<|call|>',
    }
    for name, answer in answers.items():
        if (
            name == "qwen3" and kind == "byte_level"
        ):  # in a string of the call the mark is made of ordinary tokens
            head, tail = answer.split('"</think>"')
            token_ids = [
                *ids_of(kind, name, head + '"<'),
                *ids_of(kind, name, '/think>"'),
                *ids_of(kind, name, tail),
            ]
            found = parse(kind, name, "<|start|>assistant", token_ids, TOOLS[name])
        elif name == "qwen3":  # here other tokens would add a space
            continue
        else:
            found = parse(kind, name, "<|start|>assistant", answer, TOOLS[name])
        assert found[:2] == ("I say", "Hello") and found.errors == []
        assert found.tool_calls is not None
        [call] = found.tool_calls
        assert call["function"] == {"name": "f", "arguments": '{"a": "</think>"}'}


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_reasoning_parser_calls_are_found(kind: str) -> None:
    tokenizer = tokenizer_of(kind, "gemma4")
    parsers = AnswerParsers(tokenizer, None, "gemma4")
    answer = answer_ids(kind, "gemma4", "I say:", "Hello<|tool_call>call:f{}<tool_call|>")
    found = parsers.whole(Detokenizer(tokenizer), Asked(ids_of(kind, "gemma4", "I say:")), answer)
    assert found.reasoning is None and found.text == "Hello" and found.num_reasoning_tokens == 0
    assert [call["function"]["name"] for call in found.tool_calls or ()] == ["f"]
    with pytest.raises(ValueError, match="tool_parser='openai' needs reasoning_parser='openai_gptoss'"):
        AnswerParsers(tokenizer, None, "openai")
    needed = "tool_parser='muse_glimmer' needs reasoning_parser='muse_glimmer' or 'auto', too"
    for other in (None, "openai_gptoss"):
        with pytest.raises(ValueError, match=needed):
            AnswerParsers(tokenizer, other, "muse_glimmer")


def test_tokens_of_the_thinking_are_counted_with_its_marks() -> None:
    kind, name = "byte_level", "qwen3"
    inner, outer = ids_of(kind, name, "the world"), ids_of(kind, name, "\n\nHello")
    start, end = ids_of(kind, name, "<think></think>")
    for prompt, answer, count in [
        ("I say:", [start, *inner, end, *outer], len(inner) + 2),
        ("I say:<think>", [*inner, end, *outer], len(inner) + 1),
        ("I say:<think>", inner, len(inner)),
        ("I say:", outer, 0),
    ]:
        assert parse(kind, name, prompt, answer).num_reasoning_tokens == count


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_count_behind_the_thinking(kind: str) -> None:
    tokenizer = tokenizer_of(kind, "qwen3")
    parsers, detokenizer = AnswerParsers(tokenizer, "qwen3", None), Detokenizer(tokenizer)
    answer = ids_of(kind, "qwen3", "<think>the world</think>Hello the world")
    stream = parsers.stream(detokenizer, Asked([0]), StopSearch(["the"]))
    ended = [stream.append(token_id) for token_id in answer]
    assert ended.index(True) == stream.num_tokens - 1 and stream.found == "the"
    assert stream.parsed()[:2] == ("the world", "Hello ")
    assert stream.parsed(include=True).text == "Hello the"


def test_bytes_before_a_mark_that_are_no_character_are_dropped() -> None:
    kind, name = "byte_level", "qwen3"
    [start], [end] = ids_of(kind, name, "<think>"), ids_of(kind, name, "</think>")
    broken, hello = ids_of(kind, name, "日")[:1], ids_of(kind, name, "Hello")
    found = parse(kind, name, "I say:", [*broken, start, *hello, *broken, end, *hello, *broken])
    assert found[:2] == ("Hello", "Hello")
    assert parse(kind, name, "I say:", [start, *broken, *hello, end])[:2] == ("\ufffdHello", "")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tokens(kind: str, data: Any) -> None:
    """Bytes that are no characters, too: a stream and the end agree."""
    name = data.draw(st.sampled_from(sorted(MARKS)))
    tokenizer = tokenizer_of(kind, name)
    marks = [each for each in tokenizer.added_tokens_decoder if each >= tokenizer.vocab_size - 1]
    words = ids_of(kind, name, "the wörld 🌍\n<think> </think> analysis final thought call:f{}")
    tokens = st.sampled_from([*marks, *words, *range(5, 200, 7)])
    prompt = data.draw(st.sampled_from(["I say:", "<think>", "<|channel>thought\n", "<|start|>assistant"]))
    parse(kind, name, prompt, data.draw(st.lists(tokens, max_size=12)), TOOLS[name])
