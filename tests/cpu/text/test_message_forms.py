"""Messages in OpenAI's forms: each template gets the form that it takes, and the given one where it can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.chat.conversations import parse_conversations
from nanovllm.chat.message_forms import Forms
from nanovllm.chat.templates import TemplateError, TemplateProcess

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
ARGUMENTS = {"x": 5, "ü": [1]}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)

STRINGS = "{% for m in messages %}[{{ m.role }}|{{ '' + m.content }}]{% endfor %}"
ANY_CONTENT = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
LOOP = "{% for p in m.content %}<{{ p.text }}>{% endfor %}"
BOTH = (
    "{% for m in messages %}[{{ m.role }}|{% if m.content is string %}{{ m.content }}{% else %}"
    f"{LOOP}{{% endif %}}]{{% endfor %}}"
)
PARTS_ONLY = f"{{% for m in messages %}}[{{{{ m.role }}}}|{LOOP}]{{% endfor %}}"
FIRST_PART = BOTH.replace(LOOP, "<{{ m.content[0].text }}>")
USERS_PARTS = (
    "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}[user|"
    f"{LOOP}]{{% else %}}[{{{{ m.role }}}}|{{{{ '' + m.content }}}}]{{% endif %}}{{% endfor %}}"
)


def calls(arguments: str, content: str = "{{ m.content or '' }}") -> str:
    """A template that writes tool calls."""
    return (
        "{% for m in messages %}[{{ m.role }}|"
        f"{content}{{% for c in m.tool_calls or [] %}}{{% set a = c.function.arguments %}}"
        f"({{{{ c.function.name }}}} {arguments}){{% endfor %}}]{{% endfor %}}"
    )


OBJECT = calls("{{ a | tojson }}")  # as Qwen's and Llama's
STRING = calls("{{ 'json ' + a }}")  # as DeepSeek's
EITHER = calls("{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}")
ITEMS = calls("{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}")
BARE = calls("{{ a }}")  # an object becomes Python's
NEEDS_CONTENT = calls("{{ a | tojson }}", "{{ '' + m.content }}")
LATER = calls(
    "{{ a | tojson }}", "{% if messages[-1].role == 'user' %}{{ '' + m.content }}{% endif %}"
)  # as QwQ's


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def text(process: TemplateProcess, template: str, *messages: dict[str, Any]) -> str:
    [conversation] = parse_conversations([list(messages)])
    [found] = process.render(template, {}, [conversation], {})
    assert isinstance(found, str), found
    return found


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def called(arguments: Any, **content: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", **content, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("template", "of_parts", "of_text"),
    [
        (STRINGS, "one\ntwo", "hi"),
        (ANY_CONTENT, "one\ntwo", "hi"),
        (BOTH, "<one><two>", "hi"),
        (PARTS_ONLY, "<one><two>", "<hi>"),
        (FIRST_PART, "one\ntwo", "hi"),
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool", "developer", "critic"])
def test_contents(process: TemplateProcess, role: str, template: str, of_parts: str, of_text: str) -> None:
    """Parts stay parts where the template reads all of them, and are joined by newlines elsewhere."""
    first = text(process, template, user("hm"))
    for content, shown in ((PARTS, of_parts), ("hi", of_text)):
        message = {"role": role, "content": content}
        assert text(process, template, user("hm"), message) == f"{first}[{role}|{shown}]"


def test_roles_may_differ(process: TemplateProcess) -> None:
    messages = [{"role": "system", "content": PARTS}, user(PARTS), {"role": "assistant", "content": PARTS}]
    expected = "[system|one\ntwo][user|<one><two>][assistant|one\ntwo]"
    assert text(process, USERS_PARTS, *messages) == expected


@pytest.mark.parametrize(
    ("template", "of_object", "of_text"),
    [
        (OBJECT, TEXT, TEXT),
        (STRING, f"json {TEXT}", f"json {TEXT}"),
        (EITHER, TEXT, '{"x":5, "ü":[1]}'),
        (ITEMS, "x=5;ü=[1];", "x=5;ü=[1];"),
        (BARE, TEXT, '{"x":5, "ü":[1]}'),
    ],
)
def test_arguments_of_calls(process: TemplateProcess, template: str, of_object: str, of_text: str) -> None:
    """JSON text stays as it was written where the template takes text."""
    written = '{"x":5, "ü":[1]}' if of_object != of_text or "json " not in of_text else TEXT
    for arguments, shown in ((ARGUMENTS, of_object), (written, of_text)):
        found = text(process, template, user("hm"), called(arguments, content="so"))
        assert found == f"[user|hm][assistant|so(f {shown})]"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
@pytest.mark.parametrize("template", [OBJECT, STRING, NEEDS_CONTENT, LATER])
def test_no_content_beside_calls(process: TemplateProcess, template: str, content: dict[str, Any]) -> None:
    found = text(process, template, user("hm"), called(ARGUMENTS, **content), user("so"))
    json_text = f"json {TEXT}" if template is STRING else TEXT
    assert found == f"[user|hm][assistant|(f {json_text})][user|so]"


def test_calls_that_only_a_null_shows() -> None:
    """As DeepSeek's first templates, where `render` hands null over; some versions of transformers do."""

    def render(conversation: list[dict[str, Any]]) -> str:
        parts = []
        for message in conversation:
            if message["role"] == "assistant" and message.get("content", "") is None:
                functions = [each["function"] for each in message["tool_calls"]]
                parts += [f"({each['name']} {each['arguments']})" for each in functions]
            else:
                parts.append(f"[{message['content']}]")
        return "".join(parts)

    for content in ({}, {"content": None}, {"content": ""}):
        message = called('{"x": 5}', **content)
        assert render(Forms(render).fit([user("hm"), message])) == '[hm](f {"x": 5})'


def test_a_null_that_is_written_as_a_word_is_not_taken() -> None:
    def render(conversation: list[dict[str, Any]]) -> str:
        return "None is special" + "".join(
            f"{each.get('content')}{each.get('tool_calls')}" for each in conversation
        )

    [_, found] = Forms(render).fit([user("hm"), called('{"x": 5}', content=None)])
    assert found["content"] == ""


def test_what_no_template_shows_stays(process: TemplateProcess) -> None:
    """A template that writes no contents fails as with the given messages."""
    assert text(process, "{{ messages | length }}", user(PARTS), called(TEXT)) == "2"
    assert text(process, BOTH, user(PARTS), called(TEXT, content="so")) == "[user|<one><two>][assistant|so]"


def test_a_template_that_writes_no_calls(process: TemplateProcess) -> None:
    """A message with nothing else would be an empty answer, such as with R1's, which asks for a null content:
    no template gets one, because transformers leaves keys out that are null."""
    null = "{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% else %}{{ '' + m.content }}"
    null += "{% endif %}"
    for template in (BOTH, f"{{% for m in messages %}}[{{{{ m.role }}}}|{null}]{{% endfor %}}"):
        for content in (None, ""):
            conversation = [user("hm"), called(TEXT, content=content)]
            [found] = process.render(template, {}, parse_conversations([conversation]), {})
            assert isinstance(found, TemplateError), found
            assert "it writes no tool calls, and message 1 has nothing else; pass another" in str(found)


def test_arguments_within_braces_of_the_template_are_an_object(process: TemplateProcess) -> None:
    """As Gemma's, which puts braces around the pairs of an object, and around any text."""
    template = calls(
        "{{ '{' }}{% if a is mapping %}{% for k, v in a.items() %}{{ k }}:{{ v }}{% endfor %}"
        "{% else %}{{ a }}{% endif %}{{ '}' }}"
    )
    for arguments in ({"x": 5}, '{"x": 5}'):
        assert text(process, template, user("hm"), called(arguments)) == "[user|hm][assistant|(f {x:5})]"


def test_each_form_is_tried_once() -> None:
    tried = []

    def render(conversation: list[dict[str, Any]]) -> str:
        tried.append(conversation)
        return "".join(str(each["content"]) for each in conversation)

    forms = Forms(render)
    for _ in range(3):
        assert forms.fit([user("a"), user(PARTS)]) == [user("a"), user("one\ntwo")]
    assert len(tried) == 3  # a text; parts, and then a text
