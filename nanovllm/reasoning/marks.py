"""Marks: how each family of models writes its thinking, as a table. Splits nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Mark(str):
    """A piece of an answer that is known to be a mark, because it was one token of the vocabulary. The same
    characters, written with ordinary tokens, are a quotation and stay plain strings."""

    __slots__ = ()


class CallMark(NamedTuple):
    """The start of a tool call that may stand within the thinking, and ends it.

    mark: its first characters. follows: what must come next, after white space; else the mark is a quotation.
    """

    mark: str
    follows: str


@dataclass(frozen=True)
class Thinking:
    """How a family marks its thinking.

    start, end: the marks. label: text behind the start mark that belongs to it. calls: tool calls that may
    begin before the end mark, which the model then leaves out. lead: what the model writes before the start
    mark.
    """

    start: str = "<think>"
    end: str = "</think>"
    label: str = ""
    calls: tuple[CallMark, ...] = ()
    lead: str = ""


@dataclass(frozen=True)
class Channels:
    """Marks of harmony: an answer is a list of messages, each with a header, which names a channel or who
    reads the message.

    ends: the first one ends a message behind which the answer goes on. thinking: the channel, or the reader,
    of thinking. thought, text: headers of thinking and of text, behind the role. readers: those that are no
    tools.
    """

    begin: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    body: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|return|>", "<|call|>")
    thinking: str = "analysis"
    thought: str = "<|channel|>analysis<|message|>"
    text: str = "<|channel|>final<|message|>"
    readers: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (*filter(None, (self.begin, self.channel, self.constrain, self.body)), *self.ends)


_MUSE = Channels(
    *("<|start|>", "", "", "<|message|>", ("<|eom|>", "<|eot|>")),
    thinking="self",
    thought=" to=self<|message|>",
    text=" to=user<|message|>",
    readers=("self", "user"),
)
_FUNCTION_CALL = (CallMark("<tool_call>", "<function="),)
_KIMI_CALL = (CallMark("<|tool_calls_section_begin|>", ""),)

# By the names of vLLM where it has one. "think" is for any template that writes these marks.
REASONING: dict[str, Thinking | Channels] = {
    "qwen3": Thinking(calls=_FUNCTION_CALL),
    "deepseek_r1": Thinking(),
    "deepseek_v3": Thinking(),
    "openai_gptoss": Channels(),
    "muse_glimmer": _MUSE,
    "glm45": Thinking(calls=(CallMark("<tool_call>", ""),), lead="\n"),
    "smollm3": Thinking(),
    "nemotron_v3": Thinking(calls=_FUNCTION_CALL),
    "minimax_m2": Thinking(calls=(CallMark("<minimax:tool_call>", "<invoke"),)),
    "gemma4": Thinking("<|channel>", "<channel|>", "thought\n", (CallMark("<|tool_call>", "call:"),)),
    "granite": Thinking(calls=_FUNCTION_CALL),
    "kimi_k2": Thinking(calls=_KIMI_CALL),
    "exaone4": Thinking(),
    "olmo3": Thinking(),
    "seed_oss": Thinking(
        "<seed:think>", "</seed:think>", calls=(CallMark("<seed:tool_call>", "<function="),)
    ),
    "mistral": Thinking("[THINK]", "[/THINK]", calls=(CallMark("[TOOL_CALLS]", ""),)),
    "think": Thinking(),
}
