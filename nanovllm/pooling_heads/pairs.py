"""Pairs of texts for a model that scores them: checks them, and makes one prompt of each.

Knows no engine. A pair is tokenised as sentence-transformers does it, or written by a chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.inputs import show
from nanovllm.text.processor import encode
from nanovllm.text.prompts import check_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PORTION = 256  # pairs that are tokenised at once


def parse_texts(first: Any, second: Any) -> list[tuple[str, str]]:
    """Pair one text with each of several, or two lists of one length. TypeError or ValueError names the text
    that is wrong."""
    texts_1, texts_2 = _texts("data_1", first), _texts("data_2", second)
    if len(texts_1) == 1:
        texts_1 *= len(texts_2)
    if len(texts_1) != len(texts_2):
        raise ValueError(
            f"score() got {len(texts_1)} texts and {len(texts_2)} texts to pair with them; pass one first "
            "text, or as many as second ones"
        )
    return list(zip(texts_1, texts_2, strict=True))


def _texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, (list, tuple)):
        raise TypeError(f"{name} must be a string or a list of strings, not {show(given)}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{index}] must be a string, not {show(text)}")
        check_text(text, f"{name}[{index}]")
    if not texts:
        raise ValueError(f"{name} is empty; pass at least one text")
    return list(texts)


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase | None,
    pairs: Sequence[tuple[str, str]],
    chat_template: str | None,
    check_length: Callable[[str, str], None],
    is_one_text: bool = False,
) -> list[list[int]]:
    """The token ids of each pair: as the tokenizer joins two texts; with a template, as it writes messages of
    the roles "query" and "document"; with `is_one_text` of one text after the other. check_length: as of
    `Processor`."""
    if tokenizer is None:
        raise ValueError(
            "score() of pairs tokenises both texts, and skip_tokenizer_init=True; use classify()"
        )
    for number, pair in enumerate(pairs):
        check_length("".join(pair), f"pair {number}")
    found: list[list[int]] = []
    for start in range(0, len(pairs), _PORTION):
        some = pairs[start : start + _PORTION]
        if chat_template is not None:
            found += encode(tokenizer, [_rendered(tokenizer, pair, chat_template) for pair in some])
        elif is_one_text:
            found += encode(tokenizer, ["".join(pair) for pair in some])
        else:
            seconds = [second for _, second in some]
            found += tokenizer([first for first, _ in some], seconds, verbose=False)["input_ids"]
    return found


def _rendered(tokenizer: PreTrainedTokenizerBase, pair: tuple[str, str], template: str) -> str:
    messages = [
        {"role": role, "content": text} for role, text in zip(("query", "document"), pair, strict=True)
    ]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception as error:  # of Jinja, or of the template itself
        raise ValueError(f"the chat_template of score() failed: {type(error).__name__}: {error}") from None
    return str(text)
