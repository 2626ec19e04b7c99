"""Prompts and answers of the families in `thinking_families.py`, as `llm.chat` and the parsers treat them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from test_answer_parsers import by_tokens
from test_texts import make_tokenizer
from thinking_families import FAMILIES, THINK
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from nanovllm.chat.conversations import (
    Thinking,
    check_template_options,
    parse_conversations,
    render_conversations,
)
from nanovllm.chat.templates import TemplateProcess
from nanovllm.reasoning.parsers import AnswerParsers, Asked, Parsed
from nanovllm.text.detokenizer import Detokenizer

THOUGHT, TEXT = "First < second,\n  so 3 🌍 > 2.", "    The wörld: 日本語\n"
CITY = {"city": "São Paulo", "days": 3, "tags": ["a", {"b": None}]}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}
FUNCTION = {
    "name": "get_weather",
    "description": "?",
    "parameters": {"type": "object", "properties": PROPERTIES},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "What are <think> and </think>, <|channel|>final<|message|> and [/THINK]?"}
THINKING = [name for name, each in FAMILIES.items() if each.reasoning]
# Marks are tokens of their own, as the family has them; special tokens; or text, several tokens each.
KINDS = ("own", "special", "text")


@lru_cache
def tokenizer_of(name: str, kind: str = "own") -> PreTrainedTokenizerFast:
    """Its turns are tokens in any case."""
    family, tokenizer = FAMILIES[name], make_tokenizer("byte_level")
    thinking = {*THINK, "<|channel>", "<channel|>"} | {mark for mark in family.marks if "tool_call" in mark}
    thinking |= set(family.marks) if family.in_messages else set()
    marks = [each for each in family.marks if kind != "text" or each not in thinking]
    tokenizer.add_tokens(
        [AddedToken(mark, special=family.special or kind == "special", normalized=False) for mark in marks]
    )
    tokenizer.chat_template = family.template
    return tokenizer


@lru_cache
def parsers_of(name: str, kind: str = "own") -> AnswerParsers:
    tokenizer = tokenizer_of(name, kind)
    return AnswerParsers(tokenizer, FAMILIES[name].reasoning and "auto", "auto")


def prompt_of(
    process: TemplateProcess, name: str, messages: Any = (USER,), kind: str = "own", **more: Any
) -> str:
    """The prompt of a conversation, as `llm.chat` makes it."""
    tokenizer = tokenizer_of(name, kind)
    thinking = Thinking(more.pop("on", None), more.pop("effort", None))
    tools = more.pop("tools", None)
    options = check_template_options(tokenizer, None, True, False, tools, more, thinking)
    [found] = render_conversations(tokenizer, parse_conversations([[*messages]]), options, process)
    assert not isinstance(found, Exception), found
    assert found.text is not None
    return found.text


def ids_of(name: str, *pieces: str, kind: str = "own") -> list[int]:
    """The tokens of pieces: a mark whose letters are in two pieces is a quotation."""
    tokenizer = tokenizer_of(name, kind)
    return [each for piece in pieces for each in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def parse(name: str, prompt: str, *pieces: str, kind: str = "own", length: int | None = None) -> Parsed:
    """The answer, cut off at `length` tokens; the same by a stream and at the end."""
    parsers, detokenizer = parsers_of(name, kind), Detokenizer(tokenizer_of(name, kind))
    asked = Asked(ids_of(name, prompt, kind=kind), 0, TOOLS)
    token_ids = ids_of(name, *pieces, kind=kind)[:length]
    found = parsers.whole(detokenizer, asked, token_ids)
    assert by_tokens(parsers, detokenizer, asked, token_ids) == found
    return found


def is_open(name: str, prompt: str, kind: str = "own") -> bool:
    """Whether a prompt has begun the thinking."""
    return parsers_of(name, kind).splits(ids_of(name, prompt, kind=kind)).is_open


def called(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    """A question, an answer with a call, and its result."""
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    result = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "sun"}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call], **more}, result]


def prompts_of(process: TemplateProcess, name: str, kind: str = "own") -> Iterator[tuple[str, bool]]:
    """Prompts by which a model thinks, and whether they have begun the thinking."""
    options: dict[str, Any] = {} if FAMILIES[name].switch is None else {"on": True}
    for messages in ([USER], called(CITY)):
        prompt = prompt_of(process, name, messages, kind, **options)
        yield prompt, is_open(name, prompt, kind)
