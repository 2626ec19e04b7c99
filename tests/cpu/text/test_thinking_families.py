"""Each family of models in each case, from a chat to the parts of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from thinking_answers import (
    CITY,
    KINDS,
    TEXT,
    THINKING,
    THOUGHT,
    TOOLS,
    called,
    ids_of,
    is_open,
    parse,
    parsers_of,
    prompt_of,
    prompts_of,
    tokenizer_of,
)
from thinking_families import FAMILIES

from nanovllm.chat.templates import TemplateProcess
from nanovllm.extras.stop_strings import StopSearch
from nanovllm.reasoning.budget import ThinkingBudget, budget_marks
from nanovllm.reasoning.gate import ThinkingGate
from nanovllm.reasoning.marks import REASONING
from nanovllm.reasoning.parsers import Asked
from nanovllm.reasoning.rules import thinking_rules
from nanovllm.reasoning.templates import find_reasoning, find_tool_format, thinking_variables
from nanovllm.text.detokenizer import Detokenizer


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


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
            if not family.in_messages and family.reasoning != "gemma4":
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
    elif family.in_messages:
        end = {"gpt_oss": "<|return|>", "muse_glimmer": "<|eot|>"}[name]
        found = parse(name, prompt, f"{family.ends.partition('assistant')[2]}{TEXT}{end}")
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
    ends = {"gemma4": "<channel|>", "openai_gptoss": "<|end|>", "muse_glimmer": "<|eom|>"}
    end = ends.get(family.reasoning or "", "</think>")
    start = "<|message|>" if family.reasoning == "muse_glimmer" else family.begins.strip()
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
        if family.in_messages or family.reasoning == "gemma4":
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
