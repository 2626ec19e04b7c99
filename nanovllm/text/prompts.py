"""Checks prompts and their parameters and normalises them, before anything is queued.

Knows nothing of tokenizers or devices: a string stays a string here.
`Request` is what the processor makes of a prompt.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, TypeVar, cast

from nanovllm.checks import BadRow, attempt, checked
from nanovllm.doors import TEXT, find
from nanovllm.inputs import NUMBERS, PromptLike, encoded_rows, in_mapping, iterable, show, token_ids_in
from nanovllm.params import SamplingParams

_Part = TypeVar("_Part")


@dataclass(slots=True)  # a frozen one takes four times as long to make, and so does a `Request`
class Prompt:
    """A string, or token ids, or token ids with the string that they came from."""

    text: str | None
    token_ids: Sequence[int] | None  # int32 in an array, unless some do not fit
    add_special_tokens: bool = True  # when the string is tokenised; a chat template writes them itself
    tools: Any = None  # of a conversation, which give arguments of tool calls their types
    where: str = field(default="the prompt", compare=False)  # its name in errors


def given_prompts(prompts: Any, prompt_token_ids: Any) -> Any:
    """The prompts, under either of vLLM's names. TypeError for none, ValueError for both."""
    if prompts is None and prompt_token_ids is None:
        raise TypeError("LLM.generate() needs prompts: a string, token ids, or a list of these")
    if prompts is not None and prompt_token_ids is not None:
        raise ValueError("prompts and prompt_token_ids are the same argument; pass one of them")
    return prompt_token_ids if prompts is None else prompts


def parse_prompts(prompts: PromptLike | Iterable[PromptLike]) -> Sequence[Prompt | BadRow]:
    """Normalise one prompt, or an iterable of prompts.

    One prompt is a string, a dictionary, or integers in a list, an array or a one-dimensional tensor.
    TypeError if `prompts` is neither. A bad prompt is replaced by its error. Many are made late.
    """
    if isinstance(prompts, list) and len(prompts) > 2 and (late := find(TEXT["late"])(prompts)):
        return cast(Sequence[Prompt], late)
    items, where = split_prompts(prompts)
    return [attempt(parse_prompt, item, where.format(index)) for index, item in enumerate(items)]


def split_prompts(
    prompts: PromptLike | Iterable[PromptLike],
    expected: str = "prompts must be a prompt or a list of prompts",
) -> tuple[Iterator[Any], str]:
    """Return an iterator of the prompts, and their name for errors, a format string of the index.

    The first item of an iterable is read at once: it decides whether this is one prompt or several.
    expected: the beginning of a TypeError's message.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return iter(encoded_rows(prompts, "the prompt")), "the prompt's row {}"
    if isinstance(prompts, (str, Mapping)):
        return iter([prompts]), "the prompt"
    items = iter(prompts if isinstance(prompts, list) else iterable(prompts, expected))
    first = list(islice(items, 1))
    is_empty_array = not first and hasattr(prompts, "tolist")
    if is_empty_array or (first and isinstance(first[0], NUMBERS)):
        return iter([[*first, *items]]), "the prompt"
    return chain(first, items), "prompts[{}]"


def parse_prompt(prompt: Any, where: str) -> Prompt:
    """Normalise one prompt to a `Prompt`. where: its name in errors."""
    if isinstance(prompt, Prompt):
        return replace(prompt, where=where)
    name = where
    if isinstance(prompt, Mapping):
        text, ids, name = in_mapping(prompt, where)
        if ids is not None:
            return Prompt(text, ids, where=where)
        prompt = text
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{name} is empty; a prompt needs at least one token")
        check_text(prompt, name)
        return Prompt(prompt, None, where=where)
    return Prompt(None, token_ids_in(prompt, name), where=where)


def check_text(text: str, where: str) -> None:
    """Raise ValueError if `text` has half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has a lone surrogate, {text[error.start]!r}, at position {error.start}, which is no "
            "character; repair it with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None


def parse_sampling_params(
    sampling_params: SamplingParams | Sequence[SamplingParams], num_prompts: int, first_index: int = 0
) -> list[SamplingParams | BadRow]:
    """Return a checked copy of the SamplingParams for each prompt; equal ones share a copy.

    A list must be as long as the prompts; a wrong element is replaced by its error. One wrong object for all
    prompts raises its error. first_index: index of the first element, for errors.
    """
    if isinstance(sampling_params, SamplingParams):
        return [check_params(sampling_params, "sampling_params")] * num_prompts
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
        raise TypeError(
            f"sampling_params must be SamplingParams or a list of them, not {show(sampling_params)}"
        )
    if len(sampling_params) != num_prompts:
        raise ValueError(
            f"{len(sampling_params)} sampling_params for {num_prompts} prompts; "
            "pass one for all or one for each"
        )
    by_content: dict[Any, SamplingParams] = {}
    rows: list[SamplingParams | BadRow] = []
    kept = list(sampling_params)  # alive, because `_content` may return their identities
    for index, params in enumerate(kept, first_index):
        key = _content(params)
        found: SamplingParams | BadRow | None = by_content.get(key)
        if found is None:
            found = attempt(check_params, params, f"sampling_params[{index}]")
            if isinstance(found, SamplingParams):
                by_content[key] = found
        rows.append(found)
    return rows


def _content(params: Any) -> Any:
    """A key that parameters share only if all their fields are equal and of equal types; the identity of
    those that hold logits processors, which may have a state, or what cannot be pickled."""
    with suppress(Exception):  # a user's object may raise anything
        if isinstance(params, SamplingParams) and not params.logits_processors:
            return type(params), pickle.dumps([*vars(params).values()])
    return id(params)


def check_params(params: Any, where: str) -> SamplingParams:
    """Return a checked copy of SamplingParams. where: their name in errors."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{where} must be SamplingParams, not {show(params)}")
    try:
        return checked(params)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def portions(parts: list[_Part], most: int, size: Callable[[_Part], int]) -> Iterator[list[_Part]]:
    """The parts in lists whose sizes add up to `most` or less; a larger part is alone."""
    some: list[_Part] = []
    total = 0
    for part in parts:
        more = size(part)
        if some and total + more > most:
            yield some
            some, total = [], 0
        some.append(part)
        total += more
    if some:
        yield some


@dataclass(slots=True)
class Request:
    """A request for `params.n` completions of a prompt. Every value is checked."""

    request_id: int
    prompt: str | None  # the prompt's string, if the caller passed one
    prompt_token_ids: array[int]  # int32
    params: SamplingParams
    stop_token_ids: frozenset[int]  # the caller's and, unless ignored, the model's end-of-sequence ids
    bad_words: tuple[tuple[int, ...], ...]  # the token ids of each
    constraint: Any  # on the output's text, as `extras/structured.py` compiles it; None: any text
    index: int = 0  # of the prompt, in its call
    first_scored: int | None = None  # the first prompt token to score; None: none
    pooling: str | None = None  # of the prompt's hidden states: "last", "mean", or a task of pooling_heads/
    tools: Any = None  # of a `Prompt`
    thinking: Any = None  # where rules on the next token meet thinking, as `reasoning/rules.py` has it

    @property
    def num_needed(self) -> int:
        """The number of leading prompt tokens to compute: the score of the last token does not need its own
        hidden state."""
        scores_only = self.params.max_tokens == 0 and self.first_scored is not None
        return max(1, len(self.prompt_token_ids) - scores_only)
