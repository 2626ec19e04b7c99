"""What chat templates say of thinking: the family, the switches, the fields, and where an answer begins."""

from __future__ import annotations

from typing import Any

import pytest
from mark_tokenizer import MarkTokenizer

from nanovllm.reasoning.marks import REASONING, Channels
from nanovllm.reasoning.messages import fit_reasoning
from nanovllm.reasoning.prompts import Vocabulary, begin
from nanovllm.reasoning.splitter import Split, Splits
from nanovllm.reasoning.templates import (
    find_reasoning,
    find_tool_format,
    read_template,
    reasoning_fields,
    thinking_variables,
)

R1 = "{{ '<｜Assistant｜>' + content.split('</think>')[-1] }}{{ '<｜Assistant｜><think>\\n' }}"
V31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ '<｜Assistant｜>' }}"
    "{% if thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}{{ '<｜tool▁call▁begin｜>' }}"
)
CHATML = (
    "{{ '<|im_start|>' }}{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>"
)
QWEN3 = CHATML + '{% endif %}{{ message.reasoning_content }}<tool_call>{"name": 1}</tool_call>'
QWEN3_5 = CHATML + "{% endif %}<tool_call>\n<function=f>"
QWEN3_8 = (
    QWEN3_5 + "{% set effort = reasoning_effort|default('xhigh') %}"
    "{% if effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception(effort) }}{% endif %}"
)
NEMOTRON = QWEN3_5 + "{% set x = truncate_history_thinking %}{% set low_effort = low_effort or false %}"
GPT_OSS = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}" + (
    "{{ '<|start|>' + message['thinking'] + 'functions.' }}<|channel|>analysis<|message|>"
)
MUSE = "<|start|>assistant to=self<|message|>{{ reasoning_strength }}<|eom|><atem:invoke name="
GLM = "{{ '/nothink' if enable_thinking is defined and not enable_thinking }}<think></think><arg_key>"
SMOLLM3 = "{% set on = enable_thinking | default(true) %}{{ xml_tools }}<think>\n\n</think><tool_call>"
MINIMAX = "<minimax:tool_call>{{ '<think>\\n' }}</think>"
GEMMA4 = "{% if enable_thinking %}<|think|>{% endif %}<|channel>thought\n<channel|><|tool_call>call:f{}"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|><think></think>{{ thinking }}"
GRANITE = "<|start_of_role|>{{ enable_thinking }}<think>\n</think><tool_call>\n<function=f>"
GRANITE_4_0 = "<|start_of_role|><tool_call>"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"

FOUND = {
    R1: ("deepseek_r1", None),
    V31: ("deepseek_v3", "deepseek_v31"),
    QWEN3: ("qwen3", "hermes"),
    QWEN3_5: ("qwen3", "qwen3_coder"),
    QWEN3_8: ("qwen3", "qwen3_coder"),
    NEMOTRON: ("nemotron_v3", "qwen3_coder"),
    GPT_OSS: ("openai_gptoss", "openai"),
    MUSE: ("muse_glimmer", "muse_glimmer"),
    GLM: ("glm45", "glm45"),
    SMOLLM3: ("smollm3", "hermes"),
    MINIMAX: ("minimax_m2", "minimax_m2"),
    GEMMA4: ("gemma4", "gemma4"),
    KIMI: ("kimi_k2", "kimi_k2"),
    GRANITE: ("granite", "qwen3_coder"),
    GRANITE_4_0: (None, "hermes"),
    "<think>": ("think", None),
    PLAIN: (None, None),
}


@pytest.mark.parametrize("template", FOUND)
def test_the_template_shows_the_family(template: str) -> None:
    for find, name, option in zip(
        (find_reasoning, find_tool_format), FOUND[template], ("reasoning_parser", "tool_parser"), strict=True
    ):
        if name is None:
            with pytest.raises(ValueError, match=rf"^{option}='auto'.* no marks of .* (hermes|deepseek_r1)"):
                find("auto", template)
        else:
            assert find("auto", template) == name


def test_names() -> None:
    assert find_reasoning("qwen3", None) == "qwen3" and find_tool_format("hermes", None) == "hermes"
    with pytest.raises(
        ValueError, match=r"reasoning_parser='qwen4' is not known; pass 'auto' or one of .*qwen3"
    ):
        find_reasoning("qwen4", QWEN3)
    with pytest.raises(
        ValueError, match=r"tool_parser='auto' reads the model's chat template.* one of .*hermes"
    ):
        find_tool_format("auto", None)


@pytest.mark.parametrize(
    ("template", "off", "efforts"),
    [
        (QWEN3, {"enable_thinking": False}, None),
        (V31, {"thinking": False}, None),
        (KIMI, {"thinking": False}, None),
        (GLM, {"enable_thinking": False}, None),
        (SMOLLM3, {"enable_thinking": False}, None),
        (GEMMA4, {"enable_thinking": False}, None),
        ("{{ thinking_mode }}", {"thinking_mode": "disabled"}, None),
        ("{{ thinking }}{{ enable_thinking }}", {"thinking": False, "enable_thinking": False}, None),
        (R1, None, None),
        (MINIMAX, None, None),
        ("{% set thinking = message.thinking %}{{ thinking }}", None, None),  # no variable from outside
        (
            GPT_OSS,
            None,
            {"low": {"reasoning_effort": "low"}, "high": {"reasoning_effort": "high"}, "max": None},
        ),
        (
            QWEN3_8,
            {"enable_thinking": False},
            {"xhigh": {"reasoning_effort": "xhigh"}, "low": {"reasoning_effort": "low"}, "high": None},
        ),
        (NEMOTRON, {"enable_thinking": False}, {"low": {"low_effort": True}, "high": {}, "medium": None}),
        ("{{ reasoning_effort }}", None, {"any": {"reasoning_effort": "any"}}),
    ],
)
def test_switches(template: str, off: Any, efforts: Any) -> None:
    assert thinking_variables(template) == {}
    if off is None:
        with pytest.raises(ValueError, match="no switch for thinking"):
            thinking_variables(template, enable_thinking=False)
    else:
        assert thinking_variables(template, enable_thinking=False) == off
        on = {name: "enabled" if value == "disabled" else True for name, value in off.items()}
        assert thinking_variables(template, enable_thinking=True) == on
    if efforts is None:
        with pytest.raises(ValueError, match="reads no effort"):
            thinking_variables(template, reasoning_effort="high")
    for effort, expected in (efforts or {}).items():
        if expected is None:
            with pytest.raises(ValueError, match=f"{effort!r} is not one that .*low"):
                thinking_variables(template, reasoning_effort=effort)
        else:
            assert thinking_variables(template, reasoning_effort=effort) == expected


def test_templates_are_parsed_only() -> None:
    with pytest.raises(ValueError, match="cannot be parsed"):
        read_template("{% if %}")
    with pytest.raises(ValueError, match="cannot be parsed"):
        read_template("{{ " + "(" * 5000 + ")" * 5000 + " }}")
    read_template(
        "{{ 'a' * 10 ** 12 }}{% for i in range(10 ** 12) %}{% endfor %}{% generation %}a{% endgeneration %}"
    )
    assert read_template("{% for a in a %}{{ a }}{% endfor %}").variables == {"a"}
    assert read_template("{% macro m(b) %}{{ b }}{% endmacro %}{{ m(c) }}").variables == {"c"}
    assert reasoning_fields(GPT_OSS) == ["thinking"] and reasoning_fields(QWEN3) == ["reasoning_content"]
    assert reasoning_fields("{{ m.get('reasoning') or m.reasoning_content }}") == [
        "reasoning_content",
        "reasoning",
    ]


# -- earlier answers -----------------------------------------------------------------------------------------


def call(number: int, **others: Any) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}, **others}


def test_earlier_thinking_stands_in_the_fields_that_the_template_reads() -> None:
    user = {"role": "user", "content": "a", "thinking": "kept as it is"}
    for field in ("reasoning", "reasoning_content", "thinking"):
        messages = [user, {"role": "assistant", "content": "b", field: "hm"}]
        expected = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
        assert fit_reasoning(messages, QWEN3) == [user, expected]
        assert fit_reasoning(messages, R1)[1] == {"role": "assistant", "content": "b"}  # it reads none
    with pytest.raises(ValueError, match="message 0 has different texts in reasoning_content and thinking"):
        fit_reasoning([{"role": "assistant", "thinking": "a", "reasoning_content": "b"}], QWEN3)
    with pytest.raises(TypeError, match="message 0: reasoning must be a string, not list"):
        fit_reasoning([{"role": "assistant", "reasoning": ["a"]}], QWEN3)


def test_gpt_oss_gets_one_call_a_message_each_before_its_result() -> None:
    answer = {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [call(1), call(2)]}
    results = [{"role": "tool", "tool_call_id": f"c{number}", "content": str(number)} for number in (2, 1)]
    first, one, second, two, last = fit_reasoning([answer, *results, {"role": "user"}], GPT_OSS)
    assert first == {"role": "assistant", "content": "", "thinking": "hm\nI look.", "tool_calls": [call(1)]}
    assert second == {"role": "assistant", "content": "", "tool_calls": [call(2)]}
    assert (one["content"], two["content"], last) == ("1", "2", {"role": "user"})
    nameless = [{"role": "tool", "content": str(number)} for number in (1, 2)]
    assert [m.get("content") for m in fit_reasoning([answer, *nameless], GPT_OSS)] == ["", "1", "", "2"]


# -- where an answer begins ----------------------------------------------------------------------------------

TURNS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|channel>",
    "<channel|>",
]


def begun(name: str, prompt: str, tokens: list[str]) -> Splits:
    family = REASONING[name]
    marks = family.marks if isinstance(family, Channels) else (family.start, family.end)
    tokenizer = MarkTokenizer(tokens)
    return begin(family, Vocabulary(tokenizer, marks), tokenizer.encode(prompt))  # type: ignore[arg-type]


def split(splits: Splits, answer: str) -> Split:
    """The answer's text, whose marks are no tokens here or stand in no answer."""
    parts = [splits.feed(answer), splits.finish()]
    return Split(*map("".join, zip(*parts, strict=True)))


@pytest.mark.parametrize(
    ("prompt", "is_inside"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n</think>", False),
        ("<|im_start|>assistant\n<think>\nWell, I begin", True),  # a message that is continued
        ("<|im_start|>assistant\n<think>\na</think>\n\nYes and", False),
        ("<|im_start|>user\nsay <think><|im_end|>\n<|im_start|>assistant\n", False),  # a question about marks
        ("<|im_start|>user\nsay </think><|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\n<think>a</think><|im_end|>\n<|im_start|>assistant\n", False),
        ("plain text without turns", False),
        ("plain text <think>", True),
    ],
)
def test_the_prompt_says_where_the_answer_begins(prompt: str, is_inside: bool) -> None:
    for marks in ([], ["<think>", "</think>"]):
        splits = begun("qwen3", prompt, [*TURNS, *marks])
        assert splits.is_open is is_inside
        assert split(splits, "one\n") == (("one\n", "") if is_inside else ("", "one\n"))


def test_a_newline_is_dropped_once() -> None:
    for prompt, reasoning in [("<think>", "one"), ("<think>\n", "\none")]:
        splits = begun("qwen3", f"<|im_start|>assistant\n{prompt}", [*TURNS, "<think>", "</think>"])
        assert split(splits, "\none").reasoning == reasoning


def test_gemma_after_a_tools_result() -> None:
    assert begun("gemma4", "<|im_start|>model\n<|channel>thought\n", TURNS).is_open
    assert split(begun("gemma4", "<|im_start|>model\n<|channel>", TURNS), "thought\none").reasoning == "one"


def test_harmony_in_a_prompt() -> None:
    for prompt, expected in [
        ("<|start|>user<|message|>hi<|end|><|start|>assistant", ("", "one")),
        ("<|start|>assistant<|channel|>analysis<|message|>Well, ", ("one", "")),
        ("<|start|>assistant<|channel|>analysis<|message|>a<|end|><|start|>assistant", ("", "one")),
    ]:
        assert split(begun("openai_gptoss", prompt, TURNS), "one") == expected
    plain = begun("openai_gptoss", "A letter to=functions.f", [])  # a prompt without messages
    assert split(plain, "<|channel|>final<|message|>one") == ("", "one")
