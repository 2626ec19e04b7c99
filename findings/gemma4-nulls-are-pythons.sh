#!/usr/bin/env bash
# transformers 5.24.0 with Gemma 4's first chat template, as TRL 1.16.0 ships it: how is a null in a list of a call's
# arguments written?
# Guess: as null, because the same template writes true as "true" and strings between its own quotes.
# Seen:  as None, the word of Python, while true beside it is "true"; the template's later versions write null.
# Ours:  tests/cpu/text/test_tool_calls.py::test_forms reads both as null: a string would have quotes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 jinja2==3.1.6
"$folder/venv/bin/pip" install -q --no-deps trl==1.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import re
import sys
from pathlib import Path

import transformers
from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class Tokenizer(PreTrainedTokenizerBase):
    special_tokens_map = {"bos_token": "<bos>", "eos_token": "<eos>"}


def written(name):
    [path] = Path(sys.argv[1]).rglob(f"trl/chat_templates/{name}.jinja")
    function = {"name": "f", "arguments": {"values": [True, None]}}
    call = {"id": "a", "type": "function", "function": function}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = Tokenizer().apply_chat_template(messages, chat_template=path.read_text(), tokenize=False)
    return re.search(r"call:f(\{.*?\})<tool_call\|>", text)[1]


first, last = written("gemma4"), written("gemma4_v5")
print("transformers", transformers.__version__, "| guess: {values:[true,null]} | seen:", first, "| later:", last)
assert first == "{values:[true,None]}", "the behaviour has changed"
PYTHON
