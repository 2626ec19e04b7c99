"""Checks prompts and their parameters and normalises them, before anything is queued: whole lists, and from
iterables of any length in batches.

Reads no further than requested. Knows nothing of tokenizers or devices: a string stays a string here.
`Request` is what the processor makes of a prompt.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nanovllm.checks import packed_ints
from nanovllm.checks import show as show_value
from nanovllm.errors import BadRow, attempt
from nanovllm.inputs import PromptLike
from nanovllm.names import refuse_unknown
from nanovllm.params import SamplingParams

_NUMBERS = (int, float, np.number)  # elements of a list that is one prompt
_KEYS = ("prompt", "prompt_token_ids")  # of a dictionary
READ_SECONDS = 0.005  # time limit for reading a batch, checked after each prompt
_READ_CHARS = 2**22  # of text in a batch, checked after each prompt
_END = object()
_Part = TypeVar("_Part")
# The keys that transformers tokenizers return.
_ENCODED = {"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A string, or token ids, or token ids with the string that they came from."""

    text: str | None
    token_ids: Sequence[int] | None  # int32 in an array, unless some do not fit
    add_special_tokens: bool = True  # when the string is tokenised; a chat template writes them itself
    tools: Any = None  # of a conversation, which give arguments of tool calls their types


def parse_prompts(prompts: PromptLike | Iterable[PromptLike]) -> tuple[list[Prompt | BadRow], list[str]]:
    """Normalise one prompt, or an iterable of prompts; also return the name of each prompt for errors.

    One prompt is a string, a dictionary, or integers in a list, an array or a one-dimensional tensor.
    TypeError if `prompts` is neither. A bad prompt is replaced by its error, with value and fix.
    """
    items, where = split_prompts(prompts)
    rows: list[Prompt | BadRow] = []
    names: list[str] = []
    for index, item in enumerate(items):
        names.append(where.format(index))
        rows.append(attempt(parse_prompt, item, names[-1]))
    return rows, names


def split_prompts(
    prompts: PromptLike | Iterable[PromptLike],
    expected: str = "prompts must be a prompt or a list of prompts",
) -> tuple[Iterator[Any], str]:
    """Return an iterator of the prompts, and their name for errors, a format string of the index.

    The first item of an iterable is read at once: it decides whether this is one prompt or several.
    expected: the beginning of a TypeError's message.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return iter(_encoded_rows(prompts, "the prompt")), "the prompt's row {}"
    if isinstance(prompts, (str, Mapping)):
        return iter([prompts]), "the prompt"
    items = iter(_iterable(prompts, expected))
    first = list(islice(items, 1))
    is_empty_array = not first and hasattr(prompts, "tolist")
    if is_empty_array or (first and isinstance(first[0], _NUMBERS)):
        return iter([[*first, *items]]), "the prompt"
    return chain(first, items), "prompts[{}]"


def parse_prompt(prompt: Any, where: str) -> Prompt:
    """Normalise one prompt to a `Prompt`. where: its name in errors."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, where)
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{where} is empty; a prompt needs at least one token")
        check_text(prompt, where)
        return Prompt(prompt, None)
    return _with_ids(None, prompt, where)


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
        return [_check_params(sampling_params, "sampling_params")] * num_prompts
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
        raise TypeError(
            f"sampling_params must be SamplingParams or a list of them, not {show(sampling_params)}"
        )
    if len(sampling_params) != num_prompts:
        raise ValueError(
            f"{len(sampling_params)} sampling_params for {num_prompts} prompts; "
            "pass one for all or one for each"
        )
    checked: dict[Any, SamplingParams] = {}  # by content
    rows: list[SamplingParams | BadRow] = []
    kept = list(sampling_params)  # alive, because `_content` may return their identities
    for index, params in enumerate(kept, first_index):
        key = _content(params)
        found: SamplingParams | BadRow | None = checked.get(key)
        if found is None:
            found = attempt(_check_params, params, f"sampling_params[{index}]")
            if isinstance(found, SamplingParams):
                checked[key] = found
        rows.append(found)
    return rows


def _content(params: Any) -> Any:
    """A key that parameters share only if all their fields are equal and of equal types; the identity of
    those that hold logits processors, which may have a state, or what cannot be pickled."""
    with suppress(Exception):  # a user's object may raise anything
        if isinstance(params, SamplingParams) and not params.logits_processors:
            return type(params), pickle.dumps([*vars(params).values()])
    return id(params)


def _check_params(params: Any, where: str) -> SamplingParams:
    """Return a checked copy of SamplingParams. where: their name in errors."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{where} must be SamplingParams, not {show(params)}")
    try:
        return params.checked()
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def _parse_mapping(prompt: Mapping[str, Any], where: str) -> Prompt:
    """A dictionary of ours, or the output of a transformers tokenizer for one string."""
    if "input_ids" in prompt:
        rows = _encoded_rows(prompt, where)
        if len(rows) != 1:
            raise ValueError(
                f"{where}['input_ids'] holds {len(rows)} prompts; pass the dictionary itself as the prompts"
            )
        return _with_ids(None, rows[0], f"{where}['input_ids']")
    if not prompt.keys() & set(_KEYS):
        hint = "; a conversation goes to chat()" if "role" in prompt else ""
        raise ValueError(
            f"{where} must have the key 'prompt' or 'prompt_token_ids', not {sorted(map(str, prompt))}{hint}"
        )
    others = {str(key): value for key, value in prompt.items() if key not in _KEYS}
    refuse_unknown("prompt", others, _KEYS, where)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if token_ids is None:
        if text is None or isinstance(text, Mapping):
            raise TypeError(f"{where}['prompt'] must be a string, not {show(text)}")
        return parse_prompt(text, f"{where}['prompt']")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{where}['prompt'] must be a string, not {show(text)}")
    return _with_ids(text, token_ids, f"{where}['prompt_token_ids']")


def _encoded_rows(encoded: Mapping[str, Any], where: str) -> list[list[Any]]:
    """The rows of a transformers tokenizer's output, without padding."""
    unknown = set(encoded) - _ENCODED
    if unknown:
        raise ValueError(
            f"{where} has 'input_ids', like the output of a transformers tokenizer, and the keys "
            f"{sorted(map(str, unknown))}, which are not supported; {sorted(_ENCODED)} are"
        )
    names = [name for name in ("input_ids", "attention_mask") if encoded.get(name) is not None]
    columns = [to_list(encoded[name], f"{where}[{name!r}] must be a list of token ids") for name in names]
    if not columns[0] or isinstance(columns[0][0], _NUMBERS):
        columns = [[column] for column in columns]
    rows = [to_list(row, f"{where}['input_ids'] must hold lists of token ids") for row in columns[0]]
    if len(columns) == 1:
        return rows
    kept = []
    for index, row in enumerate(rows):
        mask = to_list(columns[1][index], "") if index < len(columns[1]) else []
        if len(mask) != len(row):
            raise ValueError(f"{where}: row {index} has {len(row)} input_ids and {len(mask)} attention_mask")
        kept.append([token_id for token_id, wanted in zip(row, mask, strict=True) if wanted])
    return kept


def to_list(value: Any, expected: str) -> list[Any]:
    """The elements of an array, a tensor or an ordered iterable, as a list."""
    return list(_iterable(value, expected))


def _iterable(value: Any, expected: str) -> Iterable[Any]:
    if isinstance(value, list):
        return value
    if hasattr(value, "tolist"):  # NumPy, torch, pandas or array: gives Python numbers
        value = value.tolist()
    has_keys = hasattr(value, "keys")  # a dictionary, or a table, which iterates over column names
    if (
        has_keys
        or isinstance(value, (str, bytes, bytearray, set, frozenset))
        or not isinstance(value, Iterable)
    ):
        raise TypeError(f"{expected}, not {show(value)}")
    return value


def _with_ids(text: str | None, value: Any, where: str) -> Prompt:
    """A prompt of these token ids."""
    ids = _iterable(value, f"{where} must be a string, a list of token ids or a dictionary")
    ids = ids if isinstance(ids, list) else list(ids)
    if not ids:
        raise ValueError(f"{where} is empty; a prompt needs at least one token")
    if (packed := packed_ints(ids)) is not None:  # nearly always, and ten times as fast as the loop below
        return Prompt(text, packed)
    for position, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
            raise TypeError(
                f"{where}: token id at position {position} must be an integer, not {show(token_id)}"
            )
    return Prompt(text, [int(token_id) for token_id in ids])


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


def show(value: object) -> str:
    """The beginning of `value` and its type, for an error message."""
    return f"{show_value(value)} ({type(value).__name__})"


class PromptBatch(NamedTuple):
    """The result of one read, with one element for each prompt."""

    first_index: int  # index of the first prompt among all prompts
    prompts: list[Prompt | BadRow]
    params: list[SamplingParams | BadRow]  # checked
    where: list[str]  # the name of each prompt in errors


class PromptReader:
    """Reads prompts in the forms of `generate`, with one SamplingParams for all or one for each."""

    ended = False  # whether all prompts were read

    def __init__(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Iterable[SamplingParams],
    ) -> None:
        """Reads nothing yet. ValueError or TypeError for wrong parameters, or for a wrong number of them if
        both lengths are known."""
        self._prompts = prompts
        self._items: Iterator[Any] | None = None  # of `_prompts`, from the first read on
        self._where = ""
        self._index = 0  # of the next prompt
        self._same: SamplingParams | None = None
        self._params: Iterator[SamplingParams] = iter(())
        if isinstance(sampling_params, SamplingParams):
            self._same = _check_params(sampling_params, "sampling_params")
            return
        if isinstance(sampling_params, (str, Mapping)) or not isinstance(sampling_params, Iterable):
            raise TypeError(
                f"sampling_params must be SamplingParams or an iterable of them, not {show(sampling_params)}"
            )
        if isinstance(prompts, (list, tuple)) and isinstance(sampling_params, Sized):
            many = not prompts or not isinstance(prompts[0], _NUMBERS)
            num_prompts = len(prompts) if many else 1
            if len(sampling_params) != num_prompts:
                raise self._unequal(f"{len(sampling_params)} sampling_params for {num_prompts} prompts")
        self._params = iter(sampling_params)

    def read(self, most: int) -> PromptBatch:
        """Return up to `most` prompts, at least one unless all were read.

        Raises the iterables' own errors, TypeError if `prompts` is not iterable, and ValueError if one
        iterable ends before the other.
        """
        if self._items is None:
            self._items, self._where = split_prompts(self._prompts)
        first = self._index
        prompts: list[Prompt | BadRow] = []
        params: list[Any] = []
        where: list[str] = []
        num_chars = 0
        until = perf_counter() + READ_SECONDS
        while len(where) < most and num_chars < _READ_CHARS and not (where and perf_counter() > until):
            item, param = next(self._items, _END), self._same or next(self._params, _END)
            if item is _END:
                self.ended = True
                if self._same is None and param is not _END:
                    raise self._unequal(f"prompts end after {first + len(where)}, but sampling_params do not")
                break
            if param is _END:
                raise self._unequal(f"sampling_params end after {first + len(where)}, but prompts do not")
            where.append(self._where.format(first + len(where)))
            prompt = attempt(parse_prompt, item, where[-1])
            num_chars += len(prompt.text or "") if isinstance(prompt, Prompt) else 0
            prompts.append(prompt)
            params.append(param)
        self._index += len(where)
        if self._same is None:
            params = parse_sampling_params(params, len(params), first)
        return PromptBatch(first, prompts, params, where)

    @staticmethod
    def _unequal(what: str) -> ValueError:
        return ValueError(f"{what}; pass one for all or one for each")


@dataclass(frozen=True, slots=True)
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
    pooling: str | None = None  # of the prompt's hidden states: "last" or "mean"; None: no pooling
    tools: Any = None  # of a `Prompt`
    thinking: Any = None  # where rules on the next token meet thinking, as `reasoning/rules.py` has it

    @property
    def num_needed(self) -> int:
        """The number of leading prompt tokens to compute: the score of the last token does not need its own
        hidden state."""
        scores_only = self.params.max_tokens == 0 and self.first_scored is not None
        return max(1, len(self.prompt_token_ids) - scores_only)

    @property
    def next_wanted(self) -> int | None:
        """The first prompt position whose hidden state is needed, to score the next token or for pooling."""
        if self.pooling is not None:
            return 0 if self.pooling == "mean" else len(self.prompt_token_ids) - 1
        return None if self.first_scored is None else self.first_scored - 1
