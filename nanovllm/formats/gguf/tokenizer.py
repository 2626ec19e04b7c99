"""The tokenizer of a GGUF file, written as a folder that transformers reads.

A file names the rules by which a text is split before merges apply; those of `_SPLITS` are known, and others
are refused, because a wrong rule gives wrong tokens without an error. `tokenizers` does the work.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.errors import ModelLoadError
from nanovllm.formats.gguf.ends import TURN_ENDS
from nanovllm.formats.gguf.file import GGUFFile
from nanovllm.formats.tokenizer_json.bpe import (
    CONTROL,
    NORMAL,
    QWEN2,
    REST,
    UNKNOWN,
    USER_DEFINED,
    WORDS,
    added_token,
    bpe_model,
    sentencepiece_steps,
    special_around,
    split_steps,
)

_MAX_TOKENS = 2**21
_MAX_TEMPLATES = 32

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_LLAMA3 = rf"{WORDS}|\p{{N}}{{1,3}}|{REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (  # Qwen2's, with marks as letters
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LIKE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2")
# The expressions that split a text, one after the other, for each name in tokenizer.ggml.pre.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys((*_LIKE_LLAMA3, "smaug-bpe", "dbrx"), (_LLAMA3,)),
    "gpt-4o": (_GPT4O,),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS = _STARTS_WITH_BOS = (*_LIKE_LLAMA3, "tekken")  # whose words need no merges
# Of Phi-3's added tokens all but these swallow the white space after them.
_PHI3_KEEP = ("<unk>", "<s>", "<|endoftext|>")
_COMPOSES = ("qwen2", "qwen35", "deepseek-r1-qwen")  # characters, as Unicode's NFC


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ModelLoadError for a tokenizer that is not
    supported, or metadata that do not fit together."""
    keys = file.metadata
    whole = keys.get("tokenizer.huggingface.json")
    tokens = _tokens(file)
    content = whole if isinstance(whole, str) else json.dumps(_content(file, tokens))
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": _chat_template(file),
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in names.items():
        number = _id(file, key, len(tokens))
        config[f"{name}_token"] = None if number is None else tokens[number]
    if type(length := keys.get(f"{keys.get('general.architecture')}.context_length")) is int:
        config["model_max_length"] = length
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _tokens(file: GGUFFile) -> list[str]:
    if "tokenizer.ggml.tokens" not in file.metadata:
        raise ModelLoadError(
            f"{file.path} has no tokenizer (tokenizer.ggml.tokens); pass a folder with the model's tokenizer "
            "files as tokenizer, or skip_tokenizer_init=True and token ids as prompts"
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= _MAX_TOKENS:
        raise file.problem(f"tokenizer.ggml.tokens has {len(tokens)} tokens; 1 to {_MAX_TOKENS} are possible")
    return tokens


def _content(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """The content of tokenizer.json."""
    kind = file.scalar("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise file.problem(
            f"tokenizer.ggml.model {kind!r} is not supported; supported: gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE). Pass a folder with the model's tokenizer files as tokenizer"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise file.problem(f"tokenizer.ggml.tokens has {twice!r} twice")
    types = _column(file, "token_type", len(tokens), NORMAL).tolist()
    types = [CONTROL if token in TURN_ENDS else kind for token, kind in zip(tokens, types, strict=True)]
    added = [
        added_token(index, token, special=kind_of != USER_DEFINED)
        for index, (token, kind_of) in enumerate(zip(tokens, types, strict=True))
        if kind_of in (CONTROL, USER_DEFINED, UNKNOWN) and token
    ]
    if kind == "llama" and file.metadata.get("general.architecture") == "phi3":
        added = [each | {"rstrip": each["content"] not in _PHI3_KEEP} for each in added]
    make = _byte_level if kind == "gpt2" else _sentencepiece
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": added},
        **make(file, tokens, vocab, types),
        "post_processor": _post_processor(file, tokens, kind),
    }


def _byte_level(file: GGUFFile, tokens: list[str], vocab: dict[str, int], types: list[int]) -> dict[str, Any]:
    pre = _pre(file)
    if pre not in _SPLITS:
        raise file.problem(
            f"tokenizer.ggml.pre {pre!r}, which says how texts are split, is not supported; supported: "
            f"{', '.join(_SPLITS)}. Pass a folder with the model's tokenizer files as tokenizer"
        )
    merges = [merge.split(" ") for merge in file.strings("tokenizer.ggml.merges")]
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise file.problem(f"tokenizer.ggml.merges has {' '.join(pair)!r}, which is no pair of tokens")
    splits = split_steps(*_SPLITS[pre])
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSES else None,
        "pre_tokenizer": splits,
        "decoder": splits["pretokenizers"][-1],
        "model": bpe_model(vocab, merges, ignore_merges=pre in _WHOLE_WORDS),
    }


def _sentencepiece(
    file: GGUFFile, tokens: list[str], vocab: dict[str, int], types: list[int]
) -> dict[str, Any]:
    scores = _column(file, "scores", len(tokens), 0.0).tolist()
    prefix = file.scalar("tokenizer.ggml.add_space_prefix", bool, True)
    return sentencepiece_steps(tokens, types, scores, prefix)


def _post_processor(file: GGUFFile, tokens: list[str], kind: str) -> dict[str, Any] | None:
    """Adds the tokens at the begin and the end of a text that the file asks for."""
    by_default = {"bos": kind == "llama" or _pre(file) in _STARTS_WITH_BOS, "eos": False}
    special: dict[str, tuple[str, int]] = {}
    for name, default in by_default.items():
        number = _id(file, name, len(tokens))
        if file.scalar(f"tokenizer.ggml.add_{name}_token", bool, default) and number is not None:
            special[name] = tokens[number], number
    return special_around(special)


def _chat_template(file: GGUFFile) -> str | list[dict[str, str]] | None:
    """The template, or all templates by their names."""
    keys = file.metadata
    default = keys.get("tokenizer.chat_template")
    if "tokenizer.chat_templates" not in keys:
        return default if isinstance(default, str) else None
    names = file.strings("tokenizer.chat_templates")[:_MAX_TEMPLATES]
    found = {name: keys.get(f"tokenizer.chat_template.{name}") for name in names} | {"default": default}
    return [{"name": name, "template": text} for name, text in found.items() if isinstance(text, str)]


def _pre(file: GGUFFile) -> str | None:
    return file.scalar("tokenizer.ggml.pre", str)


def _id(file: GGUFFile, name: str, count: int) -> int | None:
    """The id of a special token, if the file names one."""
    value = file.scalar(f"tokenizer.ggml.{name}_token_id", int)
    if value is not None and not 0 <= value < count:
        raise file.problem(f"tokenizer.ggml.{name}_token_id {value!r} is none of the {count} tokens")
    return value


def _column(file: GGUFFile, name: str, count: int, default: float) -> np.ndarray:
    """One number for each token."""
    value: Any = file.metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return np.full(count, default)
    if not isinstance(value, np.ndarray) or len(value) != count:
        raise file.problem(f"tokenizer.ggml.{name} must be a list of {count} numbers, one for each token")
    return value
