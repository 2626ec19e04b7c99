"""Where an answer ends with a GGUF file: by keys, by the text of tokens, by what the chat template writes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
from test_gguf_tokenizer import ALPHABET, write_tokens

from nanovllm.chat.ends import add_written_end
from nanovllm.config import Config
from nanovllm.engine.startup import load_tokenizer, make_processor
from nanovllm.models.registry import open_checkpoint
from nanovllm.text.processor import Processor
from tools.write_gguf import CONTROL, NORMAL, USER_DEFINED

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"  # as GLM-4's
STRICT = (
    "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} [over]{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
FAILS = "{{ raise_exception('never') }}"


def write(path: Path, more: dict[str, int], **keys: Any) -> Path:
    """A file with a byte-level tokenizer and `more` tokens with their types, from id 257 on."""
    types = [NORMAL] * len(ALPHABET) + list(more.values())
    given: dict[str, Any] = {"pre": "gpt-2", "token_merges": ["a b"]}
    return write_tokens(path, [*ALPHABET, *more], types, **given | keys)


def ends(path: Path) -> list[str]:
    """The texts of the tokens that end an answer."""
    checkpoint = open_checkpoint(path)
    stated = checkpoint.generation()["eos_token_id"]
    tokenizer = checkpoint.tokenizer(load_tokenizer)
    processor = Processor(tokenizer, 300, stated)
    add_written_end(processor)
    processor.close()
    return [tokenizer.convert_ids_to_tokens(each) for each in processor.eos_token_ids]


@pytest.mark.parametrize("keys", [{"eos_token_id": 257}, {}], ids=["text's end", "none"])
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED, NORMAL])
def test_a_token_ends_turns_by_its_text(tmp_path: Path, keys: dict[str, Any], kind: int) -> None:
    """Whatever type it has, it is a control token: no answer shows it, and templates write it as one."""
    more = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": kind}
    path = write(tmp_path / "x.gguf", more, chat_template=CHATML, **keys)
    assert ends(path) == ["<|endoftext|>", "<|im_end|>"]
    tokenizer = open_checkpoint(path).tokenizer(load_tokenizer)
    assert tokenizer("a<|im_end|>")["input_ids"][-1] == 259
    assert tokenizer.decode([ALPHABET.index("a"), 259], skip_special_tokens=True) == "a"


def test_texts_that_may_stand_in_answers_end_them_as_control_tokens_only(tmp_path: Path) -> None:
    more = {"</s>": NORMAL, "<EOT>": USER_DEFINED, "[EOS]": CONTROL}
    assert ends(write(tmp_path / "x.gguf", more)) == ["[EOS]"]


def test_a_token_within_turns_is_no_end(tmp_path: Path) -> None:
    assert ends(write(tmp_path / "x.gguf", {"<|end|>": CONTROL, "<|return|>": CONTROL})) == [
        "<|end|>",
        "<|return|>",
    ]
    more = dict.fromkeys(("<|end|>", "<|return|>", "<|call|>"), CONTROL)
    assert ends(write(tmp_path / "y.gguf", more)) == ["<|return|>", "<|call|>"]


@pytest.mark.parametrize(("template", "written"), [(TURNS, "<|user|>"), (STRICT, "[over]")])
def test_what_the_template_writes_after_an_answer_ends_it(
    tmp_path: Path, template: str, written: str
) -> None:
    more = dict.fromkeys(("<|endoftext|>", "<|user|>", "<|assistant|>", "[over]", "[ov"), CONTROL)
    path = write(tmp_path / "x.gguf", more, eos_token_id=257, chat_template=template)
    assert ends(path) == ["<|endoftext|>", written]


def test_the_eos_of_a_template_is_the_files(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    path = write(tmp_path / "x.gguf", {"[stop]": CONTROL}, eos_token_id=257, chat_template=template)
    assert ends(path) == ["[stop]"]


@pytest.mark.parametrize(
    ("template", "keys", "said"),
    [
        (PLAIN, {"eos_token_id": 257}, "its chat template writes none after an answer"),
        (FAILS, {}, "its chat template writes none after an answer"),
        (None, {}, "the model's file names no token that ends a text"),
        (None, {"eos_token_id": 257}, ""),
        (CHATML, {"eos_token_id": 258}, ""),
    ],
)
def test_a_warning_where_none_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str | None, keys: dict[str, Any], said: str
) -> None:
    more = {"<s>": CONTROL, "<|im_end|>" if template == CHATML else "[x]": CONTROL}
    keys = keys | ({} if template is None else {"chat_template": template})
    with caplog.at_level(logging.WARNING, "nanovllm"):
        ends(write(tmp_path / "x.gguf", more, **keys))
    assert (said in caplog.text) if said else not caplog.text


def test_a_start_finds_them(tmp_path: Path) -> None:
    """Of an engine and of `nanovllm check`; with a folder nothing is applied."""
    more = dict.fromkeys(("<|endoftext|>", "<|user|>"), CONTROL)
    path = write(tmp_path / "x.gguf", more, eos_token_id=257, chat_template=TURNS)

    class Model:
        vocab_size, eos_token_ids = 300, (257,)

    processor: Any = make_processor(Config(str(path)), path, Model())  # type: ignore[arg-type]
    assert processor.eos_token_ids == [257, 258]
    assert gguf.GGUFReader(path).fields["tokenizer.ggml.eos_token_id"].contents() == 257
