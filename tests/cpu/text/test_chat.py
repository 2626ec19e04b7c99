"""LLM.chat: what reaches the chat template, and what is refused before anything runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.chat.conversations import parse_conversations
from nanovllm.checks import raise_first

USER = {"role": "user", "content": "Hi"}
SHOWN = "<|im_start|>user\nHi<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
SHORT = SamplingParams(temperature=0, max_tokens=2)
# Like templates of real models: think unless disabled, list tools, read contents and tool calls.
TEMPLATE = (
    "{% if tools %}TOOLS:{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}[{{ m.role }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}|{{ c.function.name }}{{ c.function.arguments.x }}{% endfor %}]"
    "{% endfor %}{% if add_generation_prompt %}[assistant|"
    "{% if enable_thinking is defined and not enable_thinking %}<no think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), device="cpu") as llm:
        yield llm


def prompts(llm: LLM, messages: Any, **options: Any) -> list[str | None]:
    return [output.prompt for output in llm.chat(messages, SHORT, use_tqdm=False, **options)]


# -- arguments -----------------------------------------------------------------------------------------------


def test_arguments_reach_the_template(llm: LLM) -> None:
    options = {"chat_template": TEMPLATE}
    assert prompts(llm, [USER], **options) == ["[user|Hi][assistant|"]
    thinking = {"enable_thinking": False}
    assert prompts(llm, [USER], chat_template_kwargs=thinking, **options) == [
        "[user|Hi][assistant|<no think>"
    ]
    assert prompts(llm, [USER], add_generation_prompt=False) == [SHOWN]
    final = [USER, {"role": "assistant", "content": "The answer is"}]
    (text,) = prompts(llm, final, add_generation_prompt=False, continue_final_message=True)
    assert text == SHOWN + ANSWER + "The answer is"
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert prompts(llm, [USER], tools=tools, **options) == ["TOOLS:add;[user|Hi][assistant|"]
    neutral = {"lora_request": None, "mm_processor_kwargs": None, "chat_template_content_format": "auto"}
    assert prompts(llm, [USER], tools=None, chat_template_kwargs=None, **neutral) == [SHOWN + ANSWER]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0}, TypeError, r"'temperature'; pass it as SamplingParams\(temperature="),
        ({"n": 2}, TypeError, r"'n'; pass it as SamplingParams\(n="),
        ({"chat_templat": "x"}, TypeError, "'chat_templat'; did you mean 'chat_template'"),
        (
            {"preserve_thinking": False},
            TypeError,
            "'preserve_thinking'.*of the template go into chat_template_kwargs",
        ),
        ({"lora_request": object()}, ValueError, "lora_request=.* is not supported; merge"),
        ({"chat_template_content_format": "openai"}, ValueError, "format='openai' is not supported"),
        ({"continue_final_message": True}, ValueError, "needs add_generation_prompt=False"),
        ({"add_generation_prompt": 1}, TypeError, "add_generation_prompt must be True or False, not 1"),
        ({"chat_template": 5}, TypeError, "chat_template must be a Jinja template as a string, .* not 5"),
        ({"tools": {"name": "add"}}, TypeError, "tools must be a list"),
        ({"chat_template_kwargs": "x"}, TypeError, "chat_template_kwargs must be a dictionary, not 'x'"),
        ({"chat_template_kwargs": {"tokenize": True}}, ValueError, "'tokenize' is not one; leave it out"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            ValueError,
            r"'add_generation_prompt' is not one; write chat\(\.\.\., add_generation_prompt=",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments(llm: LLM, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.chat([USER], SHORT, use_tqdm=False, **options)
    assert llm.is_finished()


def test_unused_template_options_give_a_warning(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanovllm"):
        prompts(llm, [USER], chat_template=TEMPLATE, chat_template_kwargs={"enable_thinking": True})
        assert caplog.text == ""
        assert prompts(llm, [USER], chat_template_kwargs={"enable_thinkin": True}) == [SHOWN + ANSWER]
    assert "the chat template does not use enable_thinkin" in caplog.text


def test_a_template_that_fails_names_the_conversation(llm: LLM) -> None:
    late = [USER, {"role": "system", "content": "x"}]
    with pytest.raises(ValueError, match=r"conversation 1: the chat template .*system comes first"):
        llm.chat([[USER], late], SHORT, use_tqdm=False, chat_template=TEMPLATE)
    with pytest.raises(ValueError, match=r"conversation 0: the chat template .*TemplateSyntaxError"):
        llm.chat([USER], SHORT, use_tqdm=False, chat_template="{% if %}")
    with pytest.raises(ValueError, match=r"conversation 0: the chat template .*UndefinedError"):
        llm.chat([USER], SHORT, use_tqdm=False, chat_template="{{ a.b.c }}")


# -- which template ------------------------------------------------------------------------------------------


def test_a_file_holds_the_template(llm: LLM, tmp_path: Path) -> None:
    """As text, or in JSON as tokenizers save it; as a string or a path."""
    text, saved = tmp_path / "chat.jinja", tmp_path / "tokenizer_config.json"
    text.write_text("ü{{ messages[0].content }}", "utf-8")
    saved.write_text(json.dumps({"chat_template": "{% if true %}j{% endif %}"}))
    for path, shown in ((text, "üHi"), (saved, "j")):
        assert (
            prompts(llm, [USER], chat_template=path)
            == prompts(llm, [USER], chat_template=str(path))
            == [shown]
        )


def test_a_name_chooses_one_of_the_models_templates(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"default": "{{ 'd' }}", "tool_use": "{{ 't' }}"}
    monkeypatch.setattr(llm.tokenizer, "chat_template", named)
    assert prompts(llm, [USER]) == ["d"]
    assert prompts(llm, [USER], chat_template="tool_use") == ["t"]
    with pytest.raises(
        ValueError, match=r"'tool_us' .str. is no Jinja template.* names are default, tool_use"
    ):
        llm.chat([USER], SHORT, chat_template="tool_us")


@pytest.mark.parametrize("queue", ["chat", "enqueue_chat"])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("/models/qwen/chat_template.jinja", "no file .No such file.*; and no name .* has no name"),
        ("tool_use", "chat_template='tool_use' .str. is no Jinja template, .* neither {{ nor {%"),
        ("", "chat_template='.*' .str. is no Jinja template"),
        ("a\0b" * 9000, "is no Jinja template"),
        ("EMPTY", "chat_template: the file EMPTY is no Jinja template, and .* every prompt 'no template'"),
        ("x.json", "the file x.json holds no template as UTF-8 text, nor as JSON .*KeyError"),
        ("latin", "the file latin holds no template as UTF-8 text"),
    ],
)
def test_what_is_no_template_is_refused(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: str, template: str, message: str
) -> None:
    """Before anything runs; else the text itself would be every prompt."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").write_text("no template")
    (tmp_path / "x.json").write_text('{"template": "{{ messages }}"}')
    (tmp_path / "latin").write_bytes("{{ 'ü' }}".encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        getattr(llm, queue)([USER], SHORT, chat_template=template)
    assert llm.is_finished()


def test_a_model_whose_own_template_is_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some files name a template of another program there."""
    monkeypatch.setattr(llm.tokenizer, "chat_template", "chatml")
    with pytest.raises(
        ValueError, match=r"the chat template of .* is no Jinja template.* every prompt 'chatml'"
    ):
        llm.chat([USER], SHORT)


# -- messages ------------------------------------------------------------------------------------------------


def test_forms_of_one_conversation_and_of_many(llm: LLM) -> None:
    one, two = [SHOWN + ANSWER], [SHOWN + ANSWER] * 2
    assert prompts(llm, [USER]) == prompts(llm, (USER,)) == prompts(llm, (m for m in [USER])) == one
    assert prompts(llm, [[USER], (USER,)]) == prompts(llm, ([USER] for _ in range(2))) == two
    assert prompts(llm, iter([(m for m in [USER]), [USER]])) == two
    assert prompts(llm, []) == []


def test_text_parts_are_joined(llm: LLM) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, "three"]
    (text,) = prompts(llm, [{"role": "user", "content": parts}])
    assert text == SHOWN.replace("Hi", "one\ntwo\nthree") + ANSWER


def test_unused_template_options_give_one_warning(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    for variables in ({"unknown": 1}, {"unknown": 2}):
        llm.chat([USER], SHORT, use_tqdm=False, chat_template_kwargs=variables)
    assert [each.message for each in caplog.records] == [
        "the chat template does not use unknown, which changes nothing"
    ]


def test_tool_calls(llm: LLM) -> None:
    def call(arguments: Any) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    given = call('{"x": 5}')
    for message in (given, call({"x": 5})):
        result = {"role": "tool", "content": "7", "tool_call_id": "1"}
        (text,) = prompts(llm, [USER, message, result], chat_template=TEMPLATE)
        assert text == "[user|Hi][assistant||f5][tool|7][assistant|"
    assert given == call('{"x": 5}'), "what the caller holds is not changed"
    with pytest.raises(
        ValueError, match=r"conversation 0, message 1: the arguments of tool_calls\[0\] are not valid JSON"
    ):
        llm.chat([USER, call("{x")], SHORT, use_tqdm=False)
    with pytest.raises(ValueError, match="it is nested too deeply"):
        llm.chat([USER, call("[" * 100_000)], SHORT, use_tqdm=False)


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        (USER, TypeError, "put a single message into a list"),
        ("Hi", TypeError, "messages must be a list of messages .* not 'Hi'"),
        (None, TypeError, "messages must be a list of messages .* not None"),
        (["Hi"], TypeError, "conversation 0 must be a list of messages .* not 'Hi'"),
        ([[USER], []], ValueError, "conversation 1 has no messages"),
        ([[USER], USER], TypeError, "conversation 1 must be a list of messages"),
        ([USER, "Hi"], TypeError, "conversation 0, message 1 must be a dictionary .* not 'Hi'"),
        ([[USER], [USER, {"content": "x"}]], ValueError, "conversation 1, message 1 needs a role"),
        ([{"role": 5, "content": "x"}], ValueError, "conversation 0, message 0 needs a role.*5"),
        ([{"role": "user", "content": None}], ValueError, "conversation 0, message 0 has no content"),
        ([{"role": "user"}], ValueError, "conversation 0, message 0 has no content"),
        ([{"role": "user", "content": 5}], TypeError, "message 0: content must be a string"),
        ([{"role": "user", "content": {"type": "text"}}], TypeError, "message 0: content must be a string"),
        (
            [USER, {"role": "user", "content": ["a", {"type": "image_url", "image_url": {"url": "x"}}]}],
            ValueError,
            "conversation 0, message 1, content part 1 has the type 'image_url', which is not supported",
        ),
        ([{"role": "user", "content": [{"text": "a"}]}], ValueError, "content part 0 has the type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], TypeError, "content part 0 must be .*text"),
        ([{"role": "user", "content": "a\ud800"}], ValueError, "has a lone surrogate.* at position 1"),
        ([{"role": "user", "content": "a", "tool_calls": {"x": 1}}], TypeError, "tool_calls must be a list"),
    ],
)  # fmt: skip
def test_wrong_messages(messages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        raise_first(parse_conversations(messages))


def test_without_a_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="this model has no chat template; put"):
        llm.chat([USER])
    assert prompts(llm, [USER], chat_template=TEMPLATE) == ["[user|Hi][assistant|"]
