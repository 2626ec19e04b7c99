"""What callers pass: the types of prompts, with vLLM's names, prompts that are no strings, and checks of
further arguments.

`text/prompts.py` checks lists of prompts, and their parameters.
"""

from __future__ import annotations

import inspect
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeAlias, TypedDict, TypeVar

import numpy as np

from nanovllm.checks import pack_ints
from nanovllm.checks import show as show_value
from nanovllm.names import elsewhere, others_of, refuse_unknown
from nanovllm.params import SamplingParams

_Class = TypeVar("_Class")
PromptLike: TypeAlias = "str | Iterable[int] | Mapping[str, Any]"
NUMBERS = (int, float, np.number)  # elements of a list that is one prompt
_KEYS = ("prompt", "prompt_token_ids")  # of a dictionary
# The keys that transformers tokenizers return.
_ENCODED = {"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask"}


class TextPrompt(TypedDict):
    """A text prompt: `TextPrompt(prompt="Hello")`, a dictionary."""

    prompt: str


class _WithText(TypedDict, total=False):
    prompt: str  # the text that the ids came from; shown in the output


class TokensPrompt(_WithText):
    """A prompt of token ids: `TokensPrompt(prompt_token_ids=[5, 6])`, a dictionary."""

    prompt_token_ids: list[int]


def calls_of_llm(owner: type[_Class]) -> type[_Class]:
    """A class whose public methods are calls of LLM: Python's own errors name them so, and those that take no
    `others` refuse unknown arguments with an error of ours."""
    for name, function in list(vars(owner).items()):
        if not inspect.isfunction(function):
            continue
        if function.__name__ == name and (name == "__init__" or not name.startswith("_")):
            function.__qualname__ = f"LLM.{name}"
        if not name.startswith("_") and not function.__code__.co_flags & inspect.CO_VARKEYWORDS:
            setattr(owner, name, _refusing(function))
    return owner


def _refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with an error of ours for unknown arguments."""
    known = inspect.signature(call).parameters

    @wraps(call)
    def refusing(self: Any, *args: Any, **named: Any) -> Any:
        if named and not named.keys() <= known.keys():
            refuse_others(call, {name: named[name] for name in named if name not in known})
        return call(self, *args, **named)

    return refusing


def refuse_others(call: Callable[..., Any], others: Mapping[str, object], hint: str = "") -> None:
    """Check keyword arguments that `call` of LLM does not have.

    TypeError for a field of SamplingParams, and for an unknown name; the message of a name that no library
    here is known to have ends with `hint`. ValueError for an argument of vLLM's without a neutral value.
    """
    if not others:
        return
    name_of_call = f"LLM.{call.__name__}"
    known = [name for name in inspect.signature(call).parameters if name not in ("self", "others")]
    for name in others:
        is_sampling = name in SamplingParams.__dataclass_fields__ or name in others_of("SamplingParams")
        is_other = name in others_of(name_of_call) or elsewhere(name) is not None
        if is_sampling and "sampling_params" in known and not is_other:
            raise TypeError(f"{name_of_call}() got {name!r}; pass it as SamplingParams({name}=...)")
    try:
        refuse_unknown(name_of_call, others, known)
    except TypeError as error:
        raise TypeError(f"{error}{'' if any(map(elsewhere, others)) else hint}") from None


def in_mapping(prompt: Mapping[str, Any], where: str) -> tuple[Any, Sequence[int] | None, str]:
    """The text and the token ids of a dictionary of ours, or of the output of a transformers tokenizer for
    one string; the last is the text's name in errors. Without ids the text is unchecked, and not None."""
    if "input_ids" in prompt:
        rows = encoded_rows(prompt, where)
        if len(rows) != 1:
            raise ValueError(
                f"{where}['input_ids'] holds {len(rows)} prompts; pass the dictionary itself as the prompts"
            )
        return None, token_ids_in(rows[0], f"{where}['input_ids']"), where
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
        return text, None, f"{where}['prompt']"
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{where}['prompt'] must be a string, not {show(text)}")
    return text, token_ids_in(token_ids, f"{where}['prompt_token_ids']"), where


def encoded_rows(encoded: Mapping[str, Any], where: str) -> list[list[Any]]:
    """The rows of a transformers tokenizer's output, without padding."""
    unknown = set(encoded) - _ENCODED
    if unknown:
        raise ValueError(
            f"{where} has 'input_ids', like the output of a transformers tokenizer, and the keys "
            f"{sorted(map(str, unknown))}, which are not supported; {sorted(_ENCODED)} are"
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
    """The elements of an array, a tensor or an ordered iterable, as a list."""
    return list(iterable(value, expected))


def iterable(value: Any, expected: str) -> Iterable[Any]:
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


def token_ids_in(value: Any, where: str) -> Sequence[int]:
    """The token ids of a prompt, int32 in an array, unless some do not fit."""
    ids = iterable(value, f"{where} must be a string, a list of token ids or a dictionary")
    ids = ids if isinstance(ids, list) else list(ids)
    if not ids:
        raise ValueError(f"{where} is empty; a prompt needs at least one token")
    if (packed := packed_ints(ids)) is not None:  # nearly always, and ten times as fast as the loop below
        return packed
    for position, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
            raise TypeError(
                f"{where}: token id at position {position} must be an integer, not {show(token_id)}"
            )
    return [int(token_id) for token_id in ids]


def show(value: object) -> str:
    """The beginning of `value` and its type, for an error message."""
    return f"{show_value(value)} ({type(value).__name__})"


def packed_ints(ids: list[Any]) -> array[int] | None:
    """The ids as int32; None unless all are of the type int and fit. Looks at no single id: packing
    refuses what is no integer, an integer of another library makes the sum one, and True and False pack to 1
    and 0."""
    try:
        packed = pack_ints(ids)
        if type(sum(ids)) is not int:
            return None
    except (struct.error, TypeError, OverflowError):  # the last: a sum above the type of an id
        return None
    has_bool = np.frombuffer(packed, np.int32).min() <= 1 and bool in set(map(type, ids))
    return None if has_bool else packed
