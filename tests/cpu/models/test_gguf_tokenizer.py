"""Tokenizers of GGUF files: the ids of the tokenizers that they were made from, on texts of many scripts."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import sentencepiece
import tiktoken_ext.openai_public
from test_real_texts import random_text
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from nanovllm import ModelLoadError, demo_model_path
from nanovllm.engine.startup import load_tokenizer
from nanovllm.models.registry import open_checkpoint
from tools.write_gguf import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, write_gguf

TEXTS = [
    "Hello world! 123 4567  8",
    " I'll, we'VE don't\n\n\n  x\r\n\ty",
    "🦀👍🏽👨‍👩‍👧‍👦 日本語 한국어 नमस्ते ไทย עברית العربية Ελληνικά",
    "def f(x):\n    return x**2  # comment\n",
    "CamelCase HTTPServer ßtraße ŁÓDŹ 1️⃣ ½ ٣٤",
    "",
    " ",
    "   ",
]
RNG = random.Random(7)
ALL = [*TEXTS, *(random_text(RNG) for _ in range(150))]


def file_of(package: str, name: str) -> Path:
    [root] = find_spec(package).submodule_search_locations
    return Path(root, name)


def write_tokens(
    path: Path,
    tokens: list[str],
    types: list[int],
    *,
    kind: str = "gpt2",
    pre: str | None = None,
    architecture: str = "llama",
    **more: Any,
) -> Path:
    """A file with only a tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> Any:
    return open_checkpoint(path).tokenizer(load_tokenizer)


def ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    return tokenizer(text, add_special_tokens=special)["input_ids"]


def content_of(path: Path) -> dict[str, Any]:
    return open_checkpoint(path).tokenizer(lambda folder: json.loads((folder / "tokenizer.json").read_text()))


# -- byte-level ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_llama3(tmp_path: Path) -> None:
    """128,257 tokens, of which some cannot be merged from others."""
    source = TikTokenConverter(str(file_of("llama_models", "llama3/tokenizer.model"))).converted()
    theirs = PreTrainedTokenizerFast(tokenizer_object=source)
    model = json.loads(source.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    own = [*tokens, "<|begin_of_text|>", "<|eot_id|>", "<think>"]
    types = [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER_DEFINED]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    special = {"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 1}
    path = write_tokens(tmp_path / "x.gguf", own, types, pre="llama-bpe", token_merges=merges, **special)
    tokenizer = read(path)
    for text in ALL:
        assert ids(tokenizer, text) == ids(theirs, text), text
        assert tokenizer.decode(ids(tokenizer, text)) == text
    assert ids(tokenizer, "a<think><|eot_id|>", True)[0] == len(tokens)  # begins with <|begin_of_text|>
    assert ids(tokenizer, "a<think><|eot_id|>", True)[2:] == [len(tokens) + 2, len(tokens) + 1]
    assert tokenizer.decode([len(tokens) + 2, len(tokens) + 1], skip_special_tokens=True) == "<think>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin_of_text|>", "<|eot_id|>")


ALPHABET = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
REFERENCES: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "qwen2": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "qwen35": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
                    r"|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "lfm2": lambda: pre_tokenizers.Sequence(  # as LFM2.5-8B-A1B writes it; its files have this name too
        [
            pre_tokenizers.Split(
                Regex(
                    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]|\s+(?!\S)|\s"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "tekken": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    json.loads(file_of("mistral_common", "data/tekken_240911.json").read_text())["config"][
                        "pattern"
                    ]
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@pytest.mark.parametrize("pre", REFERENCES)
def test_texts_are_split_as_by_the_original(tmp_path: Path, pre: str) -> None:
    path = write_tokens(tmp_path / "x.gguf", ALPHABET, [NORMAL] * 257, pre=pre, token_merges=["a b"])
    content = content_of(path)
    ours, theirs = read(path).backend_tokenizer.pre_tokenizer, REFERENCES[pre]()
    for text in ALL:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text
    assert (content["normalizer"] == {"type": "NFC"}) is pre.startswith("qwen")


@pytest.mark.parametrize(("pre", "encoding"), [("dbrx", "cl100k_base"), ("gpt-4o", "o200k_base")])
def test_texts_are_split_as_by_tiktoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pre: str, encoding: str
) -> None:
    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *args, **options: {})
    pattern = regex.compile(getattr(tiktoken_ext.openai_public, encoding)()["pat_str"])
    path = write_tokens(tmp_path / "x.gguf", ALPHABET, [NORMAL] * 257, pre=pre, token_merges=["a b"])
    ours = read(path).backend_tokenizer.pre_tokenizer
    for text in ALL:
        assert [span for _, span in ours.pre_tokenize_str(text)] == [
            each.span() for each in pattern.finditer(text)
        ], text


def test_the_demo_models_tokenizer_and_chat_template(tmp_path: Path) -> None:
    path = write_gguf(demo_model_path(), tmp_path / "demo.gguf")
    ours, theirs = read(path), AutoTokenizer.from_pretrained(demo_model_path())
    for text in ALL:
        assert ids(ours, text) == ids(theirs, text)
    chat = [{"role": "user", "content": "1 + 2"}]
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)
    assert ours.name_or_path == str(path) and ours.pad_token == theirs.pad_token
    assert ours.model_max_length == theirs.model_max_length == 1024


def test_words_and_the_begin_of_a_text_as_for_llama3(tmp_path: Path) -> None:
    """A word that is a token needs no merges, and a file of LFM2 need not say that texts begin with one."""
    tokens, types = [*ALPHABET, "xyz", "<|startoftext|>"], [*[NORMAL] * 258, CONTROL]
    merges: dict[str, Any] = {"token_merges": ["a b"], "bos_token_id": 258}
    tokenizer = read(write_tokens(tmp_path / "x.gguf", tokens, types, pre="lfm2", **merges))
    assert ids(tokenizer, "xyz", True) == [258, 257]
    more = merges | {"add_bos_token": False}
    tokenizer = read(write_tokens(tmp_path / "y.gguf", tokens, types, pre="lfm2", **more))
    assert ids(tokenizer, "ab", True) == [256]


def test_several_chat_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    merges: dict[str, Any] = {"token_merges": ["a b"], "chat_template": templates}
    path = write_tokens(tmp_path / "x.gguf", ALPHABET, [NORMAL] * 257, pre="gpt-2", **merges)
    assert read(path).chat_template == {"default": "plain", "tool_use": "tools"}


# -- SentencePiece ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_sentencepiece(tmp_path: Path, name: str) -> None:
    theirs = sentencepiece.SentencePieceProcessor(str(file_of("mistral_common", f"data/{name}")))
    numbers = range(theirs.vocab_size())
    tokens = [theirs.id_to_piece(number) for number in numbers]

    def kind(number: int) -> int:
        if theirs.is_unknown(number):
            return UNKNOWN
        return CONTROL if theirs.is_control(number) else BYTE if theirs.is_byte(number) else NORMAL

    more = {"token_scores": [theirs.get_score(number) for number in numbers], "bos_token_id": 1}
    more |= {"eos_token_id": 2, "unk_token_id": 0}
    path = write_tokens(tmp_path / "x.gguf", tokens, [*map(kind, numbers)], kind="llama", **more)
    tokenizer = read(path)
    for text in ALL:
        assert ids(tokenizer, text) == theirs.encode(text), text
        assert tokenizer.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text)), text
    assert ids(tokenizer, "a", True) == [1, *theirs.encode("a")]
    more |= {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    path = write_tokens(tmp_path / "y.gguf", tokens, [*map(kind, numbers)], kind="llama", **more)
    assert ids(read(path), "a", True) == [theirs.piece_to_id("a"), 2]


def test_added_tokens_of_phi3_swallow_white_space(tmp_path: Path) -> None:
    """As in Phi-3's own tokenizer, and in llama.cpp."""
    theirs = sentencepiece.SentencePieceProcessor(str(file_of("mistral_common", "data/tokenizer.model.v1")))
    numbers = range(theirs.vocab_size())
    tokens = [theirs.id_to_piece(number) for number in numbers] + ["<|user|>", "<|end|>", "<|endoftext|>"]
    types = [BYTE if theirs.is_byte(number) else NORMAL for number in numbers] + [CONTROL] * 3
    types[:3] = [UNKNOWN, CONTROL, USER_DEFINED]
    scores = [theirs.get_score(number) for number in numbers] + [-1000.0] * 3
    user, end, last = range(len(tokens) - 3, len(tokens))
    text, newline = "<|user|>\n Hi<|end|>\n<|endoftext|>\n</s>\n", theirs.encode("\n")
    expected = {
        "phi3": [user, *theirs.encode("Hi"), end, last, *newline, 2],
        "llama": [user, *theirs.encode("\n Hi"), end, *newline, last, *newline, 2, *newline],
    }
    for name in expected:
        more: dict[str, Any] = {"architecture": name, "token_scores": scores}
        path = write_tokens(tmp_path / "x.gguf", tokens, types, kind="llama", **more)
        assert ids(read(path), text) == expected[name]


# -- refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported: gpt2"),
    "pre": ({"pre": "deepseek-coder"}, "tokenizer.ggml.pre 'deepseek-coder', .* supported: default, gpt-2"),
    "no pre": ({"pre": None}, "tokenizer.ggml.pre None"),
    "merges": ({"token_merges": ["a b c"]}, "tokenizer.ggml.merges has 'a b c', which is no pair of tokens"),
    "an id": ({"eos_token_id": 999}, "tokenizer.ggml.eos_token_id 999 is none of the 257 tokens"),
    "types": ({"types": [1]}, "token_type must be a list of 257 numbers"),
    "twice": ({"tokens": [*ALPHABET[:256], "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokenizers_that_are_not_known_are_refused(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    given: dict[str, Any] = {
        "tokens": ALPHABET,
        "types": [NORMAL] * 257,
        "pre": "gpt-2",
        "token_merges": ["a b"],
    }
    path = write_tokens(tmp_path / "x.gguf", **given | changes)
    with pytest.raises(ModelLoadError, match=f"x.gguf: .*{message}"):
        read(path)


def test_a_file_without_a_tokenizer_takes_another(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(demo_model_path(), source)
    (source / "tokenizer.json").unlink()
    path = write_gguf(source, tmp_path / "demo.gguf")
    with pytest.raises(ModelLoadError, match=r"demo\.gguf has no tokenizer .* pass a folder"):
        read(path)
