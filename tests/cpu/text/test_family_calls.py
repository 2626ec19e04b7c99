"""Each family of models in each case, its calls, from a chat to OpenAI's form and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from test_tool_calls import WRITERS
from thinking_answers import (
    CITY,
    KINDS,
    THINKING,
    TOOLS,
    USER,
    called,
    ids_of,
    is_open,
    parse,
    prompt_of,
    prompts_of,
)
from thinking_families import FAMILIES, Family

from nanovllm.chat.templates import TemplateProcess
from nanovllm.reasoning import marks
from nanovllm.reasoning.marks import REASONING
from nanovllm.reasoning.tool_calls import parse_tool_calls
from nanovllm.reasoning.tool_formats import TOOL_CALLS


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def call_of(name: str, arguments: Any) -> str:
    """A call as a model writes it."""
    text = WRITERS[FAMILIES[name].calls]("get_weather", arguments)
    ends = {"gpt_oss": "<|end|><|start|>assistant", "muse_glimmer": "<|eom|>"}  # of the message before
    return ends.get(name, "") + text


@pytest.mark.parametrize(("name", "kind"), product(FAMILIES, KINDS))
def test_calls_behind_the_thinking(process: TemplateProcess, name: str, kind: str) -> None:
    """In OpenAI's form, with the types of the tool's schema."""
    family: Family = FAMILIES[name]
    options: dict[str, Any] = {} if family.switch is None else {"on": True}
    prompt = prompt_of(process, name, kind=kind, tools=TOOLS, **options)
    has_begun = family.reasoning is not None and is_open(name, prompt, kind)
    for arguments in (CITY, {"city": "a < b {}", "days": 3}, {"city": "12"}, {}):
        text = f"I look.{call_of(name, arguments)}"
        answer = text if family.reasoning is None else family.thinking("hm", text, has_begun)
        found = parse(name, prompt, answer, kind=kind)
        assert (found.text, found.errors) == ("I look.", [])
        assert (found.reasoning or "hm").strip() == "hm" and (found.reasoning is None) is (
            family.reasoning is None
        )
        [call] = found.tool_calls or ()
        assert call["type"] == "function" and call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == arguments


def test_tools_reach_a_template_that_names_them_otherwise(process: TemplateProcess) -> None:
    """SmolLM3's reads xml_tools; what the caller gives itself stays."""

    def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: A city.
        """
        return city

    for tools in (TOOLS, [get_weather]):
        assert '"name": "get_weather"' in prompt_of(process, "smollm3", tools=tools)
    own = prompt_of(process, "smollm3", tools=TOOLS, xml_tools=["mine"])
    assert '"mine"' in own and "get_weather" not in own


@pytest.mark.parametrize("name", THINKING)
def test_calls_that_begin_within_the_thinking(process: TemplateProcess, name: str) -> None:
    """They end it where the family does that, if no end mark comes later; elsewhere they are thoughts."""
    family = FAMILIES[name]
    known = REASONING[family.reasoning or ""]
    call = WRITERS[family.calls]("get_weather", CITY)
    if family.in_messages:
        return  # its calls are messages of their own
    assert isinstance(known, marks.Thinking)
    ends = any(call.startswith(each.mark) and each.follows in call for each in known.calls)
    assert ends or family.calls in ("hermes", "deepseek_v3", "deepseek_v31")
    for prompt, has_begun in prompts_of(process, name):
        begins = family.begins * (not has_begun)
        found = parse(name, prompt, f"{begins}hm\n{call}")
        assert (len(found.tool_calls or ()), found.text) == (int(ends), "")
        before = len(ids_of(name, begins.lstrip("\n"), "hm\n"))
        assert found.num_reasoning_tokens == before + (0 if ends else len(ids_of(name, call)))
        assert (found.reasoning or "").strip() == ("hm" if ends else f"hm\n{call}")
        found = parse(name, prompt, f"{begins}hm\n{call}{family.ends}Yes")
        assert (found.tool_calls, found.text) == ([], "Yes") and call in (found.reasoning or "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_of_muse_glimmer_without_its_end(process: TemplateProcess, kind: str) -> None:
    """The model goes from its thinking to a call by a header alone; white space stays in the thinking where
    no header follows."""
    prompt, call = prompt_of(process, "muse_glimmer", kind=kind), WRITERS["muse_glimmer"]("get_weather", CITY)
    header = call.removeprefix("<|start|>assistant")
    for thought in ("hm", "go to=x or to \n", ""):
        found = parse("muse_glimmer", prompt, f" to=self<|message|>{thought}{header}", kind=kind)
        assert (found.reasoning, found.text, len(found.tool_calls or ())) == (thought, "", 1)
    found = parse("muse_glimmer", prompt, " to=self<|message|>go to=x or to ", kind=kind)
    assert (found.reasoning, found.text) == ("go to=x or to ", "")
    text = "<|message|>I say to=x<|eom|><|start|>assistant<|message|>so"
    found = parse("muse_glimmer", prompt, text, kind=kind)
    assert (found.reasoning, found.text) == ("", "I say to=x\nso"), "messages to nobody are text"
    for before in ("I say", " to=self<|message|>a<|eom|>I say"):  # text without a header goes to one, too
        found = parse("muse_glimmer", prompt, f"{before} to=self<|message|>hm to", kind=kind)
        assert found.text == "I say" and (found.reasoning or "").endswith("hm to")


@pytest.mark.parametrize("name", FAMILIES)
def test_past_calls_in_either_form(process: TemplateProcess, name: str) -> None:
    """The prompt has what the model would have written, whichever form the arguments come in."""
    form = TOOL_CALLS[FAMILIES[name].calls]
    for given in (CITY, {}):
        prompts = []
        for arguments, content in product(
            (given, json.dumps(given, ensure_ascii=False)), ("", None, "I look.")
        ):
            prompt = prompt_of(process, name, called(arguments, content=content), tools=TOOLS)
            behind = prompt.rpartition(USER["content"])[2].replace(" <|constrain|>json", "")
            [call] = parse_tool_calls(behind, form, TOOLS).calls
            assert json.loads(call["function"]["arguments"]) == given and "sun" in behind
            prompts.append(prompt.replace("I look.", ""))
        assert len(set(prompts)) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_past_thinking_from_any_field(process: TemplateProcess, name: str) -> None:
    family = FAMILIES[name]
    texts = {
        prompt_of(process, name, called(CITY, **{each: "Zorbit"}))
        for each in ("reasoning", "reasoning_content", "thinking")
    }
    [text] = texts
    assert text.count("Zorbit") == (family.thought is not None)
    if family.thought is not None and not family.in_messages:
        parsers = replace(family)
        assert f"Zorbit{parsers.ends.rstrip()}" in text


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_goes_back_as_a_message(process: TemplateProcess, name: str) -> None:
    """Its parts, as `llm.chat` returns them: the next prompt holds the thinking, if the family keeps it, and
    the call."""
    family = FAMILIES[name]
    options: dict[str, Any] = {} if family.switch is None else {"on": True}
    prompt = prompt_of(process, name, tools=TOOLS, **options)
    has_begun = family.reasoning is not None and is_open(name, prompt)
    text = call_of(name, CITY)
    if family.in_messages:
        text = f"{family.begins}Zorbit{text}"
    elif family.reasoning is not None:
        text = family.thinking("Zorbit", text, has_begun)
    found = parse(name, prompt, text)
    message = {
        "role": "assistant",
        "content": found.text,
        "reasoning": found.reasoning,
        "tool_calls": found.tool_calls,
    }
    [call] = found.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": "sun"}
    again = prompt_of(process, name, [USER, message, result], tools=TOOLS).rpartition(USER["content"])[2]
    [read] = parse_tool_calls(again.replace(" <|constrain|>json", ""), TOOL_CALLS[family.calls], TOOLS).calls
    assert json.loads(read["function"]["arguments"]) == CITY
    assert again.count("Zorbit") == (family.thought is not None)
