"""Tokenizers: load one, and encode texts. Keeps no request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.doors import TEXT, Table
from nanovllm.errors import ModelLoadError
from nanovllm.inputs import show
from nanovllm.text.prompts import portions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT: Table[Any] = Table(TEXT)
ENCODED_BYTES = 2**19  # tokenised at once; it takes up to 300 times this memory, and up to a second


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
        _TEXT["match_files"](tokenizer, Path(path))
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


def _fulfil(future: Future[Any], call: Callable[[list[str]], Any], texts: list[str]) -> None:
    try:
        future.set_result(call(texts))
    except BaseException as error:
        future.set_exception(error)


def num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
