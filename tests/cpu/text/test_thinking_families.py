"""Each family of models in each case, from a chat to the parts of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from test_answer_parsers import by_tokens
from test_texts import make_tokenizer
from test_tool_calls import WRITERS
from thinking_families import FAMILIES, THINK, Family
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from nanovllm.chat.conversations import (
    Thinking,
    check_template_options,
    parse_conversations,
    render_conversations,
)
from nanovllm.chat.templates import TemplateProcess
from nanovllm.extras.stop_strings import StopSearch
from nanovllm.reasoning import marks
from nanovllm.reasoning.budget import ThinkingBudget, budget_marks
from nanovllm.reasoning.gate import ThinkingGate
from nanovllm.reasoning.marks import REASONING
from nanovllm.reasoning.parsers import AnswerParsers, Asked, Parsed
from nanovllm.reasoning.rules import thinking_rules
from nanovllm.reasoning.templates import find_reasoning, find_tool_format, thinking_variables
from nanovllm.reasoning.tool_calls import parse_tool_calls
from nanovllm.reasoning.tool_formats import TOOL_CALLS
from nanovllm.text.detokenizer import Detokenizer

THOUGHT, TEXT = "First < second,\n  so 3 🌍 > 2.", "    The wörld: 日本語\n"
CITY = {"city": "São Paulo", "days": 3, "tags": ["a", {"b": None}]}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}
FUNCTION = {
    "name": "get_weather",
    "description": "?",
    "parameters": {"type": "object", "properties": PROPERTIES},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "What are <think> and </think>, <|channel|>final<|message|> and [/THINK]?"}
THINKING = [name for name, each in FAMILIES.items() if each.reasoning]
# Marks are tokens of their own, as the family has them; special tokens; or text, several tokens each.
KINDS = ("own", "special", "text")


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


@lru_cache
def tokenizer_of(name: str, kind: str = "own") -> PreTrainedTokenizerFast:
    """Its turns are tokens in any case."""
    family, tokenizer = FAMILIES[name], make_tokenizer("byte_level")
    thinking = {*THINK, "<|channel>", "<channel|>"} | {mark for mark in family.marks if "tool_call" in mark}
    thinking |= set(family.marks) if family.reasoning == "openai_gptoss" else set()
    marks = [each for each in family.marks if kind != "text" or each not in thinking]
    tokenizer.add_tokens(
        [AddedToken(mark, special=family.special or kind == "special", normalized=False) for mark in marks]
    )
    tokenizer.chat_template = family.template
    return tokenizer


@lru_cache
def parsers_of(name: str, kind: str = "own") -> AnswerParsers:
    tokenizer = tokenizer_of(name, kind)
    return AnswerParsers(tokenizer, FAMILIES[name].reasoning and "auto", "auto")


def prompt_of(
    process: TemplateProcess, name: str, messages: Any = (USER,), kind: str = "own", **more: Any
) -> str:
    """The prompt of a conversation, as `llm.chat` makes it."""
    tokenizer = tokenizer_of(name, kind)
    thinking = Thinking(more.pop("on", None), more.pop("effort", None))
    tools = more.pop("tools", None)
    options = check_template_options(tokenizer, None, True, False, tools, more, thinking)
    [found] = render_conversations(tokenizer, parse_conversations([[*messages]]), options, process)
    assert not isinstance(found, Exception), found
    assert found.text is not None
    return found.text


def ids_of(name: str, *pieces: str, kind: str = "own") -> list[int]:
    """The tokens of pieces: a mark whose letters are in two pieces is a quotation."""
    tokenizer = tokenizer_of(name, kind)
    return [each for piece in pieces for each in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def parse(name: str, prompt: str, *pieces: str, kind: str = "own", length: int | None = None) -> Parsed:
    """The answer, cut off at `length` tokens; the same by a stream and at the end."""
    parsers, detokenizer = parsers_of(name, kind), Detokenizer(tokenizer_of(name, kind))
    asked = Asked(ids_of(name, prompt, kind=kind), 0, TOOLS)
    token_ids = ids_of(name, *pieces, kind=kind)[:length]
    found = parsers.whole(detokenizer, asked, token_ids)
    assert by_tokens(parsers, detokenizer, asked, token_ids) == found
    return found


def is_open(name: str, prompt: str, kind: str = "own") -> bool:
    """Whether a prompt has begun the thinking."""
    return parsers_of(name, kind).splits(ids_of(name, prompt, kind=kind)).is_open


def called(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    """A question, an answer with a call, and its result."""
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    result = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "sun"}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call], **more}, result]


# -- templates -----------------------------------------------------------------------------------------------


def test_every_family_of_the_parsers_stands_here() -> None:
    here = {each.reasoning for each in FAMILIES.values()} - {None}
    others = {"kimi_k2", "exaone4", "olmo3", "seed_oss", "mistral", "think"}  # by test_reasoning.py alone
    assert here | others == REASONING.keys() and not here & others


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parsers_are_found(name: str) -> None:
    family = FAMILIES[name]
    assert find_tool_format("auto", family.template) == family.calls
    if family.reasoning is None:
        with pytest.raises(ValueError, match="shows no marks of thinking"):
            find_reasoning("auto", family.template)
    else:
        assert find_reasoning("auto", family.template) == family.reasoning


@pytest.mark.parametrize("name", FAMILIES)
def test_switches(process: TemplateProcess, name: str) -> None:
    """By our word; the variable has the family's name. Efforts that the template would refuse are refused."""
    family = FAMILIES[name]
    _, on, off, _ = family.opens
    if family.switch is None:
        for value in (True, False):
            with pytest.raises(ValueError, match="no switch for thinking"):
                thinking_variables(family.template, enable_thinking=value)
        assert on is off is None or family.reasoning is None
    else:
        for value in (True, False):
            assert thinking_variables(family.template, enable_thinking=value) == {family.switch: value}
        texts = {prompt_of(process, name, on=value) for value in (None, True, False)}
        assert len(texts) == 2, "the default is one of both"
    for effort, variables in family.efforts.items():
        assert thinking_variables(family.template, reasoning_effort=effort) == variables
        prompt_of(process, name, effort=effort)
    why = "is not one that the chat template knows" if family.efforts else "reads no effort"
    with pytest.raises(ValueError, match=why):
        prompt_of(process, name, effort="ultra")
    if len(family.efforts) > 1:
        assert len({prompt_of(process, name, effort=effort) for effort in family.efforts}) == len(
            family.efforts
        )


@pytest.mark.parametrize(("name", "kind"), product(THINKING, KINDS))
def test_where_answers_begin(process: TemplateProcess, name: str, kind: str) -> None:
    """By default, with thinking on and off, and behind the result of a call; for marks in a question, no."""
    by_default, on, off, behind_result = FAMILIES[name].opens
    for expected, options in ((by_default, {}), (on, {"on": True}), (off, {"on": False})):
        if expected is not None:
            prompt = prompt_of(process, name, kind=kind, **options)
            assert is_open(name, prompt, kind) is expected, prompt
    prompt = prompt_of(process, name, called(CITY), kind)
    assert is_open(name, prompt, kind) is behind_result, prompt


# -- thinking ------------------------------------------------------------------------------------------------


def prompts_of(process: TemplateProcess, name: str, kind: str = "own") -> Iterator[tuple[str, bool]]:
    """Prompts by which a model thinks, and whether they have begun the thinking."""
    options: dict[str, Any] = {} if FAMILIES[name].switch is None else {"on": True}
    for messages in ([USER], called(CITY)):
        prompt = prompt_of(process, name, messages, kind, **options)
        yield prompt, is_open(name, prompt, kind)


@pytest.mark.parametrize(("name", "kind"), product(THINKING, KINDS))
def test_whole_answers_and_token_by_token(process: TemplateProcess, name: str, kind: str) -> None:
    family = FAMILIES[name]
    for prompt, has_begun in prompts_of(process, name, kind):
        answer = family.thinking(THOUGHT, TEXT, has_begun)
        found = parse(name, prompt, answer, kind=kind)
        assert (found.reasoning or "").strip() == THOUGHT and found.text == TEXT
        letters = parse(name, prompt, *answer, kind=kind) if kind == "text" else found
        assert (letters.text, letters.tool_calls, letters.errors) == (TEXT, [], [])
        if kind != "text":  # the tokens of the thinking with its marks, and those of the text
            all_ids = ids_of(name, answer)
            behind = ids_of(
                name,
                family.ends.lstrip("\n").removeprefix("</think>") if "think>" in family.ends else "",
                TEXT,
            )
            if family.reasoning not in ("openai_gptoss", "gemma4"):
                spaces = ids_of(name, "\n" * answer.startswith("\n"))  # before the start mark
                assert found.num_reasoning_tokens == len(all_ids) - len(spaces) - len(behind)
            assert 0 < found.num_reasoning_tokens < len(all_ids)


@pytest.mark.parametrize("name", THINKING)
def test_an_answer_without_thinking(process: TemplateProcess, name: str) -> None:
    """Where it is off, or the model writes none."""
    family = FAMILIES[name]
    options: dict[str, Any] = {} if family.switch is None else {"on": False}
    prompt = prompt_of(process, name, **options)
    if is_open(name, prompt):
        found = parse(name, prompt, family.ends.lstrip("\n") + TEXT)  # an empty thinking
    elif family.reasoning == "openai_gptoss":
        found = parse(name, prompt, f"<|channel|>final<|message|>{TEXT}<|return|>")
    else:
        found = parse(name, prompt, TEXT)
        assert found.num_reasoning_tokens == 0
    assert (found.reasoning, found.text) == ("", TEXT)


@pytest.mark.parametrize(("name", "kind"), product(THINKING, KINDS))
def test_answers_that_are_cut_off(process: TemplateProcess, name: str, kind: str) -> None:
    """At every token: the thinking has no text behind it before it ends, and nothing is in both."""
    family = FAMILIES[name]
    for prompt, has_begun in prompts_of(process, name, kind):
        pieces = family.begins * (not has_begun), "one < two 🌍", family.ends, "Yes"
        whole = parse(name, prompt, *pieces, kind=kind)
        begun, ended = (len(ids_of(name, *pieces[:count], kind=kind)) for count in (1, 2))
        last = 0
        for length in range(len(ids_of(name, *pieces, kind=kind)) + 1):
            found = parse(name, prompt, *pieces, kind=kind, length=length)
            reasoning = found.reasoning or ""
            assert whole.text.startswith(found.text) or kind == "text" or length <= begun, (length, found)
            if begun < length <= ended:
                assert found.text == "" and "one < two 🌍".startswith(reasoning.rstrip("\ufffd")), (
                    length,
                    found,
                )
            if length >= begun:
                assert last <= found.num_reasoning_tokens <= length
                last = found.num_reasoning_tokens


@pytest.mark.parametrize("name", THINKING)
def test_marks_that_are_quoted(process: TemplateProcess, name: str) -> None:
    """In the thinking, in ordinary tokens; and as tokens in the text behind it, where nothing ends."""
    family = FAMILIES[name]
    end = (
        "<channel|>"
        if family.reasoning == "gemma4"
        else "<|end|>"
        if family.reasoning == "openai_gptoss"
        else "</think>"
    )
    start = family.begins.strip()
    for prompt, has_begun in prompts_of(process, name):
        begins = "" if has_begun else family.begins
        found = parse(
            name,
            prompt,
            begins,
            "say ",
            end[:3],
            end[3:],
            " and ",
            start[:3],
            start[3:],
            " twice",
            family.ends,
            "Yes",
        )
        assert (found.reasoning or "").strip() == f"say {end} and {start} twice" and found.text == "Yes"
        if family.reasoning in ("gemma4", "openai_gptoss"):
            continue  # there a mark in the text is a mark
        found = parse(name, prompt, begins, "hm", family.ends, f"say {start}", "a", end, " twice")
        assert (found.reasoning or "").strip() == "hm" and found.text == f"say {start}a{end} twice"


@pytest.mark.parametrize(("name", "kind"), product(THINKING, KINDS))
def test_stop_strings_count_in_the_text(process: TemplateProcess, name: str, kind: str) -> None:
    """From its first character on, also where the mark and the string come in one token's text."""
    family = FAMILIES[name]
    for prompt, has_begun in prompts_of(process, name, kind):
        for text, kept in (("say STOP it", "say "), ("STOP it", ""), ("say S", None)):
            answer = family.thinking("I STOP here", text, has_begun)
            parsers, detokenizer = parsers_of(name, kind), Detokenizer(tokenizer_of(name, kind))
            asked = Asked(ids_of(name, prompt, kind=kind), 0, TOOLS)
            stream = parsers.stream(detokenizer, asked, StopSearch(["STOP"]))
            ended = [stream.append(token_id) for token_id in ids_of(name, answer, kind=kind)]
            found = stream.parsed()
            assert any(ended) is (kept is not None) and (stream.found == "STOP") is (kept is not None)
            assert (found.reasoning or "").strip() == "I STOP here" and found.text == (
                text if kept is None else kept
            )


# -- budgets and schemas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THINKING)
def test_a_budget_closes_the_thinking_so_that_text_follows(process: TemplateProcess, name: str) -> None:
    """What it writes is what ends this family's thinking: the parser finds exactly the tokens before it."""
    family, parsers = FAMILIES[name], parsers_of(name)
    assert parsers.family is not None
    marks = budget_marks(parsers.family, parsers.vocabulary)
    for prompt, has_begun in prompts_of(process, name):
        begins, thought = (
            ids_of(name, family.begins * (not has_begun)),
            ids_of(name, "the world is the world"),
        )
        tokenizer = tokenizer_of(name)
        answer = [*begins, *thought[:3], *marks.closing, *ids_of(name, "Hello")]
        asked = Asked(ids_of(name, prompt))
        found = parsers.whole(Detokenizer(tokenizer), asked, answer)
        assert (found.reasoning or "").strip() == tokenizer.decode(
            thought[:3]
        ).strip() and found.text == "Hello"
        rules = thinking_rules(parsers.family, parsers.vocabulary, asked.prompt_ids, True, True)
        assert rules.is_open is has_begun
        budget, start = rules.new_budget(3), len(asked.prompt_ids)
        if begins:  # white space before the mark, and behind it
            at = budget.wakes([*asked.prompt_ids, *begins], start)
            inside = len(begins) - len(
                ids_of(name, family.begins[: family.begins.rindex(family.begins.strip()[-1]) + 1])
            )
            assert at == start + len(begins) + 3 - (inside if family.reasoning != "gemma4" else 0)
        else:
            assert budget.wakes(asked.prompt_ids, start) == start + 3


def forced(budget: ThinkingBudget, token_ids: list[int], start: int) -> list[int]:
    """The tokens that a budget writes behind others of an answer."""
    found: list[int] = []
    while True:
        bits = np.full(20, -1, np.int32)
        budget.restrict(bits, [*token_ids, *found], start)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if len(allowed) > 1:
            return found
        found += [int(each) for each in allowed]


@pytest.mark.parametrize("name", THINKING)
def test_a_schema_begins_behind_the_thinking(process: TemplateProcess, name: str) -> None:
    """At once where the prompt is outside; and behind what a budget closes, too."""
    family, parsers = FAMILIES[name], parsers_of(name)
    assert parsers.family is not None
    for prompt, has_begun in prompts_of(process, name):
        prompt_ids = ids_of(name, prompt)
        rules = thinking_rules(parsers.family, parsers.vocabulary, prompt_ids, True, True)
        natural = ids_of(name, family.thinking("hm", "", has_begun))
        begun = ids_of(name, family.begins * (not has_begun))
        closed = [*begun, *forced(rules.new_budget(0), [*prompt_ids, *begun], len(prompt_ids))]
        for answer in (natural, closed):
            gate = rules.new_gate()
            assert isinstance(gate, ThinkingGate)
            ids = [*prompt_ids, *answer, *ids_of(name, '{"a": 1}')]
            begins = gate.text_start(ids, len(prompt_ids))
            assert begins is not None and len(prompt_ids) + len(answer) - begins in range(3)
            assert tokenizer_of(name).decode(ids[begins:]).strip() == '{"a": 1}'
    if family.switch is not None:
        prompt_ids = ids_of(name, prompt_of(process, name, on=False))
        gate = thinking_rules(parsers.family, parsers.vocabulary, prompt_ids, False, True).new_gate()
        assert gate is not None
        ids = [*prompt_ids, *ids_of(name, '{"a": 1}')]
        assert gate.text_start(ids, len(prompt_ids)) == len(prompt_ids)


# -- calls ---------------------------------------------------------------------------------------------------


def call_of(name: str, arguments: Any) -> str:
    """A call as a model writes it."""
    text = WRITERS[FAMILIES[name].calls]("get_weather", arguments)
    return text if name != "gpt_oss" else f"<|end|><|start|>assistant{text}"


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
    if name == "gpt_oss":
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
    if family.thought is not None and family.reasoning != "openai_gptoss":
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
    if name == "gpt_oss":
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
