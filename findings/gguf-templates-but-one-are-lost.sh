#!/usr/bin/env bash
# transformers 5.24.0 makes a tokenizer of a GGUF file that has two chat templates, as llama.cpp's converter writes
# them: tokenizer.chat_template, and tokenizer.chat_template.NAME with the list tokenizer.chat_templates.
# Guess: AutoTokenizer has both by name, as it has for a folder with both, and with tools it renders tool_use.
# Seen:  it has the default one alone, so a conversation with tools is rendered without them and without an error.
#        The folder that is written by save_pretrained of the same tokenizer has lost the other one too.
# Ours:  tests/cpu/models/test_gguf_tokenizer.py::test_several_chat_templates
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 transformers==5.24.0 gguf==0.19.0 \
    numpy==2.3.5 jinja2==3.1.6
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>errors <<'PYTHON' || { tail errors >&2; exit 1; }
import sys
from importlib.metadata import version

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|im_end|>"]
TEMPLATES = {
    "default": "{{ messages[0].content }}",
    "tool_use": "{{ tools[0].function.name }}: {{ messages[0].content }}",
}
writer = gguf.GGUFWriter("model.gguf", "qwen2")
writer.add_block_count(1)
writer.add_context_length(64)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("qwen2")
writer.add_token_list(TOKENS)
writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
writer.add_token_merges(["a b"])
writer.add_eos_token_id(257)
writer.add_chat_template([{"name": name, "template": text} for name, text in TEMPLATES.items()])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

of_file = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
whole = Tokenizer(models.BPE({token: number for number, token in enumerate(TOKENS)}, [("a", "b")]))
PreTrainedTokenizerFast(tokenizer_object=whole, chat_template=TEMPLATES).save_pretrained("folder")
of_folder = AutoTokenizer.from_pretrained("folder")
of_file.save_pretrained("saved")
saved = AutoTokenizer.from_pretrained("saved")
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
user = [{"role": "user", "content": "hi"}]
texts = [each.apply_chat_template(user, tools=[tool], tokenize=False) for each in (of_folder, of_file, saved)]
keys = [field for field in gguf.GGUFReader("model.gguf").fields if "chat_template" in field]
print("transformers", version("transformers"), "with gguf", version("gguf"))
print("keys of the file:", *keys)
print("guess: a conversation with tools is rendered as of a folder:", repr(texts[0]))
print("seen: ", repr(texts[1]), "of the file, and", repr(texts[2]), "of what it saves")
sys.exit(not (len(keys) == 3 and of_folder.chat_template == TEMPLATES and texts == ["f: hi", "hi", "hi"]))
PYTHON
