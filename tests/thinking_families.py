"""The families of models that think or call functions, each with a chat template of its kind.

A template here writes what the family's own does: turns, switches, earlier thinking, calls and results. Its
answers are written by `thinking` and by the writers of calls in tests/cpu/text/test_tool_calls.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinking_templates import (
    DEEPSEEK,
    DEEPSEEK_V31,
    FUNCTION,
    GEMMA,
    GLM,
    GLM_47,
    HARMONY,
    HERMES,
    MINIMAX,
    MUSE,
    past,
    say,
    switched,
    template,
)

THINK = ("<think>", "</think>")
TOOL = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class Family:
    """What is known of one family.

    reasoning, calls: names of our parsers; None: it has none. marks: what is one token. special: whether they
    are special tokens. opens: whether a prompt opens the thinking by default, with it on, with it off, and
    behind results of calls; None: there is no such switch. begins, ends: what the model writes around its
    thinking where the prompt has not begun it. efforts: variables by our word. thought: the field of an
    earlier message's thinking. order: how the family's own template writes a call, where a model writes
    another order.
    """

    template: str
    reasoning: str | None
    calls: str
    marks: tuple[str, ...]
    special: bool = False
    opens: tuple[bool, bool | None, bool | None, bool] = (False, False, False, False)
    begins: str = "<think>\n"
    ends: str = "\n</think>\n\n"
    switch: str | None = "enable_thinking"
    efforts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    thought: str | None = "reasoning_content"

    @property
    def in_messages(self) -> bool:
        """Whether thinking, text and calls are messages of their own."""
        return self.reasoning in ("openai_gptoss", "muse_glimmer")

    def thinking(self, thought: str, text: str, is_open: bool) -> str:
        """An answer. is_open: whether its prompt has opened the thinking."""
        return f"{'' if is_open else self.begins}{thought}{self.ends}{text}"


CHATML: Any = {"user": "<|im_start|>ROLE\n", "close": "<|im_end|>\n", "assistant": "<|im_start|>assistant\n"}
CHATML_THOUGHT = past("<think>\n", "\n</think>\n\n")
CHATML_MARKS = ("<|im_start|>", "<|im_end|>", *THINK, *TOOL)
PAIR = "<think>\n\n</think>\n\n"
ON_OFF = (True, True, False, True)  # the prompt opens the thinking unless it is switched off
EFFORT = (
    "{% set effort = reasoning_effort | default('xhigh') %}{% if effort not in ('xhigh', 'medium', 'low') %}"
    "{{ raise_exception('no such effort') }}{% endif %}"
    + say("<|im_start|>system\nEffort: ")
    + "{{ effort }}"
    + say("<|im_end|>\n")
)
DEEPSEEK_TURNS: Any = {"user": "<｜User｜>", "close": "<｜end▁of▁sentence｜>", "assistant": "<｜Assistant｜>"}
DEEPSEEK_MARKS = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", *THINK),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
)
NOT_BEHIND_RESULTS = "{% if messages[-1].role != 'tool' %}"
GLM_TURNS: Any = {"user": "<|ROLE|>\n", "close": "", "assistant": "<|assistant|>"}
GLM_MARKS = (
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    *THINK,
    *TOOL,
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
GRANITE_TURNS: Any = {
    "user": "<|start_of_role|>ROLE<|end_of_role|>",
    "close": "<|end_of_text|>\n",
    "assistant": "<|start_of_role|>assistant<|end_of_role|>",
}
GRANITE_MARKS = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", *THINK, *TOOL)


def qwen(opening: str, calls: str, head: str = "", **more: Any) -> Family:
    text = template(**CHATML, opening=opening, calls=calls, thought=CHATML_THOUGHT, head=head)
    name = "hermes" if calls is HERMES else "qwen3_coder"
    return Family(text, **{"reasoning": "qwen3", "calls": name, "marks": CHATML_MARKS, **more})


def nemotron(flag: str = "", efforts: Any = ()) -> Family:
    """flag: the variable of a lower effort."""
    head = "{% set kept = truncate_history_thinking | default(true) %}"
    head += f"{{% if {flag} | default(false) %}}{say('Think little. ')}{{% endif %}}" if flag else ""
    opening = switched("<think>\n", "<think></think>")
    return qwen(opening, FUNCTION, head, reasoning="nemotron_v3", opens=ON_OFF, efforts=dict(efforts))


FAMILIES: dict[str, Family] = {
    "qwen3": qwen(
        "{% if enable_thinking is defined and enable_thinking is false %}" + say(PAIR) + "{% endif %}", HERMES
    ),
    "qwen3_2507_thinking": qwen(say("<think>\n"), HERMES, opens=(True, None, None, True), switch=None),
    "qwen3_5": qwen(switched("<think>\n", PAIR), FUNCTION, opens=ON_OFF),
    "qwen3_5_small": qwen(
        switched("<think>\n", PAIR, default=False), FUNCTION, opens=(False, True, False, False)
    ),
    "qwen3_6": qwen(
        switched("<think>\n", PAIR),
        FUNCTION,
        "{% set kept = preserve_thinking | default(false) %}",
        opens=ON_OFF,
    ),
    "qwen3_8": qwen(
        switched("<think>\n", PAIR),
        FUNCTION,
        EFFORT,
        opens=ON_OFF,
        efforts={word: {"reasoning_effort": word} for word in ("xhigh", "medium", "low")},
    ),
    "deepseek_r1": Family(
        template(
            **DEEPSEEK_TURNS,
            opening=NOT_BEHIND_RESULTS + say("<think>\n") + "{% endif %}",
            calls=DEEPSEEK,
        ).replace("m.content or ''", "(m.content or '').split('</think>')[-1]"),
        *("deepseek_r1", "deepseek_v3", DEEPSEEK_MARKS),
        opens=(True, None, None, False),
        switch=None,
        thought=None,
    ),
    "deepseek_v31": Family(
        template(
            **DEEPSEEK_TURNS,
            head="{% if thinking is not defined %}{% set thinking = false %}{% endif %}",
            opening=NOT_BEHIND_RESULTS + switched("<think>", "</think>", "thinking") + "{% endif %}",
            calls=DEEPSEEK_V31,
            turn=say("<｜Assistant｜></think>"),
        ),
        *("deepseek_v3", "deepseek_v31", DEEPSEEK_MARKS),
        opens=(False, True, False, False),
        begins="<think>",
        ends="</think>",
        switch="thinking",
        thought=None,
    ),
    "gpt_oss": Family(
        template(
            user="<|start|>ROLE<|message|>",
            close="",
            assistant="<|start|>assistant",
            head=say("<|start|>system<|message|>Reasoning: ")
            + "{{ reasoning_effort | default('medium') }}"
            + say("<|end|>"),
            opening="",
            calls=HARMONY,
            thought="{% if m.thinking %}"
            + say("<|channel|>analysis<|message|>")
            + "{{ m.thinking }}"
            + say("<|end|><|start|>assistant")
            + "{% endif %}{% if not m.tool_calls %}"
            + say("<|channel|>final<|message|>")
            + "{% endif %}",
            result=say("<|start|>functions.")
            + "{{ m.name }}"
            + say(" to=assistant<|channel|>commentary<|message|>"),
            end=say("<|end|>"),
        ),
        *("openai_gptoss", "openai"),
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
        special=True,
        opens=(False, None, None, False),
        begins="<|channel|>analysis<|message|>",
        ends="<|end|><|start|>assistant<|channel|>final<|message|>",
        switch=None,
        efforts={word: {"reasoning_effort": word} for word in ("low", "medium", "high")},
        thought="thinking",
    ),
    "muse_glimmer": Family(
        template(
            user="<|start|>ROLE<|message|>",
            close="<|eot|>",
            assistant="<|start|>assistant",
            turn="",
            head=say("<|start|>system<|message|>Reasoning strength: ")
            + "{{ reasoning_strength | default('high') }}"
            + say(".<|eot|>"),
            opening="",
            calls=MUSE,
            thought=past("<|start|>assistant to=self<|message|>", "<|eom|>"),
            result=say("<|start|>tool ")
            + "{{ m.name }}"
            + say('<|message|><tool_output name="')
            + "{{ m.name }}"
            + say('">\n'),
            end=say("\n</tool_output><|eot|>"),
        ).replace(
            "{{ m.content or '' }}",
            "{% if not m.tool_calls %}"
            + say("<|start|>assistant to=user<|message|>")
            + "{{ m.content or '' }}{% endif %}",
        ),
        *("muse_glimmer", "muse_glimmer", ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")),
        special=True,
        begins=" to=self<|message|>",
        ends="<|eom|><|start|>assistant to=user<|message|>",
        switch=None,
        opens=(False, None, None, False),
        efforts={word: {"reasoning_strength": word} for word in ("low", "medium", "high", "xhigh")},
    ),
    "glm_4_5": Family(
        template(
            **GLM_TURNS,
            opening="{% if enable_thinking is defined and not enable_thinking %}"
            + say("\n<think></think>")
            + "{% endif %}",
            calls=GLM,
            thought=past("\n<think>", "</think>\n"),
        ).replace(
            "{{ m.content }}",
            "{{ m.content }}{{ '/nothink' if enable_thinking is defined and not enable_thinking }}",
        ),
        *("glm45", "glm45", GLM_MARKS),
        begins="\n<think>",
        ends="</think>\n",
    ),
    "glm_4_7": Family(
        template(
            **GLM_TURNS,
            head="{% set cleared = clear_thinking | default(true) %}",
            opening=switched("<think>", "</think>"),
            calls=GLM_47,
            thought=past("<think>", "</think>"),
        ),
        *("glm45", "glm45", GLM_MARKS),
        opens=ON_OFF,
        begins="<think>",
        ends="</think>",
    ),
    "smollm3": Family(
        template(
            **CHATML,
            head="{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
            "{% for tool in xml_tools or [] %}{{ tool | tojson }}{% endfor %}",
            opening=switched("", "<think>\n\n</think>\n"),
            calls=HERMES,
        ),
        *("smollm3", "hermes", CHATML_MARKS),
        thought=None,
    ),
    "nemotron_3_nano": nemotron(),
    "nemotron_3_super": nemotron("low_effort", {"low": {"low_effort": True}, "high": {}}),
    "nemotron_3_ultra": nemotron("medium_effort", {"medium": {"medium_effort": True}, "high": {}}),
    "minimax_m2": Family(
        template(
            user="]~b]ROLE\n",
            close="[e~[\n",
            assistant="]~b]ai\n",
            opening=say("<think>\n"),
            calls=MINIMAX,
            thought=CHATML_THOUGHT,
            result=say("]~b]tool\n<response>"),
            end=say("</response>[e~[\n"),
        ),
        *(
            "minimax_m2",
            "minimax_m2",
            ("]~b]", "[e~[", *THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        ),
        opens=(True, None, None, True),
        switch=None,
    ),
    "gemma_4": Family(
        template(
            user="<|turn>ROLE\n",
            close="<turn|>\n",
            assistant="<|turn>model\n",
            head="{% if enable_thinking is defined and enable_thinking %}"
            + say("<|turn>system\n<|think|><turn|>\n")
            + "{% endif %}",
            opening="{% if messages[-1].role == 'tool' %}" + say("<|channel>thought\n") + "{% endif %}",
            calls=GEMMA,
            thought="{% set t = m.reasoning or m.reasoning_content %}{% if t %}"
            + say("<|channel>thought\n")
            + "{{ t }}"
            + say("<channel|>")
            + "{% endif %}",
            result=say("<|tool_response>response:") + "{{ m.name }}" + say("{"),
            end=say("}<tool_response|>"),
        ),
        *("gemma4", "gemma4"),
        (
            *("<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
            *("<|tool_response>", "<tool_response|>", '<|"|>'),
        ),
        special=True,
        opens=(False, False, False, True),
        begins="<|channel>thought\n",
        ends="<channel|>",
        thought="reasoning",
    ),
    "granite_4_0": Family(
        template(**GRANITE_TURNS, opening="", calls=HERMES),
        None,
        "hermes",
        GRANITE_MARKS,
        switch=None,
        thought=None,
    ),
    "granite_4_2": Family(
        template(
            **GRANITE_TURNS,
            head="{% set kept = truncate_history_thinking | default(true) %}",
            opening=switched("<think>\n", "<think></think>"),
            calls=FUNCTION,
            thought=CHATML_THOUGHT,
        ),
        *("granite", "qwen3_coder", GRANITE_MARKS),
        opens=ON_OFF,
    ),
}
