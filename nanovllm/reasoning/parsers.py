"""AnswerParsers: what an engine does to its answers with `reasoning_parser` and `tool_parser`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from nanovllm.answers import CompletionOutput, changed
from nanovllm.extras.stop_strings import StopSearch, StopStrings, text_stream
from nanovllm.params import SamplingParams
from nanovllm.reasoning.answers import CountedThinking, ThinkingStream
from nanovllm.reasoning.marks import REASONING, Channels, Thinking
from nanovllm.reasoning.prompts import Vocabulary, begin
from nanovllm.reasoning.splitter import Begin, Splits, Splitter
from nanovllm.reasoning.templates import find_reasoning, find_tool_format
from nanovllm.reasoning.tool_calls import ToolCallStream, parse_tool_calls
from nanovllm.reasoning.tool_formats import TOOL_CALLS, Format
from nanovllm.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Calls of these forms are messages, which a reasoning parser finds.
_NEEDED = {"openai": "openai_gptoss", "muse_glimmer": "muse_glimmer"}


class Parsed(NamedTuple):
    """An answer in parts. reasoning: None without a reasoning parser. tool_calls, errors: as of `ToolCalls`;
    None without a tool parser. num_reasoning_tokens: the tokens within the thinking, with its marks."""

    reasoning: str | None
    text: str
    tool_calls: list[dict[str, Any]] | None
    errors: list[str] | None
    num_reasoning_tokens: int

    def put_into(self, output: CompletionOutput) -> CompletionOutput:
        """A copy of an output with these parts."""
        return changed(
            output,
            text=self.text,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            tool_call_errors=self.errors,
            num_reasoning_tokens=self.num_reasoning_tokens,
        )


class Asked(NamedTuple):
    """What is known of an answer before it comes: its prompt, its number, and the tools of its
    conversation."""

    prompt_ids: Sequence[int]
    number: int = 0
    tools: Any = None


class AnswerParsers:
    """The parsers of one engine with one tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, reasoning_parser: str | None, tool_parser: str | None
    ) -> None:
        """reasoning_parser, tool_parser: "auto" or a name; None: none. ValueError for a name that is not
        known, and where "auto" finds none."""
        self.tokenizer = tokenizer
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        self.family: Thinking | Channels | None = None
        self._form: Format | None = None
        marks: set[str] = set()
        if reasoning_parser is not None:
            self.family = REASONING[find_reasoning(reasoning_parser, template)]
            marks |= marks_of(self.family)
        if tool_parser is not None:
            name = find_tool_format(tool_parser, template)
            needed = _NEEDED.get(name)
            if needed is not None and self.family is not REASONING[needed]:
                raise ValueError(f"tool_parser={name!r} needs reasoning_parser={needed!r} or 'auto', too")
            self._form = TOOL_CALLS[name]
        self.vocabulary = Vocabulary(tokenizer, marks, () if self._form is None else self._form.marks)

    def splits(self, prompt_ids: Sequence[int]) -> Splits:
        """What separates the answer to a prompt."""
        if self.family is None:
            return Splitter(Thinking("", ""), Begin.OUTSIDE, ())
        return begin(self.family, self.vocabulary, prompt_ids)

    def stream(
        self, detokenizer: Detokenizer, asked: Asked, search: StopSearch, min_tokens: int = 0
    ) -> ParsedText:
        """What decodes and separates an answer token by token, and searches its text for stop strings."""
        stream = self._stream(detokenizer, asked)
        decodes: Any = stream
        return ParsedText(self, asked, stream, StopStrings(search, decodes, min_tokens))

    def call_stream(self, asked: Asked) -> ToolCallStream | None:
        """What finds the tool calls of an answer whose text comes in parts; None without a tool parser."""
        return None if self._form is None else ToolCallStream(self._form, asked.tools, _salt(asked))

    def whole(self, detokenizer: Detokenizer, asked: Asked, token_ids: Sequence[int]) -> Parsed:
        """Separate an answer that has ended."""
        if self.vocabulary.searched:
            stream = self._stream(detokenizer, asked)
            for token_id in token_ids:
                stream.append(token_id)
            stream.finish()
            return self.parsed(stream.reasoning, stream.text, asked, stream.num_reasoning_tokens)
        counted, mark_of = CountedThinking(self.splits(asked.prompt_ids)), self.vocabulary.mark_of
        parts, before = [], list(asked.prompt_ids)
        for is_mark, run in groupby(token_ids, mark_of.__contains__):
            ids = list(run)
            if is_mark:
                parts += [counted.feed(mark_of[token_id]) for token_id in ids]
            else:
                parts.append(counted.feed(detokenizer.text(before, ids), len(ids)))
            before += ids
        parts.append(counted.finish())
        reasoning, text = ("".join(each) for each in zip(*parts, strict=True))
        return self.parsed(reasoning, text, asked, counted.number)

    def _stream(self, detokenizer: Detokenizer, asked: Asked) -> ThinkingStream:
        splits = self.splits(asked.prompt_ids)
        behind = partial(text_stream, detokenizer)
        return ThinkingStream(behind, asked.prompt_ids, splits, self.vocabulary.mark_of)

    def parsed(self, reasoning: str, text: str, asked: Asked, count: int) -> Parsed:
        """An answer of which the thinking is known, with `count` tokens, and the text."""
        found = None if self.family is None else reasoning
        if self._form is None:
            return Parsed(found, text, None, None, count)
        calls = parse_tool_calls(text, self._form, asked.tools, _salt(asked))
        return Parsed(found, calls.text, calls.calls, calls.errors, count)


class ParsedText:
    """The `StopStrings` of an answer that is separated: stop strings count in the text behind the
    thinking."""

    reason = "stop"

    def __init__(
        self, parsers: AnswerParsers, asked: Asked, stream: ThinkingStream, stops: StopStrings
    ) -> None:
        """stops: of the texts of `stream`."""
        self._parsers, self._asked, self._stream, self._stops = parsers, asked, stream, stops
        self._calls = parsers.call_stream(asked)

    @property
    def found(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    @property
    def num_tokens(self) -> int:
        """As of `StopStrings`."""
        return self._stops.num_tokens

    def append(self, token_id: int) -> bool:
        """Decode the next token; return whether a stop string was found."""
        return self._stops.append(token_id)

    def finish(self) -> bool:
        """As of `StopStrings`; what was held back, because it might have begun a mark, is text now."""
        return self.found is not None or self._stops.read(self._stream.finish())

    def take(self) -> str:
        """Return the new text since the last call, as far as it is certain."""
        text = self._stops.take()
        return text if self._calls is None else self._calls.append(text)

    def take_reasoning(self) -> str | None:
        """Return the new thinking since the last call; None without a reasoning parser."""
        return None if self._parsers.family is None else self._stream.take()

    def completion(self, params: SamplingParams, index: int, token_ids: list[int]) -> CompletionOutput:
        """As `StopStrings.completion`."""
        output = self._stops.completion(params, index, token_ids[: self.num_tokens])
        return self.parsed(params.include_stop_str_in_output, index).put_into(output)

    def parsed(self, include: bool = False, number: int = 0) -> Parsed:
        """The whole answer, once, at its end. include: with the stop string that ended it. number: of the
        answer, as of `Asked`."""
        if self.found is None:
            self._stream.finish()
            text = self._stream.text
        else:
            text = self._stops.text(include)
        stream = self._stream
        asked = self._asked._replace(number=number)
        return self._parsers.parsed(stream.reasoning, text, asked, stream.num_reasoning_tokens)


def marks_of(family: Thinking | Channels) -> set[str]:
    """All marks of a family that must be seen in an answer."""
    if isinstance(family, Channels):
        return set(family.marks)
    return {family.start, family.end, *(call.mark for call in family.calls)}


def _salt(asked: Asked) -> str:
    """What differs between the answers of one conversation."""
    digest = xxhash.xxh3_64_hexdigest(",".join(map(str, asked.prompt_ids[-4096:])).encode())
    return f"{len(asked.prompt_ids)}/{digest}/{asked.number}"
