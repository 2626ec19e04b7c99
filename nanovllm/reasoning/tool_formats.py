"""Formats of tool calls, as a table: where calls stand in a text. Converts no argument and makes no id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from nanovllm.reasoning.gemma_calls import read_gemma_call


class Call(NamedTuple):
    """A call in a text.

    start, end: its place, with its marks. arguments: a JSON value, or for untyped values of text a dictionary
    of strings. is_typed: whether the values have types. id: of the model, if it writes one. error: why the
    text is no call, else "".
    """

    start: int
    end: int
    name: str
    arguments: Any
    is_typed: bool = True
    id: str | None = None
    error: str = ""


class Format(Protocol):
    """How a family writes calls. marks: what must stay in the text if it is one special token; the first ones
    begin calls. opens: marks by which a call, or the section of all, begins."""

    @property
    def marks(self) -> tuple[str, ...]: ...
    @property
    def opens(self) -> tuple[str, ...]: ...
    def calls(self, text: str) -> Iterator[Call]:
        """The calls in a whole text, in order and apart."""


_DECODER = json.JSONDecoder(strict=False)  # models write newlines in strings


class _Marked:
    """The marks of a format: those that begin calls, and more."""

    opens: tuple[str, ...]
    more_marks: tuple[str, ...]

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opens + self.more_marks


@dataclass(frozen=True)
class JsonCalls(_Marked):
    """Calls whose arguments are JSON.

    head: what stands before the JSON, with the groups `name` and `id` if it has them; without a name the JSON
    is an object with name and arguments. tail: what stands behind; an answer may end without it. noise: marks
    around calls, which are no text.
    """

    opens: tuple[str, ...]
    head: str
    tail: str
    more_marks: tuple[str, ...] = ()
    noise: str = ""

    def calls(self, text: str) -> Iterator[Call]:
        at, head, tail = 0, re.compile(self.head), re.compile(rf"\s*(?:{self.tail})")
        noise = re.compile(rf"\s*(?:{self.noise})") if self.noise else None
        while match := head.search(text, at):
            at = match.end()
            names = match.groupdict()
            try:
                value, end = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                yield Call(match.start(), at, "", None, error=f"its arguments are no JSON ({error})")
                continue
            behind = tail.match(text, end)
            if behind is None and text[end:].strip():
                yield Call(match.start(), at, "", None, error="text stands where the call must end")
                continue
            end = len(text) if behind is None else behind.end()
            start, at = match.start(), end
            while noise and (mark := noise.match(text, at)):
                at = mark.end()
            yield _json_call(start, at, names, value)


def _json_call(start: int, end: int, names: dict[str, Any], value: Any) -> Call:
    name, call_id = names.get("name"), names.get("id")
    if name is None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return Call(start, end, "", None, error="its JSON has no name")
        name = value["name"]
        value = value.get("arguments", value.get("parameters", {}))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return Call(start, end, name, None, error="its arguments are a string that is no JSON")
    if not isinstance(value, dict):
        return Call(start, end, name, None, error="its arguments are no object")
    return Call(start, end, name, value, id=call_id)


@dataclass(frozen=True)
class TaggedCalls(_Marked):
    """Calls whose arguments stand one by one between tags, as plain text.

    head: a regular expression with the group `name`. key: one with the group `key`, up to the value.
    close_value: the tag behind a value. close: a regular expression of what ends the call. trims: whether the
    template writes a newline on both sides of a value.

    A tag counts by its place, so that values may hold tags: a key stands first, or behind the end of a value;
    a value ends by the last closing tag before the next key, and a call by the last one before the next call.
    """

    opens: tuple[str, ...]
    head: str
    key: str
    close_value: str
    close: str
    more_marks: tuple[str, ...] = ()
    trims: bool = False
    noise: str = ""

    def calls(self, text: str) -> Iterator[Call]:
        heads, close = list(re.finditer(self.head, text)), re.compile(self.close)
        noise = re.compile(rf"\s*(?:{self.noise})") if self.noise else None
        at = 0
        while at < len(heads):
            match, limit = heads[at], len(text)
            at += 1
            closed: re.Match[str] | None = None
            scanned = match.end()
            while at <= len(heads):
                limit = heads[at].start() if at < len(heads) else len(text)
                for closed in close.finditer(text, scanned, limit):
                    scanned = closed.end()
                if closed is not None or at == len(heads):
                    break
                at += 1  # a head within a value
            if closed is None:
                yield Call(match.start(), len(text), match["name"], None, error="it has no end")
                return
            end = closed.end()
            while noise and (mark := noise.match(text, end)):
                end = mark.end()
            arguments, error = self._arguments(text[match.end() : closed.start()])
            yield Call(match.start(), end, match["name"].strip(), arguments, is_typed=False, error=error)

    def _arguments(self, body: str) -> tuple[dict[str, str], str]:
        """The arguments by name, and why they are none."""
        keys: list[re.Match[str]] = []
        for match in re.finditer(self.key, body):
            before = body[: match.start()].rstrip()
            if not before or (keys and before.endswith(self.close_value)):
                keys.append(match)
        if not keys:
            return {}, "a parameter has no beginning" if body.strip() else ""
        found: dict[str, str] = {}
        for match, limit in zip(keys, [*(each.start() for each in keys[1:]), len(body)], strict=True):
            value, tag, rest = body[match.end() : limit].rpartition(self.close_value)
            if not tag or rest.strip():
                return {}, f"the parameter {match['key']!r} has no end"
            if self.trims:
                value = value.removeprefix("\n").removesuffix("\n")
            found[match["key"].strip()] = value
        return found, ""


@dataclass(frozen=True)
class GemmaCalls(_Marked):
    """Gemma's calls, which are no JSON: `<|tool_call>call:NAME{key:value}<tool_call|>`."""

    opens: tuple[str, ...] = ("<|tool_call>",)
    more_marks: tuple[str, ...] = ("<tool_call|>", '<|"|>', "<|tool_response>")

    def calls(self, text: str) -> Iterator[Call]:
        at = 0
        for match in re.finditer(r"<\|tool_call>\s*call:(?P<name>[\w.:-]+)", text):
            if match.start() < at:
                continue  # within a string
            try:
                arguments, end = read_gemma_call(text, match.end())
            except ValueError as error:
                yield Call(match.start(), match.end(), match["name"], None, error=str(error))
                continue
            behind = re.compile(r"\s*<tool_call\|>(?:\s*<\|tool_response>)?").match(text, end)
            at = end if behind is None else behind.end()
            yield Call(match.start(), at, match["name"], arguments)


_FUNCTION_TAGS = TaggedCalls(
    opens=("<tool_call>", "<function="),
    more_marks=("</tool_call>",),
    head=r"(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)>",
    key=r"<parameter=(?P<key>[^>\n]+)>",
    close_value="</parameter>",
    close=r"</function>(?:\s*</tool_call>)?",
    trims=True,
)


@dataclass(frozen=True)
class MuseCalls(_Marked):
    """Calls of Muse Glimmer: tags in a message to a tool, whose header stands in the text. The same tags in a
    message to the user are a quotation."""

    opens: tuple[str, ...] = ("<|start|>",)
    more_marks: tuple[str, ...] = ("<|message|>", "<|eom|>", "<|eot|>")

    def calls(self, text: str) -> Iterator[Call]:
        heads = list(re.finditer(r"<\|start\|>assistant to=([^\s<]+)<\|message\|>", text))
        for number, match in enumerate(heads, 1):
            limit = heads[number].start() if number < len(heads) else len(text)
            closed = re.compile(r"</atem:function_calls>\s*<\|eo[mt]\|>").search(text, match.end(), limit)
            start, body = match.start(), text[match.end() : limit if closed is None else closed.end()]
            for call in _ATEM_TAGS.calls(body):
                yield call._replace(start=start, end=match.end() + call.end)
                start = match.end() + call.end
            if start == match.start():
                yield Call(start, match.end(), match[1], None, error="its message has no call")


_ATEM_TAGS = TaggedCalls(
    opens=("<atem:function_calls>",),
    head=r'<atem:invoke name="(?P<name>[^"]+)"\s*>',
    key=r'<atem:parameter name="(?P<key>[^"]+)"[^>]*>',
    close_value="</atem:parameter>",
    close="</atem:invoke>",
    noise=r"</atem:function_calls>|<\|eo[mt]\|>",
)
_FENCED = r"```json\s*\n"
_DEEPSEEK_MARKS = (
    *("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
_KIMI_MARKS = ("<|tool_calls_section_end|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")

# By the names of vLLM.
TOOL_CALLS: dict[str, Format] = {
    "hermes": JsonCalls(("<tool_call>",), r"<tool_call>\s*(?=\{)", "</tool_call>", ("</tool_call>",)),
    "granite4": JsonCalls(("<tool_call>",), r"<tool_call>\s*(?=\{)", "</tool_call>", ("</tool_call>",)),
    "qwen3_coder": _FUNCTION_TAGS,
    "seed_oss": TaggedCalls(
        opens=("<seed:tool_call>",),
        more_marks=("</seed:tool_call>",),
        head=r"<seed:tool_call>\s*<function=(?P<name>[^>\s]+)>",
        key=_FUNCTION_TAGS.key,
        close_value="</parameter>",
        close=r"</function>\s*</seed:tool_call>",
    ),
    "glm45": TaggedCalls(
        opens=("<tool_call>",),
        more_marks=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        head=r"<tool_call>\s*(?P<name>[^\s<{]+)\s*(?=<arg_key>|</tool_call>)",
        key=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>",
        close_value="</arg_value>",
        close="</tool_call>",
    ),
    "minimax_m2": TaggedCalls(
        opens=("<minimax:tool_call>",),
        more_marks=("</minimax:tool_call>",),
        head=r"""(?:<minimax:tool_call>\s*)?<invoke name=["']?(?P<name>[^"'>]+)["']?>""",
        key=r"""<parameter name=["']?(?P<key>[^"'>]+)["']?>""",
        close_value="</parameter>",
        close="</invoke>",
        noise="</minimax:tool_call>",
    ),
    "deepseek_v3": JsonCalls(
        ("<｜tool▁calls▁begin｜>",),
        rf"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n{_FENCED}",
        r"```\s*<｜tool▁call▁end｜>",
        _DEEPSEEK_MARKS,
        noise="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": JsonCalls(
        ("<｜tool▁calls▁begin｜>",),
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<name>[^<\n]+)<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        _DEEPSEEK_MARKS,
        noise="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": JsonCalls(
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)"
        r"(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
        r"<\|tool_call_end\|>",
        _KIMI_MARKS,
        noise=r"<\|tool_calls_section_end\|>",
    ),
    "openai": JsonCalls(
        ("<|channel|>",),
        r"<\|channel\|>\w* to=functions\.(?P<name>[^\s<]+)<\|message\|>\s*",
        r"<\|call\|>|<\|end\|>|<\|return\|>",
    ),
    "gemma4": GemmaCalls(),
    "muse_glimmer": MuseCalls(),
}
