"""The texts of outputs: prompt and output together decode to the original text, with any tokenizer."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import inside
import pytest
import torch
from checked_llm import CheckedLLM
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import edit_json, write_tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanovllm import SamplingParams
from nanovllm.extras.stop_strings import text_stream
from nanovllm.text.detokenizer import Detokenizer

CORPUS = ["Hello the world, the wörld 日本語 🌍", "I say: the world is the world"] * 20
SPECIAL = ["<s>", "</s>", "<|turn|>"]
KINDS = ["byte_level", "metaspace", "llama"]
BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE like GPT-2 and Qwen, or BPE with byte fallback like sentencepiece, with the Metaspace
    decoder or Llama's sequence of decoders.
    """
    if kind == "byte_level":
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tok.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tok.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    else:
        learned = Tokenizer(models.BPE(unk_token="<unk>"))
        space = pre_tokenizers.Metaspace(prepend_scheme="first")
        learned.pre_tokenizer = space
        alphabet = list("Helothwrdis:Iay,▁\ufffd")
        learned.train_from_iterator(
            CORPUS,
            trainers.BpeTrainer(vocab_size=60, limit_alphabet=len(alphabet), initial_alphabet=alphabet),
        )
        state = json.loads(learned.to_str())["model"]
        tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *state["vocab"]]
        vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
        merges = [tuple(merge) for merge in state["merges"]]
        tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
        tok.pre_tokenizer = space
        parts = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        if kind == "llama":
            parts = [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        tok.decoder = decoders.Sequence(parts)
    tok.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {kind: make_tokenizer(kind) for kind in KINDS}


def encode(kind: str, text: str) -> list[int]:
    return TOKENIZERS[kind](text, add_special_tokens=False)["input_ids"]


def model_for(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    path = write_tiny_model(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(path)
    return path


def written(kind: str, ids: list[int]) -> str:
    """The complete characters of `ids`, computed from the bytes of each token."""
    tokenizer, data = TOKENIZERS[kind], b""
    for token in tokenizer.convert_ids_to_tokens(ids):
        if token in SPECIAL:
            continue
        if kind == "byte_level":
            data += bytes(BYTE_OF[letter] for letter in token)
        elif token.startswith("<0x"):
            data += bytes.fromhex(token[3:5])
        else:
            data += token.replace("▁", " ").encode()
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    return text.removeprefix(" ") if kind != "byte_level" else text


LETTERS = st.sampled_from([*"Hello the world: I say. é日本🌍👨‍👩‍👧\ufffd\n", " the", "<|turn|>", "</s>"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(letters=st.lists(LETTERS, min_size=1, max_size=14))
@example(letters=["日", "本", "語", "日", "本"])
@example(letters=["Hello", "<|turn|>", "<|turn|>", "<|turn|>", "<|turn|>", "<|turn|>", "<|turn|>", " the"])
@example(letters=["x", "\ufffd"])
def test_prompt_and_text_are_what_was_written(kind: str, letters: list[str]) -> None:
    """For every split into prompt and output, and every end of the output."""
    ids = TOKENIZERS[kind]("x" + "".join(letters), add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(TOKENIZERS[kind])
    for start in range(1, len(ids)):
        for end in range(start, len(ids) + 1):
            before, all_of_it = written(kind, ids[:start]), written(kind, ids[:end])
            assert before + detokenizer.text(ids[:start], ids[start:end]) == all_of_it


@pytest.mark.parametrize("kind", KINDS)
def test_some_texts(kind: str) -> None:
    text = Detokenizer(TOKENIZERS[kind]).text

    def behind(prompt: str, output: str, cut: int = 0) -> str:
        ids = encode(kind, prompt + output)
        start = len(encode(kind, prompt))
        assert ids[:start] == encode(kind, prompt)
        return text(ids[:start], ids[start : len(ids) - cut])

    assert behind("Hello", " world") == " world"
    assert behind("Hello", " x🦀", cut=1) == behind("Hello", " x🦀", cut=2) == " x"
    assert behind("Hello", " 日🦀", cut=1) == " 日"
    assert behind("Hello", "\ufffd") == "\ufffd"
    assert behind("Hello", "\ufffd🦀", cut=1) == "\ufffd"
    bos, turn = TOKENIZERS[kind].convert_tokens_to_ids(["<s>", "<|turn|>"])
    world = encode(kind, "Hello world")[len(encode(kind, "Hello")) :]
    assert text([bos, *encode(kind, "Hello"), *[turn] * 9], world) == " world"
    assert text([bos, *encode(kind, "Hello")], [turn, *world, turn]) == " world"
    assert text([bos], [bos]) == text([bos], []) == ""
    assert text(encode(kind, "日本語" * 9)[:-1], encode(kind, "日本語" * 9)[-1:]) == "語"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_no_character_stay(kind: str) -> None:
    """The model wrote these bytes, and no later byte can complete a character."""
    tokenizer = TOKENIZERS[kind]
    names = {"byte_level": [letter for letter, byte in BYTE_OF.items() if byte == 0x80]}.get(kind, ["<0x80>"])
    broken = tokenizer.convert_tokens_to_ids(names)
    assert Detokenizer(tokenizer).text(encode(kind, "Hello"), broken) == "\ufffd"


def test_letters_of_added_tokens_that_are_read_as_bytes() -> None:
    """The decoder takes "größe" for bytes, as it does in transformers; the text in parts is the whole one."""
    tokenizer = make_tokenizer("byte_level")
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("größe", "größe中", "là")])
    first = len(tokenizer) - 3
    ids = tokenizer("a größe größe中là é", add_special_tokens=False)["input_ids"]
    assert {first, first + 1, first + 2} < set(ids)
    detokenizer = Detokenizer(tokenizer)
    expected = "a gr\ufffd\ufffde größe中l\ufffd é"
    assert detokenizer.text([], ids) == tokenizer.decode(ids) == expected
    assert "".join(map(text_stream(detokenizer, []).append, ids)) == expected


def test_a_slow_tokenizer_decodes_by_its_own_method() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def decode(self, *args: object, **options: object) -> str:
            return super().decode(*args, **options).upper()

    tokenizer = Shouting(tokenizer_object=TOKENIZERS["llama"].backend_tokenizer, eos_token="</s>")
    ids = encode("llama", "Hello world")
    assert Detokenizer(tokenizer).text(ids[:3], ids[3:]) == "HELLO WORLD"[len(tokenizer.decode(ids[:3])) :]


@pytest.mark.parametrize("kind", KINDS)
def test_it_decodes_little_more_than_the_output(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    pool = encode(kind, CORPUS[1])
    detokenizer = Detokenizer(TOKENIZERS[kind])
    decoded = 0

    def counted(decode: Callable[..., str]) -> Callable[..., str]:
        def count(token_ids: list[int], **options: object) -> str:
            nonlocal decoded
            decoded += len(token_ids)
            return decode(token_ids, **options)

        return count

    inside.wrap_decode(monkeypatch, detokenizer, counted)
    for _ in range(300):
        prompt = [rng.choice(pool) for _ in range(100)]
        detokenizer.text(prompt, [rng.choice(pool) for _ in range(200)])
    assert decoded <= 1.1 * 300 * 200


# -- through the engine --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_through_the_engine(kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]
    path = model_for(tokenizer, tmp_path)
    with CheckedLLM(path, device="cpu", max_num_seqs=40) as llm:
        params = [SamplingParams(temperature=3.0, seed=seed, max_tokens=9) for seed in range(40)]
        for output in llm.generate(["Hello"] * 40, params, use_tqdm=False):
            ids = output["token_ids"]
            ids = ids[:-1] if output["finish_reason"] == "stop" else ids
            assert output["text"] == Detokenizer(tokenizer).text(output.prompt_token_ids, ids)


@contextmanager
def writing(llm: CheckedLLM, token_ids: Iterator[int]) -> Iterator[None]:
    """Make the model write `token_ids`, one in each step."""
    compute = inside.model(llm).compute_logits

    def forced(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[:, next(token_ids)] = 1e9
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inside.model(llm), "compute_logits", forced)
        yield


def reason(llm: CheckedLLM, token: int, **options: object) -> tuple[str, int | None]:
    """Finish reason and stop reason if the model writes only `token`."""
    params = SamplingParams(temperature=0, max_tokens=3, **options)
    with writing(llm, repeat(token)):
        (output,) = llm.generate([5, 6], params, use_tqdm=False)
    assert output["text"] == "", "the token is a special one"
    return output["finish_reason"], output.outputs[0].stop_reason


def test_stop_reason_is_none_for_the_models_own_end(tmp_path: Path) -> None:
    """As in vLLM: None for the tokenizer's EOS token, the id for other EOS tokens and stop_token_ids."""
    tokenizer = TOKENIZERS["byte_level"]
    bos, eos, turn = tokenizer.convert_tokens_to_ids(SPECIAL)
    path = model_for(tokenizer, tmp_path)
    with CheckedLLM(path, device="cpu", max_num_seqs=40, skip_tokenizer_init=True) as llm:
        assert reason(llm, eos) == ("stop", None), "the only one that the model has"
    edit_json(path / "generation_config.json", eos_token_id=[eos, turn])
    with CheckedLLM(path, device="cpu", max_num_seqs=40, skip_tokenizer_init=True) as llm:
        assert reason(llm, eos) == ("stop", eos), "without a tokenizer, which of two it is cannot be known"
    with CheckedLLM(path, device="cpu", max_num_seqs=40) as llm:
        assert reason(llm, eos) == ("stop", None)
        assert reason(llm, turn) == ("stop", turn)
        assert reason(llm, bos, stop_token_ids=[bos]) == ("stop", bos)
        assert reason(llm, eos, stop_token_ids=[eos]) == ("stop", None)
        assert reason(llm, eos, stop_token_ids=[eos], ignore_eos=True) == ("stop", eos)
        assert reason(llm, eos, ignore_eos=True) == ("length", None)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_kept_or_left_out(kind: str, tmp_path: Path) -> None:
    """As each request says, in one batch. The token that ends the output is left out in both cases."""
    tokenizer = TOKENIZERS[kind]
    path = model_for(tokenizer, tmp_path)
    prompt, turn = encode(kind, "Hello<|turn|>"), tokenizer.convert_tokens_to_ids("<|turn|>")
    with CheckedLLM(path, device="cpu", max_num_seqs=40, enforce_eager=True) as llm:  # no step is tried twice
        answer = [turn, *encode(kind, "Hello the")[1:], turn, tokenizer.eos_token_id]
        asked = [{}, {"skip_special_tokens": False}, {"detokenize": False}]
        params = [SamplingParams(temperature=0, max_tokens=30, **options) for options in asked]
        with writing(llm, iter(answer)):
            outputs = llm.generate([prompt] * 3, params, use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == [answer] * 3
        text = Detokenizer(tokenizer).text(prompt, answer[1:-2])
        assert [output["text"] for output in outputs] == [text, f"<|turn|>{text}<|turn|>", ""]
        assert outputs[0].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_token_of_a_character_has_its_text(kind: str, tmp_path: Path) -> None:
    """As in vLLM. The joined texts of the tokens are the text."""
    tokenizer, text = TOKENIZERS[kind], "字 the wörld: 🌍🦀, the日"
    ids = encode(kind, text)
    params = SamplingParams(temperature=3.0, seed=1, max_tokens=40, logprobs=3, prompt_logprobs=0, n=2)
    with CheckedLLM(model_for(tokenizer, tmp_path), device="cpu", max_num_seqs=40) as llm:
        [output] = llm.generate([ids], params, use_tqdm=False)
        rows = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        shown = [row[token_id].decoded_token for token_id, row in rows]
        assert {"字", "🌍", "🦀"} <= {each.strip() for each in shown} and shown.count("") >= 4
        assert text.replace(" ", "").endswith("".join(shown[1:]).replace(" ", ""))
        own: list[str] = []
        for token_id, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            own.append(row[token_id].decoded_token)
            assert not own[-1].endswith("\ufffd")
        parts = list(llm.stream([ids], params, deltas=True))
        for completion in output.outputs:
            mine = [part for each in parts for part in each.outputs if part.index == completion.index]
            assert [row for part in mine for row in part.logprobs] == list(completion.logprobs)
        params.detokenize = False
        [output] = llm.generate([ids], params, use_tqdm=False)
        rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        assert {each.decoded_token for row in rows for each in row.values()} == {None}
