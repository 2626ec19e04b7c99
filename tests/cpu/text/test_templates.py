"""Chat templates that strangers wrote: a limit of time, memory and output stops each kind of bomb."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from threading import Thread, main_thread
from time import sleep
from typing import Any

import numpy as np
import pytest
from jobs import Lent, read_rows, run, write_rows

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.chat import templates
from nanovllm.chat.conversations import render_conversations
from nanovllm.chat.templates import (
    MAX_STOPS,
    Limits,
    TemplateError,
    TemplateProcess,
    plain,
)
from nanovllm.engine.startup import load_tokenizer

SHORT = SamplingParams(temperature=0, max_tokens=2)
SECONDS = 0.2
SLOW, LARGE, LONG = f"takes more than {SECONDS} s of a CPU", "bytes of memory", "writes more than"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TWINS = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)
DOUBLING = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = OP %}{% endfor %}"
BOMBS = {
    "{{ 10 ** (10 ** 8) }}": SLOW,
    TWINS + "{{ n.x == n.y }}": SLOW,
    "{{ 'a' * 900000000 }}": LARGE,
    "{{ ('a' * 90000000) ~ 'b' }}": LONG,
    "{{ [1] * 900000000 }}": LARGE,
    "{{ '%999999999d' % 1 }}": LARGE,
    "{{ '%999999999d' | format(1) }}": LARGE,
    "{{ '{:>999999999}'.format(1) }}": LARGE,
    "{{ 'a' | center(10 ** 9) }}": LARGE,
    "{{ 'a\n' | indent(10 ** 9, true) }}": LARGE,
    "{{ [[]] | tojson(indent=10 ** 9) }}": LARGE,
    "{{ [1] | batch(10 ** 9, 0) | list }}": LARGE,
    "{{ 'a'.ljust(10 ** 9) }}": LARGE,
    "{{ ('a' * 10 ** 5).replace('a', 'b' * 10 ** 5) }}": LARGE,
    "{{ (['a' * 10 ** 5] * 10 ** 5) | join }}": LARGE,
    "{% for i in range(99999) %}{{ 'a' * 10 ** 5 }}{% endfor %}": LARGE,
    DOUBLING.replace("OP", "n.x ~ n.x"): LARGE,
    DOUBLING.replace("OP", "n.x + n.x"): LARGE,
}
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(Limits(seconds=SECONDS))
    yield process
    process.close()


def answer(process: TemplateProcess, template: str, *conversations: Any) -> list[Any]:
    return process.render(template, {}, conversations or [USER], {})


@pytest.mark.parametrize("template", BOMBS)
def test_bombs_are_stopped(process: TemplateProcess, template: str) -> None:
    [found] = answer(process, template)
    assert isinstance(found, TemplateError) and found.was_stopped
    assert BOMBS[template] in str(found) or SLOW in str(found)  # whichever limit a machine meets first


def test_recursion_is_an_error(process: TemplateProcess) -> None:
    [found] = answer(process, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")
    assert isinstance(found, TemplateError) and not found.was_stopped
    assert str(found).startswith("RecursionError")


def test_other_conversations_are_rendered(process: TemplateProcess) -> None:
    """Those of the same portion, and in order."""
    template = "{% if messages[0].content == '3' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    found = answer(process, template, *([{"role": "user", "content": str(index)}] for index in range(9)))
    assert [str(each) for each in found] == ["0", "1", "2", SLOW, "4", "5", "6", "7", "8"]


def test_a_template_that_is_stopped_again_and_again_is_not_tried_again(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer(process, ENDLESS + "x", *[USER] * 5)
    again = f"was stopped {MAX_STOPS} times in a row and is not tried again"
    assert [str(each) for each in found] == [SLOW] * MAX_STOPS + [again] * (5 - MAX_STOPS)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert [str(each) for each in answer(process, ENDLESS + "x")] == [again]


def test_large_and_many_conversations_come_back_whole(process: TemplateProcess) -> None:
    texts = ["é\ud800" * size for size in (0, 1, 2**18, 3)] + [str(index) for index in range(3000)]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    assert answer(process, "{{ messages[0].content }}", *conversations) == texts


def test_signals_act_while_a_template_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        templates.subprocess, "Popen", lambda *a, **b: started.append(popen(*a, **b)) or started[-1]
    )
    process = TemplateProcess(Limits(seconds=60))
    assert answer(process, "x") == ["x"]

    def interrupt() -> None:
        sleep(0.3)
        signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)

    thread = Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        answer(process, ENDLESS)
    thread.join()
    assert started[0].poll() is not None
    assert answer(process, "{{ messages[0].content }}") == ["Hi"]
    started[1].kill()  # as if memory had run out while it was idle
    started[1].wait()
    assert answer(process, "y", USER, USER) == ["y", "y"]
    process.close()
    assert all(each.poll() is not None for each in started)


def test_templates_see_plain_values() -> None:
    class Role(str, Enum):
        user = "user"

    given = {
        "a": (1, [np.float32(0.5), np.bool_(False)], {2: None}),
        "b": Role.user,
        "c": object(),
        "d": print,
    }
    assert plain(given) == {
        "a": (1, [0.5, False], {2: None}),
        "b": "user",
        "c": "<object>",
        "d": "<builtin_function_or_method>",
    }
    assert [type(each) for each in plain([Role.user, np.float64(1), True])] == [str, float, bool]


# -- in an engine and in jobs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), device="cpu") as llm:
        yield llm


def test_chat_names_the_template_and_the_limit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = "{{ 'a' * 900000000 }}"
    message = "conversation 0: the chat template {} takes more than 536,870,912 bytes of memory; put another"
    with pytest.raises(ValueError, match=message.format("that was passed")):
        llm.chat(USER, SHORT, chat_template=bomb)
    monkeypatch.setattr(llm.tokenizer, "chat_template", bomb)
    with pytest.raises(ValueError, match=message.format(f"of .*{Path(demo_model_path()).name}")):
        llm.chat(USER, SHORT)


def test_tools_may_be_functions(llm: LLM) -> None:
    def add(a: int) -> int:
        """Adds.

        Args:
            a: A number.
        """
        return a

    template = "{% for t in tools %}{{ t.function.name }} {{ t.function.parameters.required }}{% endfor %}"
    [output] = llm.chat(USER, SHORT, tools=[add], chat_template=template, use_tqdm=False)
    assert output.prompt == "add ['a']"
    with pytest.raises(ValueError, match="tools: DocstringParsingException"):
        llm.chat(USER, SHORT, tools=[lambda x: x], chat_template=template)


def test_numbers_of_tools_keep_their_points(llm: LLM) -> None:
    """Models are trained on texts of transformers; llama.cpp writes 1 for 1.0."""
    number = {"type": "number", "minimum": 0.1, "maximum": 1.0, "default": 1e-07, "enum": [None, [1, 1e16]]}
    function = {"name": "größe", "parameters": {"type": "object", "properties": {"x": number}}}
    tools = [{"type": "function", "function": function}]
    template = "{{ tools | tojson }}"
    [output] = llm.chat(USER, SHORT, tools=tools, chat_template=template, use_tqdm=False)
    assert output.prompt == json.dumps(tools, ensure_ascii=False) and '"maximum": 1.0,' in output.prompt


def test_a_tokenizer_with_a_method_of_its_own_applies_it() -> None:
    tokenizer: Any = load_tokenizer(Path(demo_model_path()))

    class Own(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, **options: Any) -> str:
            if conversation[0]["content"] == "bad":
                raise KeyError("bad")
            return "own"

    tokenizer.__class__ = Own
    process = TemplateProcess()
    bad = [{"role": "user", "content": "bad"}]
    found = render_conversations(tokenizer, [USER, bad], {}, process)
    assert [getattr(each, "text", str(each)) for each in found] == [
        "own",
        "conversation 1: the chat template fails (KeyError: 'bad')",
    ]


def test_the_process_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        templates.subprocess, "Popen", lambda *a, **b: started.append(popen(*a, **b)) or started[-1]
    )
    with LLM(demo_model_path(), device="cpu") as llm:
        llm.generate("Hi", SHORT, use_tqdm=False)
        assert not started
        llm.chat(USER, SHORT, use_tqdm=False)
        assert [each.poll() for each in started] == [None]
    assert len(started) == 1 and started[0].poll() is not None


def test_a_bomb_in_a_job_is_an_error_row(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = "{% if messages[0].content == 'bomb' %}{{ [0] * 900000000 }}{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", bomb)
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("Hi", "bomb", "Ho")]
    path = write_rows(tmp_path / "in.jsonl", rows)
    assert run(path, "-o", tmp_path / "o.jsonl", make_llm=Lent(llm)) == 1
    found = read_rows(tmp_path / "o.jsonl")
    assert [row["error"] is None for row in found] == [True, False, True]
    assert found[1]["error"].startswith("in.jsonl: line 2: the conversation: the chat template of ")
    assert "takes more than 536,870,912 bytes of memory" in found[1]["error"]
