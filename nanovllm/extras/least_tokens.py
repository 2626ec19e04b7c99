"""LeastTokens: how many tokens a text has at least, without tokenising it.

A text that cannot fit is refused by this number, because tokenising megabytes takes seconds and a hundred
times their memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nanovllm.text.characters import BYTE_OF_LETTER
from nanovllm.text.processor import num_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE = "\u2581"  # what sentencepiece writes for a space
# Steps of a tokenizer that take nothing away: every word remains, and so does every byte of ASCII.
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace")
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")
_PART = 2**16  # characters whose words are counted at once
_COMPOSED = 4  # characters that a normalizer makes one of, at most
_METHODS = ("__call__", "_encode_plus", "_batch_encode_plus", "batch_encode_plus")


class LeastTokens:
    """A lower bound that is never wrong; 0 for tokenizers of which nothing can be proven.

    It holds where all of a text ends up in tokens of the vocabulary: BPE or Unigram in which each byte has a
    token, behind steps that remove nothing. An unknown part could become one token of any length, and a step
    could remove any part. Then a token has at most the bytes of the longest one, and it touches at most as
    many words (text between white space) as the one with the most words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._longest = self._most_words = 0  # of any token; 0: nothing is known
        self._takes_spaces = self._normalizes = False
        backend = getattr(tokenizer, "backend_tokenizer", None)
        methods = [getattr(type(tokenizer), name, None) for name in _METHODS]
        if backend is None or not all(
            method is None or method.__module__.startswith("transformers.tokenization") for method in methods
        ):
            return
        try:
            content = json.loads(backend.to_str())
        except Exception:  # a step that is written in Python
            return
        is_byte_level = _are_known_steps(content)
        if is_byte_level is None:
            return
        vocab = content["model"]["vocab"]  # of BPE a dictionary, of Unigram pairs of token and score
        tokens = [_bytes_of(each if isinstance(each, str) else each[0], is_byte_level) for each in vocab]
        added = content["added_tokens"]
        tokens += [each["content"].encode() for each in added]
        self._normalizer = backend.normalizer
        if self._normalizer is not None:
            tokens += [self._normalizer.normalize_str(each["content"]).encode() for each in added]
            self._normalizes = True
        self._takes_spaces = any(each["lstrip"] or each["rstrip"] for each in added)
        self._longest = max(map(len, tokens)) + _COMPOSED  # normalising joins characters across added tokens
        self._most_words = max(1, *(_num_words(token.decode(errors="replace")) for token in tokens))

    def of(self, text: str, most: int) -> int:
        """A number of tokens that the text has at least; no better one is sought once it is above `most`."""
        if not self._longest:
            return 0
        least = -(-_num_words(text) // self._most_words)
        if least > most or self._takes_spaces:  # a token may then take any number of spaces
            return least
        least = max(least, len(text) // _COMPOSED // self._longest)
        if least > most:
            return least
        if self._normalizes and not text.isascii():
            text = self._normalizer.normalize_str(text)
        return max(least, -(-num_bytes(text) // self._longest))


def _num_words(text: str) -> int:
    """The number of words of a text. It is split in parts, because a list of all words takes much memory."""
    total, inside = 0, False  # whether the part before ends within a word
    for start in range(0, len(text), _PART):
        part = text[start : start + _PART].replace(_SPACE, " ")
        total += len(part.split()) - (inside and not part[0].isspace())
        inside = not part[-1].isspace()
    return total


def _bytes_of(token: str, is_byte_level: bool) -> bytes:
    """What a token stands for in a text, or something longer."""
    if is_byte_level and all(letter in BYTE_OF_LETTER for letter in token):
        return bytes(BYTE_OF_LETTER[letter] for letter in token)
    return token.encode()


def _are_known_steps(content: dict[str, Any]) -> bool | None:
    """Whether the tokenizer is byte-level; None if one of its steps may lose a part of a text."""
    model, pre_tokenizers = content["model"], list(_steps(content["pre_tokenizer"], "pretokenizers"))
    kinds = [each["type"] for each in pre_tokenizers]
    for each in _steps(content["normalizer"], "normalizers"):
        pattern = each.get("pattern", {})
        is_before = pattern.get("Regex", "").startswith(r"\A(?!")  # it puts a space before a text
        is_space = each.get("content") == _SPACE and (pattern == {"String": " "} or is_before)
        if each["type"] not in _NORMALIZERS or (each["type"] == "Replace" and not is_space):
            return None
    if not set(kinds) <= set(_PRE_TOKENIZERS) or any(
        each.get("behavior") == "Removed" for each in pre_tokenizers
    ):
        return None
    if model["type"] not in ("BPE", "Unigram"):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    names = {each if isinstance(each, str) else each[0] for each in model["vocab"]}
    if model.get("byte_fallback") and names.issuperset(f"<0x{byte:02X}>" for byte in range(256)):
        return False
    if model["type"] == "BPE" and "ByteLevel" in kinds and names.issuperset(BYTE_OF_LETTER):
        return True
    return None


def _steps(step: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a part of a tokenizer, whatever sequences they are in."""
    if step is not None and step["type"] == "Sequence":
        for each in step[inner]:
            yield from _steps(each, inner)
    elif step is not None:
        yield step
