"""Tokenizers and chat templates, with errors that name the prompt. Keeps no request."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import BadRow, ModelLoadError, attempt
from nanovllm.text.lengths import num_bytes
from nanovllm.text.prompts import Prompt, check_text, show
from nanovllm.text.templates import TemplateFailedError, TemplateProcess, TemplateStoppedError, plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("nanovllm")

ENCODED_BYTES = 2**19  # tokenised at once; it takes up to 300 times this memory, and up to a second


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `path`; `trust_remote_code` runs code from that folder.

    Raises ModelLoadError that says what to do without a tokenizer.
    """
    from transformers import AutoTokenizer  # here, because importing it takes as long as importing torch

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        if not tokenizer("a")["input_ids"]:  # transformers' result for a folder without tokenizer files
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # transformers raises many kinds
        raise ModelLoadError(
            f"no tokenizer could be loaded from {path} ({error}); put the model's tokenizer files there, "
            "pass a folder that has them as tokenizer, or pass skip_tokenizer_init=True and token ids as "
            "prompts"
        ) from error
    return tokenizer


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each string. transformers' warnings about long strings are off: the engine
    checks the length.

    Several calls of the tokenizer limit its memory, and let signals act between them. A string that is longer
    than this is tokenised in another thread, because that takes long and no signal ends it. After Ctrl-C the
    thread goes on, and what it finds is dropped.
    """

    def encode_some(some: list[str]) -> list[list[int]]:
        return tokenizer(some, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    found: list[list[int]] = []
    for some, size in _portions(texts):
        if size <= ENCODED_BYTES:
            found += encode_some(some)
            continue
        future: Future[list[list[int]]] = Future()
        threading.Thread(target=_fulfil, args=(future, encode_some, some), daemon=True).start()
        found += future.result()
    return found


def _fulfil(future: Future[Any], call: Any, *args: Any) -> None:
    try:
        future.set_result(call(*args))
    except BaseException as error:
        future.set_exception(error)


def _portions(texts: list[str]) -> Iterator[tuple[list[str], int]]:
    """The strings in lists of up to ENCODED_BYTES, with their bytes; a longer string is alone."""
    some: list[str] = []
    size = 0
    for text in texts:
        more = num_bytes(text)
        if some and size + more > ENCODED_BYTES:
            yield some, size
            some, size = [], 0
        some.append(text)
        size += more
    if some:
        yield some, size


def bad_word_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, without and with a leading space.

    As in vLLM, the form with a space is used only if it has the same number of tokens and begins with another
    token. Leading whitespace of a word is removed, unless the word is only whitespace. ValueError for a word
    without tokens.
    """
    found: list[tuple[int, ...]] = []
    texts = [word.lstrip() or word for word in words]
    all_bare = encode(tokenizer, texts, add_special_tokens=False)  # together, which is faster
    all_spaced = encode(tokenizer, [f" {text}" for text in texts], add_special_tokens=False)
    for word, *ids in zip(words, all_bare, all_spaced, strict=True):
        bare, spaced = map(tuple, ids)
        if not bare:
            raise ValueError(f"bad_words has {word!r}, which has no tokens; leave it out")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(found)


def check_template_options(
    tokenizer: PreTrainedTokenizerBase | None,
    chat_template: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Any] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the arguments of `tokenizer.apply_chat_template`. ValueError or TypeError names the argument."""
    if chat_template is not None and not isinstance(chat_template, str):
        raise TypeError(f"chat_template must be a Jinja template as a string, not {show(chat_template)}")
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
    options = {"chat_template": chat_template, "tools": all_tools, **flags}
    template = tokenizer.get_chat_template(chat_template, all_tools)
    given = [*variables, "tools"] if all_tools else variables
    _warn_of_unused(template, tuple(name for name in given if name not in template))
    return options | dict(variables)


@lru_cache  # warn once, not for each row of a file
def _warn_of_unused(template: str, names: tuple[str, ...]) -> None:
    if names:
        logger.warning("the chat template does not use %s, which changes nothing", ", ".join(names))


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
    texts: list[Any] = list(conversations)
    good = [row for row, each in enumerate(texts) if not isinstance(each, Exception)]
    if type(tokenizer).apply_chat_template.__module__ == "transformers.tokenization_utils_base":
        given = attempt(_plain_arguments, tokenizer, [conversations[row] for row in good], options)
        rendered: list[Any] = [given] * len(good) if isinstance(given, Exception) else process.render(*given)
    else:
        rendered = [_apply(tokenizer, conversations[row], options) for row in good]
    for row, text in zip(good, rendered, strict=True):
        texts[row] = text
    chosen = options.get("chat_template")
    name = f"of {tokenizer.name_or_path}" if chosen is None else "that was passed"
    return [attempt(_as_prompt, text, f"conversation {row}", name) for row, text in enumerate(texts)]


def _plain_arguments(
    tokenizer: PreTrainedTokenizerBase, conversations: list[Any], options: Mapping[str, Any]
) -> tuple[str, Any, list[Any], dict[str, Any]]:
    """The arguments of `TemplateProcess.render`. ValueError for a function among the tools that has no
    schema."""
    from transformers.utils.chat_template_utils import get_json_schema

    tools = options.get("tools")
    if tools is not None:
        try:
            tools = [get_json_schema(tool) if inspect.isroutine(tool) else tool for tool in tools]
        except Exception as error:  # of transformers' own types
            raise ValueError(f"tools: {type(error).__name__}: {error}") from error
    template = tokenizer.get_chat_template(options.get("chat_template"), tools)
    rest = {name: value for name, value in options.items() if name not in ("tools", "chat_template")}
    special = plain(tokenizer.special_tokens_map)
    return template, special, plain(conversations), plain({**rest, "tools": tools})


def _apply(tokenizer: PreTrainedTokenizerBase, conversation: Any, options: Mapping[str, Any]) -> Any:
    try:
        return tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    except Exception as error:  # it may raise anything
        return TemplateFailedError(f"{type(error).__name__}: {error}")


def _as_prompt(text: Any, where: str, name: str) -> Prompt:
    """The prompt of a rendered conversation. name: of the template, in errors."""
    if isinstance(text, TemplateFailedError):
        raise ValueError(f"{where}: the chat template fails ({text})")
    if isinstance(text, TemplateStoppedError):
        raise ValueError(
            f"{where}: the chat template {name} {text}; put another chat_template.jinja into the model's "
            "folder, or pass chat_template"
        )
    if isinstance(text, Exception):
        raise text
    check_text(text, where)
    return Prompt(str(text), None, add_special_tokens=False)
