"""Detokenizer: the text of an output, whole or in parts; StopStrings searches it for stop strings.

Decodes each token once and reads each character once, however many stop strings there are. Ends nothing and
keeps no request.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 4  # last tokens of the prompt that influence how an output is decoded
CUT = "\ufffd"  # what decoders write for bytes that are no character
_CACHE_SIZE = 1000  # cached contexts
LONGEST_CUT = 3  # maximum bytes of an incomplete character
# GPT-2's byte alphabet: printable Latin-1 bytes map to themselves, others to code points from 256 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


class Detokenizer:
    """Decodes outputs: prompt and output are decoded together, and the prompt's text is removed.

    This keeps a space between the two. Special tokens are skipped or kept, as requested. Bytes that are no
    character become U+FFFD, as in Python's decoding of UTF-8, and change no text around them. An incomplete
    character at the end is left out; a U+FFFD that the model generated stays. A character that the prompt
    begins and the output does not continue is a U+FFFD of the prompt.
    """

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
        self._joins = fast is not None and type(fast.decoder).__name__ == "ByteLevel"
        self._bytes_of_tokens: dict[int, bytes] = {}
        # `whole_characters` of a context; cached, because prompts often have the same end.
        self._before = lru_cache(_CACHE_SIZE)(lambda context: self.whole_characters(list(context)))

    def text(self, prompt_ids: Sequence[int], output_ids: list[int]) -> str:
        """Return the text of `output_ids`, which follow `prompt_ids`."""
        if not output_ids:
            return ""
        if self._joins:
            text = self.decode(output_ids)
            if not (text.startswith(CUT) or text.endswith(CUT)):
                return text
        context = self.context(prompt_ids)
        before, is_cut = self._before(tuple(context))
        first = next((token_id for token_id in output_ids if token_id not in self.skipped), None)
        if is_cut and first is not None and not self.continues(first):
            before = self.decode(context)
        both, _ = self.whole_characters(context + output_ids)
        if both.startswith(before):
            return both[len(before) :]
        before = self.decode(context)  # the output continues the prompt's character and does not finish it
        return both[len(before) :] if both.startswith(before) else self.decode(output_ids)

    def stream(self, prompt_ids: Sequence[int]) -> _TextStream:
        """Return a decoder for the tokens that follow `prompt_ids`, one at a time."""
        return (_ByteStream if self._joins else _WindowStream)(self, prompt_ids)

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
        while start > 0 and (count < _CONTEXT or prompt_ids[first] in self._bytes):
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

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, with U+FFFD for bytes that are no character."""
        if not token_ids:
            return ""
        if not self._bytes.keys().isdisjoint(token_ids):
            token_ids = self._repaired(token_ids)
        if self._unmarked and not self._unmarked.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._unmarked]
        return str(self._decode_ids(token_ids, skip_special_tokens=self._skip_special_tokens))

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


class _ByteStream:
    """A _TextStream for byte-level tokenizers, which can decode each token alone."""

    def __init__(self, detokenizer: Detokenizer, prompt_ids: Sequence[int]) -> None:
        self._bytes = detokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in detokenizer.context(prompt_ids):  # a character may begin there
            self._utf8.decode(self._bytes(token_id))
        self._continues = detokenizer.continues
        self._begins = True  # no text of the output has come yet

    def append(self, token_id: int) -> str:
        new = self._bytes(token_id)
        if new and self._begins:
            self._begins = False
            if not self._continues(token_id):
                self._utf8.reset()
        return self._utf8.decode(new)


class _WindowStream:
    """A _TextStream for all other tokenizers: decodes each token together with a few previous tokens."""

    def __init__(self, detokenizer: Detokenizer, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        # Runs of tokens that begin and end at character boundaries; only the prompt may end within one.
        self._chunks = deque([detokenizer.context(prompt_ids)], maxlen=_CONTEXT)
        self._chunk: list[int] = []
        self._num_written = 0  # characters of the chunk's text
        self._before, self._context_is_cut = "", False  # what the chunks decode to
        self._begin_chunk()

    def append(self, token_id: int) -> str:
        if token_id in self._detokenizer.skipped:
            return ""
        if self._context_is_cut and not self._chunk and not self._detokenizer.continues(token_id):
            self._before = self._detokenizer.decode(self._context)
            self._context_is_cut = False
        self._chunk.append(token_id)
        text, is_cut = self._detokenizer.whole_characters(self._context + self._chunk)
        if text.startswith(self._before):
            text = text[len(self._before) :]
        else:  # the context ended with bytes that do not become a character
            text, is_cut = self._detokenizer.whole_characters(self._chunk)
        new = text[self._num_written :]
        if is_cut:
            self._num_written = len(text)
        else:
            if self._context_is_cut:
                self._chunks[-1] += self._chunk
            else:
                self._chunks.append(self._chunk)
            self._begin_chunk()
        return new

    def _begin_chunk(self) -> None:
        self._context = [token_id for chunk in self._chunks for token_id in chunk]
        self._before, self._context_is_cut = self._detokenizer.whole_characters(self._context)
        self._chunk, self._num_written = [], 0


# Decodes one output token by token: `append` takes the next token and returns the new whole characters.
# Returned characters never change later.
_TextStream: TypeAlias = _ByteStream | _WindowStream


class StopSearch:
    """The search for some stop strings, for any number of texts: the automaton of Aho and Corasick (1975).

    A state is the longest end of the text so far that begins a stop string, or is one. State 0 is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings; the list may be empty."""
        self.stops = tuple(stops)
        self._longer: list[dict[str, int]] = [{}]  # the states with one more character
        ends: dict[int, int] = {}  # the first stop string that each state is, by index
        for index, stop in enumerate(stops):
            state = 0
            for letter in stop:
                state = self._longer[state].setdefault(letter, len(self._longer))
                if state == len(self._longer):
                    self._longer.append({})
            ends.setdefault(state, index)
        self.shorter = [0] * len(self._longer)  # the longest end of each state that is another state
        self._found = [ends.get(state, -1) for state in range(len(self._longer))]
        self.num_held = [0] * len(self._longer)  # characters of each state that may begin a stop string
        layer, length = [0], 0
        while layer := [child for state in layer for child in self._finish(state)]:
            length += 1
            for state in layer:
                has_longer = bool(self._longer[state])
                self.num_held[state] = length if has_longer else self.num_held[self.shorter[state]]

    def _finish(self, state: int) -> Iterable[int]:
        """Compute, for the states with one more character, what follows from shorter states; return them."""
        for letter, longer in self._longer[state].items():
            shorter = self.after(self.shorter[state], letter) if state else 0
            self.shorter[longer] = shorter
            found = [index for index in (self._found[longer], self._found[shorter]) if index >= 0]
            self._found[longer] = min(found, default=-1)
        return self._longer[state].values()

    def after(self, state: int, letter: str) -> int:
        """The state after the next character."""
        while letter not in self._longer[state]:
            if not state:
                return 0
            state = self.shorter[state]
        return self._longer[state][letter]

    def found(self, state: int) -> str | None:
        """The stop string that ends where the text ends; of several, the first one in the list."""
        index = self._found[state]
        return None if index < 0 else self.stops[index]


class StopStrings:
    """The text of one completion, searched for the stop strings of its request.

    The match that ends first counts; if several end at the same character, the first one in the list.
    """

    def __init__(self, search: StopSearch, stream: _TextStream, min_tokens: int = 0) -> None:
        """min_tokens: matches that end within this number of tokens do not count."""
        self.search = search
        self._state = 0  # of the search, after all text so far
        self._min_tokens = min_tokens
        self._stream = stream
        self._parts: list[str] = []
        self._num_taken = 0  # parts that `take` returned
        self._held = ""  # the end of the text that `take` holds back: a stop string may begin there
        self._end = 0  # end of the match, counted from the end of the text
        self.found: str | None = None
        self.num_tokens = 0  # up to and including the token that completed the match

    def append(self, token_id: int) -> bool:
        """Decode the next token; return whether a stop string was found. Later tokens are ignored."""
        if self.found is not None:
            return True
        self.num_tokens += 1
        new = self._stream.append(token_id)
        if not new:
            return False
        self._parts.append(new)
        if not self.search.stops:
            return False
        for position, letter in enumerate(new, 1):
            self._state = self.search.after(self._state, letter)
            found = self.search.found(self._state)
            if found is not None and self.num_tokens > self._min_tokens:
                self.found, self._end = found, len(new) - position
                return True
        return False

    def take(self) -> str:
        """Return the new text since the last call. Text that may be the beginning of a stop string is held
        back, because it may be cut off later."""
        text = self._held + "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        end = len(text) - self.search.num_held[self._state]
        self._held = text[end:]
        return text[:end]

    def text(self, include: bool) -> str:
        """Return the text before the stop string that was found. include: with the stop string."""
        assert self.found is not None
        text = "".join(self._parts)
        return text[: len(text) - self._end - (0 if include else len(self.found))]
