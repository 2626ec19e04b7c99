#!/usr/bin/env bash
# transformers 5.24.0 with the chat template of DeepSeek's R1 distillations, as TRL 1.16.0 ships it: how is an answer
# with a tool call and no content written?
# Guess: with content None, as OpenAI's API has it, the call is written: the template asks for just that, `is none`.
# Seen:  apply_chat_template leaves keys out whose value is None, so the template fails at a missing content. With ""
#        it writes an empty answer without the call, and no error. So no form of the message shows the call.
# Ours:  tests/cpu/text/test_message_forms.py::test_a_template_that_writes_no_calls: an error in place of a loss.
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


[path] = Path(sys.argv[1]).rglob("trl/chat_templates/deepseek_r1_distill.jinja")
template = path.read_text()
assert "message['content'] is none" in template


def written(content):
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
    ]
    try:
        text = Tokenizer().apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception as error:
        return type(error).__name__
    return "written" if "get_weather" in text else "lost"


seen = {repr(content): written(content) for content in (None, "")}
print("transformers", transformers.__version__, "| guess: {'None': 'written'} | seen:", seen)
assert seen == {"None": "UndefinedError", "''": "lost"}, "the behaviour has changed"
PYTHON
