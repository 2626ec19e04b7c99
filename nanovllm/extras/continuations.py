"""Pairs of a prompt and a continuation, for scores: checks them, and says where the continuation begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from nanovllm.inputs import PromptLike, show, to_list
from nanovllm.text.processor import encode
from nanovllm.text.prompts import Prompt, parse_prompt, split_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pair: TypeAlias = "tuple[Prompt, Prompt, str]"  # prompt, continuation, name of both in errors


class _Continued(NamedTuple):
    """A prompt and a continuation of it."""

    token_ids: list[int]  # of both
    first: int  # where the continuation begins


def parse_continuations(prompt: PromptLike, continuations: PromptLike | Iterable[PromptLike]) -> list[Pair]:
    """Normalise one prompt and its continuations. TypeError or ValueError names the wrong one."""
    texts, _ = split_prompts(continuations, "continuations must be one or a list of them")
    before = parse_prompt(prompt, "the prompt")
    named = [(f"continuations[{index}]", each) for index, each in enumerate(texts)]
    return [(before, parse_prompt(each, name), f"the prompt with {name}") for name, each in named]


def parse_pairs(pairs: Iterable[tuple[PromptLike, PromptLike]]) -> list[Pair]:
    """Normalise pairs (prompt, continuation). TypeError or ValueError names the wrong one."""
    parsed = []
    for index, pair in enumerate(to_list(pairs, "pairs must be a list of (prompt, continuation)")):
        where = f"pair {index}"
        both = to_list(pair, f"{where} must be (prompt, continuation)")
        if len(both) != 2:
            raise ValueError(f"{where} must be (prompt, continuation), not {show(pair)}")
        before = parse_prompt(both[0], f"the prompt of {where}")
        parsed.append((before, parse_prompt(both[1], f"the continuation of {where}"), where))
    return parsed


def encode_continuations(
    tokenizer: PreTrainedTokenizerBase | None,
    pairs: Sequence[Pair],
    check_length: Callable[[str, str], None],
) -> list[_Continued]:
    """Return the token ids of each pair.

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
        found.append(_Continued(whole, start))
    return found
