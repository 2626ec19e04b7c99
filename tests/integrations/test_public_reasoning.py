"""Thinking and tool calls with the chat templates that TRL ships: what a template writes is read back."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs TRL, whose chat templates are tried: pip install -e '.[trl]'")

from mark_tokenizer import MarkTokenizer
from test_tool_calls import WRITERS
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from nanovllm.chat.message_forms import Forms
from nanovllm.chat.templates import PLAIN
from nanovllm.reasoning.marks import REASONING, Channels
from nanovllm.reasoning.messages import fit_reasoning
from nanovllm.reasoning.parsers import marks_of as marks_of_family
from nanovllm.reasoning.prompts import Vocabulary, begin
from nanovllm.reasoning.templates import find_reasoning, find_tool_format, thinking_variables
from nanovllm.reasoning.tool_calls import parse_tool_calls
from nanovllm.reasoning.tool_formats import TOOL_CALLS

SPEC = find_spec("trl")
assert SPEC is not None and SPEC.submodule_search_locations
FOLDER = Path(SPEC.submodule_search_locations[0]) / "chat_templates"
# By file: the family, the format of calls, and whether an answer begins inside its thinking with it on
# and off; None: there is no switch.
EXPECTED: dict[str, tuple[str | None, str | None, bool, bool | None]] = {
    "deepseek_r1_distill": ("deepseek_r1", "deepseek_v3", True, None),
    "deepseekv3": ("deepseek_r1", "deepseek_v3", True, None),
    "gemma4": ("gemma4", "gemma4", False, False),
    "gemma4_v3": ("gemma4", "gemma4", False, False),
    "gemma4_v4": ("gemma4", "gemma4", False, False),
    "gemma4_v5": ("gemma4", "gemma4", False, False),
    "glm4moe": ("glm45", "glm45", False, False),
    "gptoss": ("openai_gptoss", "openai", False, None),
    "lfm2_2_5": ("think", None, False, None),
    "nemotron_3_nano": ("nemotron_v3", "qwen3_coder", True, False),
    "nemotron_3_5_lightning": ("nemotron_v3", "qwen3_coder", True, False),
    "nemotron_3_super": ("nemotron_v3", "qwen3_coder", True, False),
    "nemotron_3_ultra": ("nemotron_v3", "qwen3_coder", True, False),
    "qwen2_5": (None, "hermes", False, None),
    "qwen3": ("qwen3", "hermes", False, False),
    "qwen3_5_think": ("qwen3", "qwen3_coder", True, False),
    "qwen3_5_nothink": ("qwen3", "qwen3_coder", True, False),
    "qwen3_6": ("qwen3", "qwen3_coder", True, False),
    "qwen3_8": ("qwen3", "qwen3_coder", True, False),
    "qwen3_instruct_2507": (None, "hermes", False, None),
    "llama3_1": (None, None, False, None),
}
EFFORTS = {
    "gptoss": {"low": {"reasoning_effort": "low"}},
    "qwen3_8": {"xhigh": {"reasoning_effort": "xhigh"}},
    "nemotron_3_super": {"low": {"low_effort": True}},
    "nemotron_3_ultra": {"medium": {"medium_effort": True}},
}
CITY = {"city": 'São "Paulo"\n  </b>', "days": 3, "ok": True, "tags": ["a", {"b": None}]}
PROPERTIES = {
    "city": {"type": "string", "description": "a city"},
    "days": {"type": "integer", "description": "days"},
    "ok": {"type": "boolean", "description": "yes or no"},
    "tags": {"type": "array", "description": "some", "items": {"type": "string"}},
}
FUNCTION = {
    "name": "get_weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": PROPERTIES},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "What of <think> and </think>?"}


class Tokenizer(PreTrainedTokenizerBase):
    special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # noqa: RUF012


def template_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text("utf-8")


def rendered(template: str, messages: list[Any], **options: Any) -> str:
    return str(Tokenizer().apply_chat_template(messages, chat_template=template, tokenize=False, **options))


def marks_of(template: str) -> list[str]:
    """What looks like a mark in a template, and is one token of its models."""
    return sorted(
        {"<think>", "</think>", *re.findall(r"<\|[^<>{}'\"\s]*\|?>|<[a-z_]*\|>|<｜[^<>]*｜>", template)}
    )


def found(find: Any, template: str) -> str | None:
    try:
        return str(find("auto", template))
    except ValueError:
        return None


@pytest.mark.parametrize("name", EXPECTED)
def test_the_family_is_found_and_answers_begin_where_the_template_says(name: str) -> None:
    template = template_of(name)
    reasoning, calls, on, off = EXPECTED[name]
    assert (found(find_reasoning, template), found(find_tool_format, template)) == (reasoning, calls)
    if off is None:
        with pytest.raises(ValueError, match="no switch for thinking"):
            thinking_variables(template, enable_thinking=False)
    if reasoning is None:
        return
    family, tokenizer = REASONING[reasoning], MarkTokenizer(marks_of(template))
    marks = family.marks if isinstance(family, Channels) else (family.start, family.end)
    vocabulary = Vocabulary(tokenizer, marks)  # type: ignore[arg-type]
    for is_on, expected in ((True, on), (False, off)):
        if off is not None or is_on:
            variables = {} if off is None else thinking_variables(template, enable_thinking=is_on)
            prompt = rendered(template, [USER], add_generation_prompt=True, **variables)
            assert begin(family, vocabulary, tokenizer.encode(prompt)).is_open is expected, prompt
    for effort, variables in EFFORTS.get(name, {}).items():
        assert thinking_variables(template, reasoning_effort=effort) == variables
        rendered(template, [USER], add_generation_prompt=True, **variables)


def conversation(arguments: list[Any], **fields: Any) -> list[dict[str, Any]]:
    """A question, an answer with a call for each of `arguments`, and the results."""
    calls = [
        {
            "id": f"call0000{number}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": each},
        }
        for number, each in enumerate(arguments)
    ]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "sun"} for each in calls]
    return [USER, {"role": "assistant", "content": None, "tool_calls": calls, **fields}, *results]


def fitted(template: str, messages: list[Any]) -> str:
    """The text of messages in the forms that the template takes."""
    forms = Forms(lambda messages: rendered(template, messages, tools=TOOLS, **PLAIN))
    return rendered(template, forms.fit(fit_reasoning(messages, template)), tools=TOOLS)


# R1's template for its distillations writes calls beside a null content alone, which transformers drops.
READ_BACK = [name for name, each in EXPECTED.items() if each[1] and name != "deepseek_r1_distill"]


@pytest.mark.parametrize("name", READ_BACK)
def test_calls_that_a_template_writes_are_read_back(name: str) -> None:
    """From arguments as objects and as JSON text."""
    template = template_of(name)
    format_name = find_tool_format("auto", template)
    given = [CITY, {"city": "x", "tags": []}]
    for arguments in (given, [json.dumps(each, ensure_ascii=False) for each in given]):
        text = fitted(template, conversation(arguments)).rpartition(USER["content"])[2]
        if format_name == "openai":  # the template writes the recipient before the channel
            text = re.sub(r"<\|start\|>assistant (to=\S+?)(<\|channel\|>commentary) json", r"\2 \1", text)
        read = [each["function"] for each in parse_tool_calls(text, TOOL_CALLS[format_name], TOOLS).calls]
        assert [each["name"] for each in read] == ["get_weather"] * 2
        assert [json.loads(each["arguments"]) for each in read] == given


@pytest.mark.parametrize("name", [name for name in READ_BACK if EXPECTED[name][0]])
def test_earlier_thinking_reaches_the_template(name: str) -> None:
    """In a loop of tools, from any of the fields; DeepSeek's template has none."""
    for field in ("reasoning", "reasoning_content", "thinking"):
        text = fitted(template_of(name), conversation([CITY], **{field: "Zorbit"}))
        assert ("Zorbit" in text) is (name != "deepseekv3")


# By the name of a response template of TRL's: our format, what stands before a call, and the prompt's end.
RESPONSES = {
    "qwen3_template": ("hermes", "<think>\nhm\n</think>\n\nHello", "<|im_start|>assistant\n"),
    "qwen3_5_template": ("qwen3_coder", "hm\n</think>\n\nHello", "<|im_start|>assistant\n<think>\n"),
    "nemotron_3_template": ("qwen3_coder", "hm\n</think>\nHello", "<|im_start|>assistant\n<think>\n"),
    "glm4moe_template": ("glm45", "\n<think>hm</think>\nHello", "<|assistant|>"),
    "gemma4_template": ("gemma4", "<|channel>thought\nhm<channel|>Hello", "<|turn>model\n"),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_answers_are_read_as_transformers_reads_them(name: str) -> None:
    """Where no value holds a mark; transformers drops white space around all parts."""
    parsing = pytest.importorskip("transformers.utils.chat_parsing", reason="transformers 5.13 has it")
    from trl import chat_template_utils

    format_name, head, prefix = RESPONSES[name]
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": PROPERTIES}}
    tools = [{"type": "function", "function": tool}]
    full = {"city": "12", "days": 3, "ok": True, "tags": ["a", 1]}
    for given in ({"city": "x"}, full, {"city": "{}", "ok": False}):
        answer = f"{head}\n{WRITERS[format_name]('get_weather', given)}"
        theirs = parsing.parse_response(
            answer, getattr(chat_template_utils, name), prefix=prefix, tools=tools
        )
        family = REASONING["gemma4" if format_name == "gemma4" else "qwen3"]
        tokenizer = MarkTokenizer(["<think>", "</think>", "<|im_start|>", "<|turn>", "<|assistant|>"])
        vocabulary = Vocabulary(tokenizer, marks_of_family(family))  # type: ignore[arg-type]
        splits = begin(family, vocabulary, tokenizer.encode(prefix))
        mark_of = vocabulary.mark_of
        parts = [
            splits.feed(mark_of.get(each, tokenizer.decode([each]))) for each in tokenizer.encode(answer)
        ]
        reasoning, text = map("".join, zip(*parts, splits.finish(), strict=True))
        ours = parse_tool_calls(text, TOOL_CALLS[format_name], tools)
        assert (reasoning.strip(), ours.text.strip()) == (theirs["reasoning_content"], theirs["content"])
        functions = [each["function"] for each in ours.calls]
        read = [{"name": each["name"], "arguments": json.loads(each["arguments"])} for each in functions]
        assert read == [each["function"] for each in theirs["tool_calls"]]
