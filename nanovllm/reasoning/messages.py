"""Earlier answers as messages: their thinking and their calls in the fields that a template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.reasoning.templates import reasoning_fields

_FIELDS = ("reasoning_content", "reasoning", "thinking")
_HARMONY = ("<|channel|>", "<|message|>")


def fit_reasoning(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages, with the thinking of each answer in every field that the template reads.

    The thinking may stand in any of the fields reasoning, reasoning_content and thinking; two that differ are
    a ValueError. A template of gpt-oss writes one call of a message, so a message with several becomes
    several, each before its result; and where a message has calls it takes thinking or content, so the
    content follows the thinking there.
    """
    is_harmony = all(mark in template for mark in _HARMONY)
    if not is_harmony and not any(message.get(name) for message in messages for name in _FIELDS):
        return [dict(message) for message in messages]
    fields = reasoning_fields(template)
    fitted = [_fitted(message, fields, index) for index, message in enumerate(messages)]
    return _one_call_each(fitted) if is_harmony else fitted


def _fitted(message: Mapping[str, Any], fields: Sequence[str], index: int) -> dict[str, Any]:
    given = {name: message[name] for name in _FIELDS if message.get(name)}
    if not given or message.get("role") != "assistant":
        return dict(message)
    for name, value in given.items():
        if not isinstance(value, str):
            raise TypeError(f"message {index}: {name} must be a string, not {type(value).__name__}")
    if len(set(given.values())) > 1:
        raise ValueError(f"message {index} has different texts in {' and '.join(given)}; give one of them")
    rest = {name: value for name, value in message.items() if name not in _FIELDS}
    return rest | dict.fromkeys(fields, next(iter(given.values())))


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For harmony: a message for each call, with the call's result behind it."""
    found: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, list):
            found.append(message)
            continue
        thinking, content = message.get("thinking"), message.get("content")
        if thinking and isinstance(content, str) and content:
            message = message | {"thinking": f"{thinking}\n{content}", "content": ""}
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            plain = {key: value for key, value in message.items() if key not in _FIELDS} | {"content": ""}
            found.append((message if number == 0 else plain) | {"tool_calls": [call]})
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            if (
                not own
                and number < len(results)
                and not any(result.get("tool_call_id") for result in results)
            ):
                own = [results[number]]
            found += own
            results = [result for result in results if not any(result is each for each in own)]
        found += results
    return found
