"""Characters: the bytes and characters of a tokenizer's tokens, and which of them a text cuts.

Bytes that are no character become U+FFFD, as in Python's decoding of UTF-8, and change no text around them.
Keeps no request.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 4  # last tokens of the prompt that influence how an output is decoded
CUT = "\ufffd"  # what decoders write for bytes that are no character
_CACHE_SIZE = 1000  # cached contexts
LONGEST_CUT = 3  # maximum bytes of an incomplete character
# GPT-2's byte alphabet: printable Latin-1 bytes map to themselves, others to code points from 256 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


class Characters(ABC):
    """What a `Detokenizer` knows of its tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        added = tokenizer.added_tokens_decoder.items()
        special = {token_id for token_id, token in added if token.special}
        self.skipped = frozenset(special.union(tokenizer.all_special_ids) if skip_special_tokens else ())
        # Decoders skip only what is marked: a pad token may be special by its name in tokenizer_config.json
        # alone, and then depends on the version of transformers and the tokenizer's class.
        self._unmarked = self.skipped - special
        vocab = tokenizer.get_vocab()
        names = ((byte, f"<0x{byte:02X}>") for byte in range(256))  # of byte fallback
        self._bytes = {vocab[name]: bytes([byte]) for byte, name in names if name in vocab}
        if len(self._bytes) < 256:  # not those of byte fallback
            self._bytes = {}
        self._token_of_byte = {each[0]: token_id for token_id, each in self._bytes.items()}
        # transformers' wrapper takes as long as decoding a short text; skip it where it does nothing.
        methods = type(tokenizer).decode, getattr(type(tokenizer), "_decode", type(tokenizer).decode)
        is_plain = all(method.__module__.startswith("transformers.tokenization_utils") for method in methods)
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if not is_plain or tokenizer.clean_up_tokenization_spaces:
            fast = None
        self._decode_ids = tokenizer.decode if fast is None else fast.decode
        # Whether decoding in parts and joining gives the same text, except for split characters.
        self.joins = fast is not None and type(fast.decoder).__name__ == "ByteLevel"
        self._bytes_of_tokens: dict[int, bytes] = {}
        # `whole_characters` of a context; cached, because prompts often have the same end.
        self._before = lru_cache(_CACHE_SIZE)(lambda context: self.whole_characters(list(context)))

    @abstractmethod
    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, with U+FFFD for bytes that are no character."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text, for byte-level tokenizers."""
        if token_id not in self._bytes_of_tokens:
            letters = b"" if token_id in self.skipped else self._as_letters(token_id)
            self._bytes_of_tokens[token_id] = letters
        return self._bytes_of_tokens[token_id]

    def continues(self, token_id: int) -> bool:
        """Whether a token's first byte is not the first of a character."""
        return b"\x80" <= (self._bytes.get(token_id) or self._as_letters(token_id))[:1] < b"\xc0"

    def context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last few tokens of the prompt that are text. A run of byte tokens is never split."""
        start = first = len(prompt_ids)
        count = 0
        while start > 0 and (count < CONTEXT or prompt_ids[first] in self._bytes):
            start -= 1
            if prompt_ids[start] not in self.skipped:
                count, first = count + 1, start
        return list(prompt_ids[first:])

    def whole_characters(self, token_ids: list[int]) -> tuple[str, bool]:
        """Decode without an incomplete character at the end; also return whether there is one."""
        text = self.decode(token_ids)
        if not text.endswith(CUT):
            return text, False
        kept = [token_id for token_id in token_ids if token_id not in self.skipped]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ends = (self._bytes.get(token_id) or self._as_letters(token_id) for token_id in kept[-LONGEST_CUT:])
        decoder.decode(b"".join(ends))
        held = decoder.getstate()[0].decode(errors="replace")  # U+FFFD, for half of a surrogate pair two
        return text[: len(text) - len(held)], bool(held)

    def _repaired(self, token_ids: list[int]) -> list[int]:
        """The tokens, with the bytes of U+FFFD for bytes of byte fallback that are no character.

        Tokenizers write U+FFFD for each byte of a run that is not valid as a whole. So a byte would change
        the text of characters before it, and differ from what byte-level tokenizers write.
        """
        repaired: list[int] = []
        kept = (token_id for token_id in token_ids if token_id not in self.skipped)
        for is_byte, run in groupby(kept, self._bytes.__contains__):
            if is_byte:
                data = b"".join(self._bytes[token_id] for token_id in run)
                repaired += [self._token_of_byte[byte] for byte in data.decode(errors="replace").encode()]
            else:
                repaired += run
        return repaired

    def _as_letters(self, token_id: int) -> bytes:
        """The bytes of a token, from a byte-level vocabulary's alphabet or as UTF-8."""
        token = str(self.tokenizer.convert_ids_to_tokens(token_id) or "")
        try:
            return bytes(BYTE_OF_LETTER[letter] for letter in token)
        except KeyError:
            return token.encode(errors="replace")
