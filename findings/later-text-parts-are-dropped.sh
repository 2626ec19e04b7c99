#!/usr/bin/env bash
# transformers 5.24.0 with LLaVA-NeXT's chat template, as TRL 1.16.0 ships it: an answer's later text parts are lost.
# Guess: a template that reads lists of parts, and writes all text parts of a user, writes all of an assistant too.
# Seen:  the user's "one" and "two" are written, of the assistant's only "three", without an error.
# Our own: tests/cpu/text/test_message_forms.py::test_contents, with FIRST_PART
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 jinja2==3.1.6
"$folder/venv/bin/pip" install -q --no-deps trl==1.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import transformers
from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class Tokenizer(PreTrainedTokenizerBase):
    special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}


[path] = Path(sys.argv[1]).rglob("trl/chat_templates/llava_next.jinja")


def said(role, *texts):
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


messages = [said("user", "one", "two"), said("assistant", "three", "four"), said("user", "five")]
text = Tokenizer().apply_chat_template(messages, chat_template=path.read_text(), tokenize=False)
lost = [word for word in ("one", "two", "three", "four", "five") if word not in text]
print("transformers", transformers.__version__, "| guess: [] is lost | seen:", lost, "|", repr(text))
assert lost == ["four"], "the behaviour has changed"
PYTHON
