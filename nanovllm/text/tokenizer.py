"""Tokenizers: load one, encode texts and pairs of texts, and know how many tokens a text has at least without
tokenising it.

A text that cannot fit is refused by this number, because tokenising megabytes takes seconds and a hundred
times their memory. Keeps no request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from nanovllm.errors import ModelLoadError
from nanovllm.inputs import PromptLike
from nanovllm.text.detokenizer import BYTE_OF_LETTER
from nanovllm.text.file_tokenizer import match_files
from nanovllm.text.prompts import Prompt, parse_prompt, portions, show, split_prompts, to_list

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODED_BYTES = 2**19  # tokenised at once; it takes up to 300 times this memory, and up to a second
_SPACE = "\u2581"  # what sentencepiece writes for a space
# Steps of a tokenizer that take nothing away: every word remains, and so does every byte of ASCII.
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace")
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")
_COMPOSED = 4  # characters that a normalizer makes one of, at most
_METHODS = ("__call__", "_encode_plus", "_batch_encode_plus", "batch_encode_plus")
Pair: TypeAlias = "tuple[Prompt, Prompt, str]"  # prompt, continuation, name of both in errors


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `path`, which gives the ids of its files; `trust_remote_code` runs code from that
    folder.

    Raises ModelLoadError that says what to do without a tokenizer.
    """
    # Here, because importing them takes as long as importing torch.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        if type(tokenizer).__name__.startswith("MistralCommon"):  # of a tekken.json beside the tokenizer.json
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        _add_template(tokenizer, Path(path))
        if not tokenizer("a")["input_ids"]:  # transformers' result for a folder without tokenizer files
            raise ValueError("its vocabulary is empty")
        match_files(tokenizer, Path(path))
    except ModelLoadError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise ModelLoadError(
            f"no tokenizer could be loaded from {path} ({error}); put the model's tokenizer files there, "
            "pass a folder that has them as tokenizer, or pass skip_tokenizer_init=True and token ids as "
            "prompts"
        ) from error
    return tokenizer


def _add_template(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Give the tokenizer the chat template of `chat_template.json`, where processors of transformers have it,
    if it has no other. ValueError if the file has none."""
    file = path / "chat_template.json"
    if tokenizer.chat_template is not None or not file.is_file():
        return
    content = json.loads(file.read_text("utf-8"))
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        raise ValueError(f"{file.name} must have a string as its 'chat_template', not {show(template)}")
    tokenizer.chat_template = template


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each string. transformers' warnings about long strings are off: the engine
    checks the length.

    Several calls of the tokenizer limit its memory, and let signals act between them. A string that is longer
    than this is tokenised in another thread, because that takes long and no signal ends it. After Ctrl-C the
    thread goes on, and what it finds is dropped.
    """

    def encode_some(some: list[str]) -> list[list[int]]:
        return tokenizer(some, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    found: list[list[int]] = []
    for some in portions(texts, ENCODED_BYTES, num_bytes):
        if len(some) > 1 or num_bytes(some[0]) <= ENCODED_BYTES:
            found += encode_some(some)
            continue
        future: Future[list[list[int]]] = Future()
        threading.Thread(target=_fulfil, args=(future, encode_some, some), daemon=True).start()
        found += future.result()
    return found


def _fulfil(future: Future[Any], call: Any, *args: Any) -> None:
    try:
        future.set_result(call(*args))
    except BaseException as error:
        future.set_exception(error)


# -- continuations ------------------------------------------------------------------------------------------


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


# -- lengths ------------------------------------------------------------------------------------------------


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


def num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _num_words(text: str) -> int:
    return len(text.replace(_SPACE, " ").split())


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
