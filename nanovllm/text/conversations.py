"""Checks conversations and normalises them to lists of messages with string contents.

Knows nothing of templates or tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from nanovllm.errors import BadRow, attempt
from nanovllm.text.prompts import check_text, show, to_list

Conversation: TypeAlias = "Iterable[Mapping[str, Any]]"

MESSAGE = "{'role': ..., 'content': ...}"


def parse_conversations(
    messages: Conversation | Iterable[Conversation],
) -> list[list[dict[str, Any]] | BadRow]:
    """Normalise one conversation or several to lists of messages with string contents.

    TypeError if `messages` is neither. A bad conversation is replaced by a ValueError or TypeError that names
    the conversation, the message and the fix.
    """
    if isinstance(messages, Mapping):
        raise TypeError(f"messages must be a list of messages; put a single message into a list: [{MESSAGE}]")
    items = to_list(messages, f"messages must be a list of messages {MESSAGE} or a list of such lists")
    if items and isinstance(items[0], Mapping):
        items = [items]
    return [attempt(_conversation, item, f"conversation {index}") for index, item in enumerate(items)]


def _conversation(value: Any, where: str) -> list[dict[str, Any]]:
    messages = to_list(value, f"{where} must be a list of messages {MESSAGE}")
    if not messages:
        raise ValueError(f"{where} has no messages; give it at least one {MESSAGE}")
    return [_message(message, f"{where}, message {index}") for index, message in enumerate(messages)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} must be a dictionary {MESSAGE}, not {show(value)}")
    message = dict(value)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        given = f"'role': {show(role)}" if "role" in message else f"the keys {sorted(map(str, message))}"
        raise ValueError(f"{where} needs a role, such as 'role': 'user'; it has {given}")
    if message.get("tool_calls"):
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
    else:
        message.pop("tool_calls", None)
    message["content"] = _content(message.get("content"), "tool_calls" in message, where)
    return message


def _content(value: Any, may_be_none: bool, where: str) -> str:
    """The content of a message as a string: parts are joined by newlines; None is '' beside tool calls."""
    if value is None:
        if not may_be_none:
            raise ValueError(f"{where} has no content; pass a string, '' for an empty one")
        return ""
    if isinstance(value, str):
        check_text(value, where)
        return value
    expected = "content must be a string or a list of parts {'type': 'text', 'text': ...}"
    parts = to_list(value, f"{where}: {expected}")
    return "\n".join(_part(part, f"{where}, content part {index}") for index, part in enumerate(parts))


def _part(value: Any, where: str) -> str:
    text = value
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind != "text":
            raise ValueError(
                f"{where} has the type {kind!r}, which is not supported; only text is supported: "
                "{'type': 'text', 'text': ...}"
            )
        text = value.get("text")
    if not isinstance(text, str):
        raise TypeError(f"{where} must be {{'type': 'text', 'text': ...}} with a string, not {show(value)}")
    check_text(text, where)
    return text


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls with arguments as dictionaries, as templates expect; OpenAI's arguments are JSON strings."""
    calls = []
    for index, call in enumerate(to_list(value, f"{where}: tool_calls must be a list")):
        if not isinstance(call, Mapping):
            raise TypeError(f"{where}: tool_calls[{index}] must be a dictionary, not {show(call)}")
        call = dict(call)
        if isinstance(call.get("function"), Mapping):
            function = call["function"] = dict(call["function"])
            arguments = function.get("arguments") or {}
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except ValueError as error:
                    raise ValueError(
                        f"{where}: the arguments of tool_calls[{index}] are not valid JSON ({error}): "
                        f"{show(arguments)}"
                    ) from None
            function["arguments"] = arguments
        calls.append(call)
    return calls
