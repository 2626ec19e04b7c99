"""Encodes prompts with continuations as token ids, for scoring. Scores nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.text.prompts import Prompt
from nanovllm.text.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Continued(NamedTuple):
    """A prompt and a continuation of it."""

    token_ids: list[int]  # of both
    first: int  # where the continuation begins


def encode_continuations(
    tokenizer: PreTrainedTokenizerBase | None,
    pairs: Sequence[tuple[Prompt, Prompt, str]],
    check_length: Callable[[str, str], None],
) -> list[Continued]:
    """Return the token ids of each (prompt, continuation, name in errors).

    Two strings are encoded together. The continuation begins where the result differs from the encoding of
    the prompt alone, so a token that spans both belongs to the continuation. ValueError for an empty part,
    for a string without a tokenizer, and for one that `check_length(text, name)` refuses.
    """
    wanted: dict[str, None] = {}  # strings to encode
    for prompt, continuation, where in pairs:
        if tokenizer is None and (prompt.token_ids is None or continuation.token_ids is None):
            raise ValueError(f"{where} has a string, and skip_tokenizer_init=True; pass token ids")
        for text in (each.text for each in (prompt, continuation) if each.token_ids is None):
            check_length(str(text), where)
        if prompt.token_ids is None:
            wanted[str(prompt.text)] = None
            if continuation.token_ids is None:
                check_length(f"{prompt.text}{continuation.text}", where)
                wanted[f"{prompt.text}{continuation.text}"] = None
    encoded: dict[str, list[int]] = {}
    if tokenizer is not None and wanted:
        encoded = dict(zip(wanted, encode(tokenizer, list(wanted)), strict=True))
    found = []
    for prompt, continuation, where in pairs:
        before = encoded[str(prompt.text)] if prompt.token_ids is None else prompt.token_ids
        if continuation.token_ids is not None:
            whole = [*before, *continuation.token_ids]
        elif prompt.token_ids is None:
            whole = encoded[f"{prompt.text}{continuation.text}"]
        else:
            assert tokenizer is not None
            whole = [*before, *encode(tokenizer, [str(continuation.text)], add_special_tokens=False)[0]]
        same = (first for first, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b)
        start = next(same, min(len(before), len(whole)))
        if start == 0:
            raise ValueError(f"{where}: the prompt has no token of its own; start it with other text")
        if start == len(whole):
            raise ValueError(f"{where}: the continuation has no tokens: {continuation.text!r}")
        found.append(Continued(whole, start))
    return found
