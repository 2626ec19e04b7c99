"""Parts of tokenizer.json for tokenizers of byte pairs: SentencePiece's, and the splitting of Qwen2.

The package `tokenizers` reads what they return. Knows no file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import copysign
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    1,
    2,
    3,
    4,
    5,
    6,
)  # kinds of tokens, as SentencePiece has
SPACE = "\u2581"  # what SentencePiece writes for a space
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{WORDS}|\p{{N}}|{REST}"
_LONGEST = 256  # characters of a token that is made of two others


def bpe_model(vocab: dict[str, int], merges: list[list[str]], **changes: Any) -> dict[str, Any]:
    """The model of tokenizer.json. merges: pairs of tokens, the first to be joined first."""
    model: dict[str, Any] = {
        **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None},
        **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False},
        **{"vocab": vocab, "merges": merges},
    }
    return model | changes


def split_steps(*expressions: str) -> dict[str, Any]:
    """The pre_tokenizer that splits a text by these, one after the other, and writes bytes as letters."""
    steps = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in expressions
    ]
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, letters]}


def added_token(index: int, content: str, special: bool, normalized: bool = False) -> dict[str, Any]:
    """An entry of added_tokens: a token that is found in a text as it is."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized}
    return {"id": index, "content": content, **flags, "special": special}


def sentencepiece_steps(
    tokens: Sequence[str],
    kinds: Sequence[int],
    scores: Sequence[float],
    prefix: bool,
    no_prefix_before: Sequence[str] = (),
) -> dict[str, Any]:
    """Normalizer, pre_tokenizer, decoder and model of SentencePiece's BPE with byte fallback.

    prefix: a space comes before each part of a text between added tokens, unless it begins with one of the
    expressions in `no_prefix_before`. Those match normalised tokens: the text is not parted before them.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind == NORMAL:
            for at in range(1, min(len(token), _LONGEST)):
                left, right = token[:at], token[at:]
                if left in vocab and right in vocab:
                    merges.append((-score, copysign(1, -score), -at, vocab[left], left, right))
    # The best score first, as SentencePiece merges. Of equal scores, such as those of runs of spaces, it
    # takes the leftmost pair, which is the one whose left token has grown most. Symbols of a user, which
    # files of Gemma have as plain tokens, come before the first merge: they have 0 and it has -0.
    merges.sort()
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    before: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    if prefix and no_prefix_before:
        names = "|".join(no_prefix_before)
        before = [{"type": "Replace", "pattern": {"Regex": rf"\A(?!\z|{names})"}, "content": SPACE}]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    after = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    pairs = [[left, right] for *_, left, right in merges]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*after, {"type": "Fuse"}, *strip]},
        "model": bpe_model(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def special_around(single: dict[str, tuple[str, int]]) -> dict[str, Any] | None:
    """The post_processor that puts tokens around a text; single: text and id of "bos", "eos" or both."""
    if not single:
        return None

    def template(*texts: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for type_id, text in enumerate(texts):
            around = {
                name: [{"SpecialToken": {"id": token, "type_id": type_id}}]
                for name, (token, _) in single.items()
            }
            own = {"Sequence": {"id": text, "type_id": type_id}}
            parts += [*around.get("bos", []), own, *around.get("eos", [])]
        return parts

    return {
        **{"type": "TemplateProcessing", "single": template("A"), "pair": template("A", "B")},
        "special_tokens": {
            token: {"id": token, "ids": [index], "tokens": [token]} for token, index in single.values()
        },
    }


def escaped(text: str) -> str:
    """An expression of `tokenizers` that matches this text."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)
