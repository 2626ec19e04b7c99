"""The chat templates that TRL ships, of about 30 families: each conversation becomes transformers' text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs TRL, whose chat templates are tried: pip install -e '.[trl]'")

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from nanovllm.chat.conversations import check_template_options, parse_conversations, render_conversations
from nanovllm.chat.templates import TemplateProcess

SPEC = find_spec("trl")
assert SPEC is not None and SPEC.submodule_search_locations
FILES = sorted(Path(SPEC.submodule_search_locations[0]).glob("chat_templates/*.jinja"))
CITY = {"city": "Parisville", "days": 3}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}}
TOOL = {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": TOOL}]


class Tokenizer(PreTrainedTokenizerBase):
    special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # noqa: RUF012
    name_or_path = "public"


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def said(form: str, *texts: str) -> Any:
    """A content: "text", "parts", or "part", a single one."""
    if form == "parts":
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts) if form == "text" else [{"type": "text", "text": "\n".join(texts)}]


def plain(form: str, other: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": said(form, "Alphaq", "Betaq")},
        {"role": "assistant", "content": said(other, "Gammaq", "Deltaq")},
        {"role": "user", "content": said(form, "Etaq")},
    ]


def with_system(form: str, other: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": said(other, "Zetaq", "Thetaq")}, *plain(form, other)[:1]]


def with_call(form: str, other: str, arguments: Any, content: dict[str, Any]) -> list[dict[str, Any]]:
    call = {
        "id": "abc123def",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    result = {
        "role": "tool",
        "name": "get_weather",
        "tool_call_id": "abc123def",
        "content": said(other, "Iotaq"),
    }
    return [*plain(form, other)[:1], {"role": "assistant", **content, "tool_calls": [call]}, result]


FORMS = [(form, other) for form in ("text", "parts", "part") for other in ("text", "parts", "part")]
GIVEN = [form == other for form, other in FORMS]  # the other pairs only tell what a template can show
NONE: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}]
CALLS = [(arguments, content) for arguments in (CITY, json.dumps(CITY)) for content in NONE]
# Conversations that say the same in all forms, and what they say.
SAME = {
    ("Alphaq", "Betaq", "Gammaq", "Deltaq", "Etaq"): [plain(*forms) for forms in FORMS],
    ("Zetaq", "Thetaq", "Alphaq", "Betaq"): [with_system(*forms) for forms in FORMS],
    ("Alphaq", "Betaq", "get_weather", "Parisville", "Iotaq"): [
        with_call(*forms, *call) for call in CALLS for forms in FORMS
    ],
}
# Python's or JSON's way to write a part, and arguments that are Python's, or JSON within JSON or braces.
WRONG = re.compile(r"""['"]text['"]: ?['"]\w+q|\{'city'|\\"city|\{\{"city""")


def applied(template: str, conversation: Any, words: tuple[str, ...], options: dict[str, Any]) -> str | None:
    """The text of transformers; None where it fails, drops something, or writes a form as it stands."""
    options = {**options, "chat_template": template, "tokenize": False}
    try:
        text = str(Tokenizer().apply_chat_template(conversation, **options))
    except Exception:  # a template may raise anything
        return None
    return text if all(word in text for word in words) and not WRONG.search(text) else None


def test_there_are_as_many_as_the_documents_say() -> None:
    assert len(FILES) >= 72


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_text_is_that_of_transformers(file: Path, process: TemplateProcess) -> None:
    """That of the given forms if it has all that was said; else that of other forms which has."""
    template = file.read_text("utf-8")
    for words, same in SAME.items():
        tools = TOOLS if "get_weather" in words else None
        options = check_template_options(Tokenizer(), template, True, False, tools, None)
        good = [applied(template, conversation, words, options) for conversation in same]
        found = render_conversations(Tokenizer(), parse_conversations(same), options, process)
        for prompt, own, is_given in zip(found, good, GIVEN * (len(same) // len(GIVEN)), strict=True):
            if not is_given:
                continue
            text = getattr(prompt, "text", None)
            if own is not None:
                assert text == own
            elif any(good):
                assert text in good
            elif text is not None:  # no form shows all of it
                assert not WRONG.search(text)
