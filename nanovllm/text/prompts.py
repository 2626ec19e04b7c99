"""Prompts as users write them, checked and brought to one form, before anything is queued.

Knows nothing of tokenizers or devices: a text stays a text here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from nanovllm.inputs import PromptLike
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.rows import BadRow, attempt
from nanovllm.vllm_arguments import PROMPT, refuse_absent

NUMBERS = (int, float, np.number)  # in a list that is one prompt
KEYS = ("prompt", "prompt_token_ids")  # of a dictionary
# What tokenizers of transformers return.
ENCODED = {"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or token ids, or ids with the text that they came from."""

    text: str | None
    token_ids: list[int] | None


def parse_prompts(prompts: PromptLike | Iterable[PromptLike]) -> tuple[list[Prompt | BadRow], list[str]]:
    """Bring one prompt or several, in any iterable, to `Prompt`s; also return what errors call each.

    One prompt is a text, a dictionary, or integers in a list, an array or a tensor of one dimension.
    TypeError when there are none. The error of a single bad one, with value and fix, is in its place.
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
    """Return the prompts one by one, as they are asked for, and what errors call each, a format of its index.

    Of an iterable the first item is taken at once: it says whether this is one prompt or several. expected:
    what a TypeError says that `prompts` must be.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return iter(_encoded_rows(prompts, "the prompt")), "the prompt's row {}"
    if isinstance(prompts, (str, Mapping)):
        return iter([prompts]), "the prompt"
    items = iter(_iterable(prompts, expected))
    first = list(islice(items, 1))
    is_empty_array = not first and hasattr(prompts, "tolist")
    if is_empty_array or (first and isinstance(first[0], NUMBERS)):
        return iter([[*first, *items]]), "the prompt"
    return chain(first, items), "prompts[{}]"


def parse_prompt(prompt: Any, where: str) -> Prompt:
    """Bring one prompt to a `Prompt`; `where` says which one it is in an error."""
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, where)
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{where} is empty; a prompt needs at least one token")
        check_text(prompt, where)
        return Prompt(prompt, None)
    return Prompt(None, _parse_ids(prompt, where))


def check_text(text: str, where: str) -> None:
    """Raise ValueError when `text` has half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has a lone surrogate, {text[error.start]!r}, at position {error.start}, which is no "
            "character; mend it with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None


def pack_token_ids(token_ids: list[int], vocab_size: int, where: str) -> bytes:
    """Return the ids as int32, in bytes. ValueError when one is not in the vocabulary."""
    try:
        packed = struct.pack(f"={len(token_ids)}i", *token_ids)  # three times as fast as numpy takes a list
        known = not token_ids or np.frombuffer(packed, np.uint32).max() < vocab_size  # below 0 is past 2**31
    except struct.error:  # one is past int32
        known = False
    if not known:
        position, bad = next((i, id_) for i, id_ in enumerate(token_ids) if not 0 <= id_ < vocab_size)
        raise ValueError(
            f"{where}: token id {bad} at position {position} is outside the vocabulary "
            f"(0 to {vocab_size - 1})"
        )
    return packed


def parse_sampling_params(
    sampling_params: SamplingParams | Sequence[SamplingParams], num_prompts: int, first_index: int = 0
) -> list[SamplingParams]:
    """Return a checked copy of the SamplingParams for each prompt; one object gets one copy.

    A list must be as long as the prompts. first_index: where the list begins, for errors.
    """
    if isinstance(sampling_params, SamplingParams):
        return [_checked(sampling_params, "sampling_params")] * num_prompts
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
        raise TypeError(
            f"sampling_params must be SamplingParams or a list of them, not {show(sampling_params)}"
        )
    if len(sampling_params) != num_prompts:
        raise ValueError(
            f"{len(sampling_params)} sampling_params for {num_prompts} prompts; "
            "pass one for all or one for each"
        )
    checked: dict[int, SamplingParams] = {}
    for index, params in enumerate(sampling_params, first_index):
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params[{index}] must be SamplingParams, not {show(params)}")
        if id(params) not in checked:
            checked[id(params)] = _checked(params, f"sampling_params[{index}]")
    return [checked[id(params)] for params in sampling_params]


def _checked(params: SamplingParams, where: str) -> SamplingParams:
    try:
        return params.checked()
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def _parse_mapping(prompt: Mapping[str, Any], where: str) -> Prompt:
    """A dictionary of ours, or what a tokenizer of transformers returns for one text."""
    if "input_ids" in prompt:
        rows = _encoded_rows(prompt, where)
        if len(rows) != 1:
            raise ValueError(
                f"{where}['input_ids'] holds {len(rows)} prompts; pass the dictionary itself as the prompts"
            )
        return Prompt(None, _parse_ids(rows[0], f"{where}['input_ids']"))
    if not prompt.keys() & set(KEYS):
        hint = "; a conversation goes to chat()" if "role" in prompt else ""
        raise ValueError(
            f"{where} must have the key 'prompt' or 'prompt_token_ids', not {sorted(map(str, prompt))}{hint}"
        )
    refuse_absent(where, {str(key): value for key, value in prompt.items() if key not in KEYS}, PROMPT, KEYS)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if token_ids is None:
        if text is None or isinstance(text, Mapping):
            raise TypeError(f"{where}['prompt'] must be a text, not {show(text)}")
        return parse_prompt(text, f"{where}['prompt']")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{where}['prompt'] must be a text, not {show(text)}")
    return Prompt(text, _parse_ids(token_ids, f"{where}['prompt_token_ids']"))


def _encoded_rows(encoded: Mapping[str, Any], where: str) -> list[list[Any]]:
    """The prompts in what a tokenizer of transformers returns, without padding: one or several rows."""
    unknown = set(encoded) - ENCODED
    if unknown:
        raise ValueError(
            f"{where} has 'input_ids', as transformers' tokenizers return, and {sorted(map(str, unknown))}, "
            f"which is not supported; {sorted(ENCODED)} are"
        )
    names = [name for name in ("input_ids", "attention_mask") if encoded.get(name) is not None]
    columns = [to_list(encoded[name], f"{where}[{name!r}] must be a list of token ids") for name in names]
    if not columns[0] or isinstance(columns[0][0], NUMBERS):
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
    """A list of what an array, a tensor or an iterable in a fixed order holds."""
    return list(_iterable(value, expected))


def _iterable(value: Any, expected: str) -> Iterable[Any]:
    if isinstance(value, list):
        return value
    if hasattr(value, "tolist"):  # of NumPy, torch, pandas or array: their elements as Python's
        value = value.tolist()
    has_keys = hasattr(value, "keys")  # a dictionary, or a table, which gives the names of its columns
    if (
        has_keys
        or isinstance(value, (str, bytes, bytearray, set, frozenset))
        or not isinstance(value, Iterable)
    ):
        raise TypeError(f"{expected}, not {show(value)}")
    return value


def _parse_ids(value: Any, where: str) -> list[int]:
    ids = to_list(value, f"{where} must be a text, a list of token ids or a dictionary")
    if not ids:
        raise ValueError(f"{where} is empty; a prompt needs at least one token")
    if set(map(type, ids)) == {int}:  # nearly always, and ten times as fast as to look at each
        return ids
    for position, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
            raise TypeError(
                f"{where}: token id at position {position} must be an integer, not {show(token_id)}"
            )
    return [int(token_id) for token_id in ids]


def show(value: object) -> str:
    """The beginning of `value` and its type, for an error message."""
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
