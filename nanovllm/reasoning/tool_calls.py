"""Tool calls in answers: parses them into OpenAI's form, whole or at the end of a stream. Calls nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import xxhash

from nanovllm.reasoning.splitter import first_of, num_held
from nanovllm.reasoning.tool_formats import Call, Format
from nanovllm.reasoning.values import parameters_of, typed


class ToolCalls(NamedTuple):
    """What an answer's text holds.

    text: the text without calls, and without the white space around them.
    calls: in order, each `{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}` with
    the arguments as JSON text.
    errors: why a text that begins like a call is none; it stays in the text.
    """

    text: str
    calls: list[dict[str, Any]]
    errors: list[str]


def parse_tool_calls(
    text: str, form: Format, tools: Iterable[Any] | None = None, salt: str = ""
) -> ToolCalls:
    """Find the tool calls in the text of an answer, without its thinking.

    form: an entry of `TOOL_CALLS`. tools: those of the conversation, in OpenAI's form; values that a model
    writes without quotes get their types from these, and stay text without them. salt: what makes the ids
    differ from those of other answers; equal answers with equal salts get equal ids.
    """
    schemas = parameters_of(tools)
    kept, calls, errors, at = [], list[dict[str, Any]](), list[str](), 0
    for call in form.calls(text):
        if call.error:
            errors.append(f"a tool call at character {call.start} does not parse: {call.error}")
            continue
        kept.append(text[at : call.start])
        at, half = call.end, call.name.partition(".")[0]
        if call.name not in schemas and half in schemas and call.name == f"{half}.{half}":
            call = call._replace(name=half)  # of a tool that is a namespace of its own
        calls.append(_in_openais_form(call, schemas.get(call.name, {}), f"{salt}/{len(calls)}/{text}"))
    kept.append(text[at:])
    if calls:
        kept = [
            kept[0].rstrip(),
            *(each.strip() for each in kept[1:-1]),
            kept[-1].lstrip() if at else kept[-1],
        ]
    elif not errors and first_of(text, form.opens)[1] == form.opens[0]:
        errors.append("a tool call begins and does not parse")
    return ToolCalls("".join(kept), calls, errors)


def _in_openais_form(call: Call, schemas: Any, salt: str) -> dict[str, Any]:
    arguments = call.arguments
    if not call.is_typed:
        arguments = {key: typed(value, schemas.get(key)) for key, value in arguments.items()}
    function = {"name": call.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    made = f"call_{xxhash.xxh3_128_hexdigest(salt.encode('utf-8', 'surrogatepass'))[:24]}"
    return {"id": call.id or made, "type": "function", "function": function}


class ToolCallStream:
    """The text of an answer in parts, without its calls: all behind the first mark of a call waits for the
    end.

    What `append` and `finish` return is joined to the text of `parse_tool_calls`.
    """

    def __init__(self, form: Format, tools: Iterable[Any] | None = None, salt: str = "") -> None:
        """As of `parse_tool_calls`."""
        self._form, self._tools, self._salt = form, tools, salt
        self._given: list[str] = []
        self._held = ""
        self._num_given = 0  # characters that `append` has returned
        self._is_held = False  # whether a call has begun

    def append(self, text: str) -> str:
        """Take new text; return what is certain to be text."""
        self._given.append(text)
        if self._is_held:
            return ""
        self._held += text
        at, mark = first_of(self._held, self._form.opens)
        if mark is None:
            at -= num_held(self._held, self._form.opens)
        self._is_held = mark is not None
        new = self._held[:at].rstrip()  # white space before a call is dropped
        self._held = self._held[len(new) :]
        self._num_given += len(new)
        return new

    def finish(self) -> ToolCalls:
        """The rest of the text, and the calls of the whole answer."""
        whole = parse_tool_calls("".join(self._given), self._form, self._tools, self._salt)
        return whole._replace(text=whole.text[self._num_given :])
