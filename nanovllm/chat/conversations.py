"""Conversations: checks them, normalises them to lists of messages, and applies a chat template, with errors
that name the conversation.

Tokenises nothing.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from nanovllm.chat.message_forms import Forms
from nanovllm.chat.templates import PLAIN, TemplateError, TemplateProcess, applied, plain
from nanovllm.checks import BadRow, attempt
from nanovllm.inputs import show, to_list
from nanovllm.reasoning.messages import fit_reasoning
from nanovllm.reasoning.templates import takes_xml_tools, thinking_variables
from nanovllm.text.prompts import Prompt, check_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger("nanovllm")

Conversation: TypeAlias = "Iterable[Mapping[str, Any]]"

_MESSAGE = "{'role': ..., 'content': ...}"


def parse_conversations(
    messages: Conversation | Iterable[Conversation],
) -> list[list[dict[str, Any]] | BadRow]:
    """Normalise one conversation or several to lists of messages. A content is a string, a list of parts
    {'type': 'text', 'text': string}, or None beside tool calls, whose arguments are an object or valid JSON.

    TypeError if `messages` is neither. A bad conversation is replaced by a ValueError or TypeError that names
    the conversation, the message and the fix.
    """
    if isinstance(messages, Mapping):
        raise TypeError(
            f"messages must be a list of messages; put a single message into a list: [{_MESSAGE}]"
        )
    items = to_list(messages, f"messages must be a list of messages {_MESSAGE} or a list of such lists")
    if items and isinstance(items[0], Mapping):
        items = [items]
    return [attempt(_conversation, item, f"conversation {index}") for index, item in enumerate(items)]


def _conversation(value: Any, where: str) -> list[dict[str, Any]]:
    messages = to_list(value, f"{where} must be a list of messages {_MESSAGE}")
    if not messages:
        raise ValueError(f"{where} has no messages; give it at least one {_MESSAGE}")
    return [_message(message, f"{where}, message {index}") for index, message in enumerate(messages)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} must be a dictionary {_MESSAGE}, not {show(value)}")
    message = dict(value)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        given = f"'role': {show(role)}" if "role" in message else f"the keys {sorted(map(str, message))}"
        raise ValueError(f"{where} needs a role, such as 'role': 'user'; it has {given}")
    if message.get("tool_calls"):
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
    else:
        message.pop("tool_calls", None)
    message["content"] = _content(message.get("content"), "tool_calls" in message, where)
    return message


def _content(value: Any, may_be_none: bool, where: str) -> str | list[dict[str, str]] | None:
    """The content of a message: a string, a list of parts, or None beside tool calls."""
    if value is None:
        if not may_be_none:
            raise ValueError(f"{where} has no content; pass a string, '' for an empty one")
        return None
    if isinstance(value, str):
        check_text(value, where)
        return value
    expected = "content must be a string or a list of parts {'type': 'text', 'text': ...}"
    parts = to_list(value, f"{where}: {expected}")
    return [_part(part, f"{where}, content part {index}") for index, part in enumerate(parts)]


def _part(value: Any, where: str) -> dict[str, str]:
    text = value
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind != "text":
            raise ValueError(
                f"{where} has the type {kind!r}, which is not supported; only text is supported: "
                "{'type': 'text', 'text': ...}"
            )
        text = value.get("text")
    if not isinstance(text, str):
        raise TypeError(f"{where} must be {{'type': 'text', 'text': ...}} with a string, not {show(value)}")
    check_text(text, where)
    return {"type": "text", "text": text}


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls, each function with arguments: an object, or valid JSON as a string, OpenAI's form."""
    calls = []
    for index, call in enumerate(to_list(value, f"{where}: tool_calls must be a list")):
        if not isinstance(call, Mapping):
            raise TypeError(f"{where}: tool_calls[{index}] must be a dictionary, not {show(call)}")
        call = dict(call)
        if isinstance(call.get("function"), Mapping):
            function = call["function"] = dict(call["function"])
            arguments = function["arguments"] = function.get("arguments") or {}
            if isinstance(arguments, str):
                try:
                    json.loads(arguments)
                except ValueError as error:
                    raise ValueError(
                        f"{where}: the arguments of tool_calls[{index}] are not valid JSON ({error}): "
                        f"{show(arguments)}"
                    ) from None
        calls.append(call)
    return calls


# -- chat templates -----------------------------------------------------------------------------------------


class Thinking(NamedTuple):
    """Thinking that a template shall turn on or off, and its effort; None leaves both to the template."""

    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


def check_template_options(
    tokenizer: PreTrainedTokenizerBase | None,
    chat_template: str | os.PathLike[str] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Any] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    thinking: Thinking = Thinking(),  # noqa: B008
) -> dict[str, Any]:
    """Return the arguments of `tokenizer.apply_chat_template`. ValueError or TypeError names the argument.

    chat_template: see `find_template`.
    """
    if chat_template is not None and not isinstance(chat_template, (str, os.PathLike)):
        raise TypeError(
            "chat_template must be a Jinja template as a string, the path of a file that holds one, or a "
            f"name, not {show(chat_template)}"
        )
    if tokenizer is None:
        raise ValueError(
            "chat() needs a tokenizer, and skip_tokenizer_init=True; pass token ids to generate() instead"
        )
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            "this model has no chat template; put chat_template.jinja into its folder, pass chat_template, "
            "or pass whole prompts to generate()"
        )
    flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, not {show(flag)}")
    if add_generation_prompt and continue_final_message:
        raise ValueError("continue_final_message=True needs add_generation_prompt=False")
    if tools is not None and (isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence)):
        raise TypeError(f"tools must be a list of JSON schemas or functions, not {show(tools)}")
    variables = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(variables, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dictionary, not {show(variables)}")
    taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"documents", "kwargs"}
    for name in variables:
        if not isinstance(name, str) or name in taken:
            is_argument = name in flags or name in ("tools", "chat_template")
            fix = f"write chat(..., {name}=...)" if is_argument else "leave it out"
            raise ValueError(
                f"chat_template_kwargs holds variables of the template, and {name!r} is not one; {fix}"
            )
    all_tools = list(tools) if tools else None
    template = find_template(tokenizer, chat_template, all_tools)
    chosen = None if chat_template is None else template
    variables = {**variables, **_switches(template, thinking, variables)}
    if all_tools and takes_xml_tools(template) and not {"xml_tools", "python_tools"} & variables.keys():
        schemas = attempt(_schemas, all_tools)  # an error is one of each conversation
        variables |= {} if isinstance(schemas, Exception) else {"xml_tools": schemas}
    options = {"chat_template": chosen, "tools": all_tools, **flags}
    given = [*variables, "tools"] if all_tools else variables
    _warn_of_unused(template, tuple(name for name in given if name not in template))
    return options | dict(variables)


def _switches(template: str, thinking: Thinking, given: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a template for what is asked of thinking. ValueError if others are given for the
    same."""
    on, effort = thinking
    if on is not None and not isinstance(on, bool):
        raise TypeError(f"enable_thinking must be True, False or None, not {show(on)}")
    if effort is not None and not isinstance(effort, str):
        raise TypeError(f"reasoning_effort must be a word such as 'low', or None, not {show(effort)}")
    found = thinking_variables(template, on, effort)
    for name, value in found.items():
        if name in given and given[name] != value:
            raise ValueError(
                f"chat_template_kwargs has {name}={show(given[name])}, and {name}={value!r} follows from "
                f"enable_thinking={on} and reasoning_effort={effort!r}; pass one of them"
            )
    return found


def find_template(
    tokenizer: PreTrainedTokenizerBase, chosen: str | os.PathLike[str] | None, tools: list[Any] | None
) -> str:
    """Return the text of a chat template.

    chosen: the name of one of the model's templates, a Jinja template, or the path of a file that holds one,
    also in JSON under the key chat_template; None is the model's own. ValueError for what is none of these.
    """
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if chosen is None:
        text, what = (
            tokenizer.get_chat_template(None, tools),
            f"the chat template of {tokenizer.name_or_path}",
        )
    elif isinstance(chosen, str) and (chosen in named or _has_jinja(chosen)):
        return str(named.get(chosen, chosen))
    else:
        text, what = _read_template(Path(chosen).expanduser(), named), f"chat_template: the file {chosen}"
    if not _has_jinja(text):
        raise ValueError(f"{what} is no Jinja template, and would make every prompt {show(text)}")
    return str(text)


def _has_jinja(text: str) -> bool:
    """Whether a text has anything that Jinja replaces; else it is no template."""
    return "{{" in text or "{%" in text


def _read_template(path: Path, named: Iterable[str]) -> str:
    """The template that a file holds."""
    try:
        text = path.read_text("utf-8")
        return str(json.loads(text)["chat_template"]) if path.suffix == ".json" else text
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"chat_template: the file {path} holds no template as UTF-8 text, nor as JSON under the key "
            f"chat_template ({type(error).__name__}: {error})"
        ) from None
    except (OSError, ValueError) as error:  # not there, or no possible name of a file
        names = f"the model's names are {', '.join(sorted(named))}" if named else "the model's has no name"
        raise ValueError(
            f"chat_template={show(str(path))} is no Jinja template, for it holds neither {{{{ nor {{%; no "
            f"file ({getattr(error, 'strerror', error)}); and no name of a template of the model: {names}"
        ) from None


@lru_cache  # warn once, not for each row of a file
def _warn_of_unused(template: str, names: tuple[str, ...]) -> None:
    if names:
        _logger.warning("the chat template does not use %s, which changes nothing", ", ".join(names))


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[dict[str, Any]] | BadRow],
    options: Mapping[str, Any],
    process: TemplateProcess,
) -> list[Prompt | BadRow]:
    """Apply the chat template to each conversation, in `process`; the results are not tokenised yet.

    An error stays in its place. If the template fails or is stopped, a ValueError replaces the conversation.
    A tokenizer with an `apply_chat_template` of its own applies it here: that is code, which is trusted.
    """
    template, tools = _template_and_tools(tokenizer, options)
    texts: list[Any] = [
        attempt(_with_thinking, each, template, f"conversation {row}") if isinstance(each, list) else each
        for row, each in enumerate(conversations)
    ]
    good = [row for row, each in enumerate(texts) if not isinstance(each, Exception)]
    if type(tokenizer).apply_chat_template.__module__ == "transformers.tokenization_utils_base":
        given = attempt(_plain_arguments, tokenizer, [texts[row] for row in good], options)
        if isinstance(given, Exception):
            rendered: list[Any] = [given] * len(good)
        else:
            text, special, plain_texts, rest = given
            rendered = process.render(text, special, plain_texts, rest)
    else:
        forms = Forms(partial(applied, tokenizer, {**options, **PLAIN}))
        rendered = [_apply(tokenizer, forms, texts[row], options) for row in good]
    for row, text in zip(good, rendered, strict=True):
        texts[row] = text
    chosen = options.get("chat_template")
    name = f"of {tokenizer.name_or_path}" if chosen is None else "that was passed"
    where = (f"conversation {row}" for row in range(len(texts)))
    return [attempt(_as_prompt, text, row, name, tools) for text, row in zip(texts, where, strict=True)]


def _template_and_tools(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> tuple[str, list[Any] | None]:
    """The text of the template, "" if it is hidden in code; and the tools as JSON schemas, None if a function
    has none."""
    tools = attempt(_schemas, options.get("tools"))
    known = None if isinstance(tools, Exception) else tools
    given = options.get("chat_template")
    text = given if given is not None else attempt(tokenizer.get_chat_template, None, known)
    return text if isinstance(text, str) else "", known


def _with_thinking(messages: list[dict[str, Any]], template: str, where: str) -> list[dict[str, Any]]:
    try:
        return fit_reasoning(messages, template)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}, {error}") from None


def _schemas(tools: Sequence[Any] | None) -> list[Any] | None:
    """The tools, functions as their schemas. ValueError for a function that has none."""
    from transformers.utils.chat_template_utils import get_json_schema

    if tools is None:
        return None
    try:
        return [get_json_schema(tool) if inspect.isroutine(tool) else tool for tool in tools]
    except Exception as error:  # of transformers' own types
        raise ValueError(f"tools: {type(error).__name__}: {error}") from error


def _plain_arguments(
    tokenizer: PreTrainedTokenizerBase, conversations: list[Any], options: Mapping[str, Any]
) -> tuple[str, Any, list[Any], dict[str, Any]]:
    """The arguments of `TemplateProcess.render`. ValueError for a function among the tools that has no
    schema."""
    tools = _schemas(options.get("tools"))
    template = tokenizer.get_chat_template(options.get("chat_template"), tools)
    rest = {name: value for name, value in options.items() if name not in ("tools", "chat_template")}
    special = plain(tokenizer.special_tokens_map)
    return template, special, plain(conversations), plain({**rest, "tools": tools})


def _apply(
    tokenizer: PreTrainedTokenizerBase, forms: Forms, conversation: Any, options: Mapping[str, Any]
) -> Any:
    try:
        return applied(tokenizer, options, forms.fit(conversation))
    except Exception as error:  # it may raise anything
        return TemplateError(f"{type(error).__name__}: {error}")


def _as_prompt(text: Any, where: str, name: str, tools: Any) -> Prompt:
    """The prompt of a rendered conversation. name: of the template, in errors. tools: as schemas."""
    if isinstance(text, TemplateError) and not text.was_stopped:
        raise ValueError(f"{where}: the chat template fails ({text})")
    if isinstance(text, TemplateError):
        raise ValueError(
            f"{where}: the chat template {name} {text}; put another chat_template.jinja into the model's "
            "folder, or pass chat_template"
        )
    if isinstance(text, Exception):
        raise text
    check_text(text, where)
    return Prompt(str(text), None, add_special_tokens=False, tools=tools, where=where)
