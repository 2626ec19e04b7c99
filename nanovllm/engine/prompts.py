"""Prompts as users write them, checked and brought to one form, before anything is queued.

Knows nothing of tokenizers or devices: a text stays a text here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nanovllm.sampling_params import SamplingParams

PromptLike: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or token ids, or ids with the text that they came from."""

    text: str | None
    token_ids: list[int] | None


def parse_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """Bring one prompt or a list of them to `Prompt`s. Errors name the index, the value and the fix."""
    if isinstance(prompts, (str, Mapping)) or _is_id_list(prompts):
        return [parse_prompt(prompts, "the prompt")]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be a prompt or a list of prompts, not {show(prompts)}")
    return [parse_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def parse_prompt(prompt: Any, where: str) -> Prompt:
    """Bring one prompt to a `Prompt`; `where` says which one it is in an error."""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise ValueError(
                f"{where} must have the key 'prompt' or 'prompt_token_ids', not {sorted(prompt)}"
            )
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is None:
            return parse_prompt(text, f"{where}['prompt']")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{where}['prompt'] must be a text, not {show(text)}")
        return Prompt(text, _parse_ids(token_ids, f"{where}['prompt_token_ids']"))
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
        ids = np.frombuffer(packed, np.int32)
        known = not token_ids or (ids.min() >= 0 and ids.max() < vocab_size)
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
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Return a checked copy of the SamplingParams for each prompt; one object gets one copy.

    A list must be as long as the prompts.
    """
    if sampling_params is None:
        sampling_params = SamplingParams()
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
    for index, params in enumerate(sampling_params):
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


def _is_id_list(value: object) -> bool:
    """Whether `value` is one prompt of token ids rather than a list of prompts; an empty list is no
    prompts."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], (int, np.integer))


def _parse_ids(value: Any, where: str) -> list[int]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{where} must be a text, a list of token ids or a dictionary, not {show(value)}")
    if not value:
        raise ValueError(f"{where} is empty; a prompt needs at least one token")
    if set(map(type, value)) == {int}:  # nearly always, and ten times as fast as to look at each
        return list(value)
    for position, token_id in enumerate(value):
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
            raise TypeError(
                f"{where}: token id at position {position} must be an integer, not {show(token_id)}"
            )
    return [int(token_id) for token_id in value]


def show(value: object) -> str:
    """The beginning of `value` and its type, for an error message."""
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
