"""Forms: gives each message the form that a chat template takes.

OpenAI's messages have several forms: a content is a string or a list of parts, arguments of tool calls are
JSON text or an object, and beside tool calls there may be no content. A template takes some of these forms;
others it drops, fails at, or writes as Python does. Short trial conversations show which. Tokenises nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

# Words of the messages that are tried, which no template has of its own, and of those that surround them.
_WORDS, _OTHERS = ("qvaxel", "zorbit"), ("hm",)
_NAME, _KEY, _VALUE, _ID = "plimfetch", "wexkey", "jubval", "q4x7zk2m9"


class Form(NamedTuple):
    """How a message is written.

    content: "text", "parts", "part" (all text in one), "none" (null), "missing" (no key) or "empty" ("").
    arguments: of its tool calls, "text" or "object"; None without tool calls.
    """

    content: str
    arguments: str | None


# What is tried in turn for each form of a message, first the form itself.
_CONTENTS = {
    "text": ("text", "part"),
    "part": ("part", "text"),
    "parts": ("parts", "text", "part"),
    "none": ("none", "missing", "empty"),
    "empty": ("empty", "none", "missing"),
}
_ARGUMENTS: dict[str | None, tuple[str | None, ...]] = {
    "text": ("text", "object"),
    "object": ("object", "text"),
    None: (None,),
}


class Forms:
    """The forms that one template takes, each found once."""

    def __init__(self, render: Callable[[list[dict[str, Any]]], str]) -> None:
        """render: the template, for a conversation that nobody continues. It may raise anything."""
        self._render = render
        self._chosen: dict[tuple[str, Form], Form] = {}
        self._lost: set[tuple[str, Form]] = set()  # with tool calls that no form shows

    def fit(self, conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the conversation, each message in a form that the template takes: its own one if possible.

        Where no form is shown, contents stay as they are, except that parts become what the user's become,
        and arguments are objects. ValueError if no form shows the tool calls of a message that has nothing
        else.
        """
        fitted = [self._fitted(message) for message in conversation]
        for index, message in enumerate(conversation):
            if message.get("tool_calls") and (str(message["role"]), _form_of(message)) in self._lost:
                raise ValueError(
                    f"it writes no tool calls, and message {index} has nothing else; pass another "
                    "chat_template, or write them into the content"
                )
        return fitted

    def _fitted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message.get("content"), (str, list, type(None))):
            return dict(message)  # no form of OpenAI's, and the template's own matter
        given = _form_of(message)
        return _written(message, self._form(str(message["role"]), given))

    def _form(self, role: str, given: Form) -> Form:
        """The form in which the template gets such messages."""
        found = self._chosen.get((role, given))
        if found is None:
            found = self._chosen[role, given] = self._find(role, given)
        return found

    def _find(self, role: str, given: Form) -> Form:
        forms = [
            Form(content, arguments)
            for content, arguments in product(_CONTENTS[given.content], _ARGUMENTS[given.arguments])
        ]
        # Some templates drop a content beside tool calls: then the form of the calls is what counts.
        for words in (_WORDS, ()) if given.arguments else (_WORDS,):
            best, most = forms[0], 0
            for form in forms:
                shown = [self._is_shown(trial, form, words) for trial in self._trials(role, given, form)]
                if all(shown):
                    return form
                if sum(shown) > most:
                    best, most = form, sum(shown)
            if most:
                return best
        if given.arguments and given.content in ("none", "empty") and self._loses(role, given, forms):
            self._lost.add((role, given))
        content = given.content
        if content in ("part", "parts"):
            content = "text" if role == "user" else self._form("user", Form(content, None)).content
        elif content == "none":
            content = "empty"
        return Form(content, given.arguments and "object")

    def _loses(self, role: str, given: Form, forms: Sequence[Form]) -> bool:
        """Whether the template writes such messages, but no call of them."""
        plain = Form("text", None)
        writes = any(self._is_shown(trial, plain, _WORDS) for trial in self._trials(role, plain, plain))
        return writes and not any(
            _NAME in self._text(trial[: trial.index(message) + 1])
            for form in forms
            for trial in self._trials(role, given, form)
            for message in trial
            if message.get("tool_calls")
        )

    def _trials(self, role: str, given: Form, form: Form) -> Iterator[list[dict[str, Any]]]:
        """Conversations with a message of this role and form; templates differ in what may surround it."""
        message = _written(_trial(role, given), form)
        if role == "user":
            yield [message]
            return
        plain = Form("text", None)
        user = _written(_trial("user", plain, _OTHERS), self._form("user", plain))
        if role == "assistant":
            after = [_trial("tool", plain, _OTHERS)] * (given.arguments is not None)
            yield [user, message, *after]
            yield [user, message, *after, user]
        elif role in ("system", "developer"):
            yield [message, user]
        else:
            yield [user, self._fitted(_trial("assistant", Form("none", "object"))), message]
            yield [user, message]

    def _is_shown(self, trial: list[dict[str, Any]], form: Form, words: Sequence[str]) -> bool:
        """Whether the text of a trial has what its message says, and not as Python or JSON writes it.

        words: of its content, which must be shown.
        """
        text = self._text(trial)
        if form.content in ("text", "parts", "part"):
            needed = [*words]
        elif words and text.count("None") > self._text(_without_null(trial)).count("None"):
            return False  # a null that is written as a word
        else:
            needed = []
        if form.arguments is not None:
            needed += [_NAME, _KEY, _VALUE]
        if not all(word in text for word in needed):
            return False
        if form.content in ("parts", "part") and any(_pair("text", word, text) for word in _WORDS):
            return False
        if form.arguments == "object":
            return f"'{_KEY}'" not in text
        # JSON text within a string, or within braces of the template
        return form.arguments is None or not (f'\\"{_KEY}' in text or f'{{{{"{_KEY}' in text)

    def _text(self, trial: list[dict[str, Any]]) -> str:
        try:
            return self._render(trial)
        except Exception:  # a template may raise anything; then it does not take this form
            return ""


def _pair(key: str, value: str, text: str) -> bool:
    """Whether a key and its value stand in a text, as Python or JSON writes them."""
    return f"'{key}': '{value}" in text or f'"{key}": "{value}' in text or f'"{key}":"{value}' in text


def _form_of(message: Mapping[str, Any]) -> Form:
    content, calls = message.get("content"), message.get("tool_calls")
    written = "none" if content is None else "text"
    if isinstance(content, list):
        written = "part" if len(content) == 1 else "parts"
    if not calls:
        return Form(written, None)
    kinds = {type(each["function"].get("arguments")) for each in calls if "function" in each}
    return Form("empty" if content == "" else written, "text" if str in kinds else "object")


def _written(message: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """A copy of the message in a form."""
    written, content = dict(message), message.get("content")
    if form.content in ("text", "part"):
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
        written["content"] = text if form.content == "text" else [{"type": "text", "text": text}]
    elif form.content == "none":
        written["content"] = None
    elif form.content == "missing":
        written.pop("content", None)
    elif form.content == "empty":
        written["content"] = ""
    if form.arguments is not None:
        written["tool_calls"] = [_call(each, form.arguments) for each in message["tool_calls"]]
    return written


def _call(call: Mapping[str, Any], form: str) -> dict[str, Any]:
    """A copy of a tool call, with its arguments as "text" or "object"."""
    if "function" not in call:
        return dict(call)
    function = dict(call["function"])
    arguments = function["arguments"]
    if form == "object" and isinstance(arguments, str):
        function["arguments"] = json.loads(arguments or "{}")
    elif form == "text" and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": function}


def _trial(role: str, form: Form, words: Sequence[str] = _WORDS) -> dict[str, Any]:
    """A message of a trial, with these words as its content if the form has one."""
    message: dict[str, Any] = {"role": role, "content": None}
    if form.content in ("text", "part"):
        message["content"] = " ".join(words)
    elif form.content == "parts":
        message["content"] = [{"type": "text", "text": word} for word in words]
    if role not in ("system", "developer", "user", "assistant"):
        message |= {"name": _NAME, "tool_call_id": _ID}
    if form.arguments is not None:
        function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
        message["tool_calls"] = [{"id": _ID, "type": "function", "function": function}]
    return message


def _without_null(trial: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trial, with "" instead of a content that is null or missing."""
    return [message if message.get("content") else {**message, "content": ""} for message in trial]
