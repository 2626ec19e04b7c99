"""Random text of many scripts, whole, in parts and with stop strings at every split, with small and real
tokenizers.

mistral-common contains sentencepiece models with byte fallback, llama-models a tiktoken model of 128,000
tokens.
"""

from __future__ import annotations

import codecs
import json
import random
import shutil
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_stop_strings import check
from test_texts import KINDS, TOKENIZERS
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.engine.startup import load_tokenizer
from nanovllm.extras.stop_strings import text_stream
from nanovllm.text.detokenizer import Detokenizer

REAL = {  # package and file
    "mistral_v1": ("mistral_common", "data/tokenizer.model.v1"),
    "mistral_v3": ("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3"),
    "llama3": ("llama_models", "llama3/tokenizer.model"),
}
NAMES = [*KINDS, "demo", *REAL]
# What a reader sees as one character: emoji with skin tones or joiners, flags, letters with combining marks.
# And ends of sentences in scripts without spaces.
PIECES = [
    *"aZ09 .,'\"\n\t_(",
    *["🦀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇨🇭", "❤️", "1️⃣", "🫠", "👩🏿‍🚀"],
    *["é", "e\u0301", "q\u0323\u0307", "o\u0302\u0301", "ß", "ﬁ", "Å", "A\u030a", "Z̵̧̛"],
    *["日", "本語", "龍", "𠮷", "한", "ᄒ\u1161ᆫ", "\uff41", "。", "「"],
    *["नि", "क्ष", "ที่", "لا", "שָׁ", "\u200d", "\u200b", "\u00a0", "\u2028", "\ufeff", "\ufffd"],
    *[" the", "ing", "  ", "<|x|>", "</s", "€", "∑", "\U0001d518", "\U0010fffd"],
]


def tiktoken(path: Path, **options: str) -> Tokenizer:
    """The tokenizer of a file of tiktoken, for example with its `pattern`."""
    converter = TikTokenConverter(str(path), **options)
    # Some versions add those of one name or the other, and have None.
    converter.additional_special_tokens = converter.extra_special_tokens = []
    made: Tokenizer = converter.converted()
    return made


@lru_cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    if name in KINDS:
        return TOKENIZERS[name]
    if name == "demo":
        return load_tokenizer(demo_model_path())
    package, path = REAL[name]
    [root] = find_spec(package).submodule_search_locations
    if name == "llama3":
        return PreTrainedTokenizerFast(tokenizer_object=tiktoken(Path(root, path)))
    return load_tokenizer(folder_of(Path(root, path)))


FOLDERS: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in REAL:
        FOLDERS[name] = tmp_path_factory.mktemp(name)


def folder_of(model: Path) -> Path:
    """A folder like a Llama checkpoint with only sentencepiece's file."""
    [name] = [name for name, (_, path) in REAL.items() if str(model).endswith(path)]
    shutil.copy(model, FOLDERS[name] / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    (FOLDERS[name] / "tokenizer_config.json").write_text(json.dumps(settings))
    (FOLDERS[name] / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return FOLDERS[name]


def encoded(name: str, text: str) -> list[int]:
    return tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]


def random_text(rng: random.Random) -> str:
    """Random pieces of PIECES, and random characters that are no surrogates."""
    pieces = rng.choices(PIECES, k=rng.randint(2, 12))
    for _ in range(rng.randint(0, 3)):
        code = rng.choice(
            [rng.randrange(0x20, 0x800), rng.randrange(0x800, 0xD800), rng.randrange(0xE000, 0x11000)]
        )
        pieces.insert(rng.randrange(len(pieces)), chr(code))
    return "".join(pieces)


@pytest.mark.parametrize("name", NAMES)
def test_whole_and_in_parts(name: str) -> None:
    """For every split into prompt and output: the parts add up to the whole text, and prompt and output
    together decode to the tokenizer's text.
    """
    rng, tokenizer = random.Random(3), tokenizer_of(name)
    detokenizer, exact = Detokenizer(tokenizer), 0
    for _ in range(60):
        ids = encoded(name, "x" + random_text(rng))
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        for start in rng.sample(range(1, len(ids)), min(3, len(ids) - 1)):
            prompt, stream, text = ids[:start], text_stream(detokenizer, ids[:start]), ""
            for end in range(start + 1, len(ids) + 1):
                text += stream.append(ids[end - 1])
                assert text == detokenizer.text(prompt, ids[start:end])
            before = tokenizer.decode(prompt, skip_special_tokens=True)
            if not before.endswith("\ufffd"):  # no character is cut
                assert before + text == whole.removesuffix("\ufffd") or before + text == whole
                exact += 1
    assert exact > 60


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_are_no_character_in_parts(name: str) -> None:
    """Random tokens, half of them bytes, and bytes within text. At every cut the parts are the whole text,
    and U+FFFD is where Python's decoding of UTF-8 has it.
    """
    rng, tokenizer = random.Random(6), tokenizer_of(name)
    detokenizer = Detokenizer(tokenizer)
    tokens = [(f"<0x{byte:02X}>", bytes([byte])) for byte in range(256)]
    byte_of = {tokenizer.convert_tokens_to_ids(token): byte for token, byte in tokens}
    if "<0x41>" not in tokenizer.get_vocab():  # a byte-level tokenizer: its tokens of one byte
        byte_of = {index: detokenizer.token_bytes(index) for index in range(300)}
        byte_of = {index: byte for index, byte in byte_of.items() if len(byte) == 1}
    few = list(byte_of)
    for turn in range(80):
        ids = encoded(name, "x" + random_text(rng))
        if turn % 2:
            ids = [
                rng.choice(few) if rng.random() < 0.5 else rng.randrange(len(tokenizer)) for _ in range(12)
            ]
        for _ in range(3):
            ids.insert(rng.randrange(1, len(ids)), rng.choice(few))
        start = rng.randrange(1, len(ids))
        stream, text = text_stream(detokenizer, ids[:start]), ""
        for end in range(start + 1, len(ids) + 1):
            text += stream.append(ids[end - 1])
            assert text == detokenizer.text(ids[:start], ids[start:end])
        run = [*encoded(name, "x"), *rng.choices(few, k=8)]
        written = b"".join(byte_of[token_id] for token_id in run[-8:])
        expected = codecs.getincrementaldecoder("utf-8")("replace").decode(written)
        assert detokenizer.text(run[:-8], run[-8:]) == expected


@pytest.mark.parametrize("name", NAMES)
def test_stop_strings_at_every_split(name: str) -> None:
    """A substring of the text, alone and among other stop strings, for output that starts at any token."""
    rng = random.Random(4)
    detokenizer, found = Detokenizer(tokenizer_of(name)), 0
    for _ in range(25):
        ids = encoded(name, "x" + random_text(rng))
        for start in rng.sample(range(1, len(ids)), min(2, len(ids) - 1)):
            prompt, output = ids[:start], ids[start:]
            text = detokenizer.text(prompt, output)
            for place in range(len(text)):
                stop = text[place : place + rng.randint(1, 5)]
                stops = [stop, *rng.sample(["zzz", "🌍🌍", stop + "?"], rng.randrange(3))]
                assert check(detokenizer, prompt, output, stops)
                found += 1
    assert found > 200


def test_through_the_engine() -> None:
    """Prompts in every script; a part of each answer is the stop string. Joined deltas equal the text."""
    rng = random.Random(5)
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=64, max_model_len=256) as llm:
        prompts = [random_text(rng) for _ in range(24)]
        params = SamplingParams(
            temperature=4.0, seed=1, max_tokens=20, ignore_eos=True, skip_special_tokens=False
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stops = []
        for output in outputs:
            text = output["text"]
            place = rng.randrange(max(1, len(text)))
            stops.append(params.clone())
            stops[-1].stop = [text[place : place + 3] or "x"]
        parts = dict.fromkeys(range(len(prompts)), "")
        for part in llm.stream(prompts, stops, deltas=True):
            parts[part.index] += part.outputs[0].text
        for index, (output, each) in enumerate(zip(outputs, stops, strict=True)):
            text, [stop] = output["text"], each.stop
            assert parts[index] == (text[: text.index(stop)] if stop in text else text)
