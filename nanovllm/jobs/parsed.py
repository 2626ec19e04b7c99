"""Thinking and tool calls in the lines of jobs: what a row asks for, and what parsers have separated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.answers import CompletionOutput
from nanovllm.chat.conversations import Thinking


def how_it_ended(reason: str | None, text: str | None, reasoning: str | None, calls: Any) -> str:
    """The finish reason of an answer; one that has nothing but thinking is no success and says so."""
    return f"{reason} while thinking" if reasoning and not text and not calls else reason or ""


def thinking_of(template: Mapping[str, Any]) -> Thinking:
    """What a row asks of thinking. template: its arguments of `LLM.chat`."""
    return Thinking(None, template.get("reasoning_effort"))


def parsed_columns(outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
    """The columns of answers that parsers have separated; none without parsers."""
    first, more = outputs[0], dict[str, Any]()
    for name, several in (("reasoning", "reasonings"), ("tool_calls", "all_tool_calls")):
        if getattr(first, name) is not None:
            more[name] = getattr(first, name)
            if len(outputs) > 1:
                more[several] = [getattr(each, name) for each in outputs]
    if errors := [error for each in outputs for error in each.tool_call_errors or ()]:
        more["tool_call_errors"] = errors
    return more


def message_of(output: CompletionOutput) -> dict[str, Any]:
    """The message of a choice; without content beside tool calls, as OpenAI's."""
    message: dict[str, Any] = {"role": "assistant", "content": output.text}
    if output.reasoning is not None:
        message["reasoning"] = output.reasoning
    if output.tool_calls:
        message |= {"content": output.text or None, "tool_calls": output.tool_calls}
    return message
