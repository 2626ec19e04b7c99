#!/usr/bin/env bash
# llama.cpp, as xllamacpp 2026.10.11549 has it, renders the chat template of a GGUF file by itself: does it write tools
# as transformers 5.24.0 does with the same template?
# Guess: {{ tools | tojson }} is the same text, also where a schema has floats, null, nested lists and letters
#        beyond ASCII.
# Seen:  a float that is whole loses its point: a maximum of 1.0 is written as 1, and 1e-07, 0.1 and all else are as
#        there. So one file and one conversation give other tokens in two engines.
# Ours:  tests/cpu/text/test_templates.py::test_numbers_of_tools_keep_their_points
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.3.5 \
    transformers==5.24.0 jinja2==3.1.6
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>errors <<'PYTHON' || { tail errors >&2; exit 1; }
import json
import sys
from importlib.metadata import version
from urllib.request import Request, urlopen

import gguf
import numpy as np
import xllamacpp
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
SCHEMA = {"type": "number", "minimum": 0.1, "maximum": 1.0, "default": 1e-07, "enum": [None, [2.5, []], 1e16]}
TOOL = {"name": "größe", "description": "ß", "parameters": {"type": "object", "properties": {"x": SCHEMA}}}
tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|im_end|>"]
writer = gguf.GGUFWriter("model.gguf", "llama")
writer.add_block_count(1)
writer.add_context_length(64)
writer.add_embedding_length(32)
writer.add_feed_forward_length(32)
writer.add_head_count(1)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(32)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("gpt-2")
writer.add_token_list(tokens)
writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
writer.add_token_merges(["a b"])
writer.add_eos_token_id(257)
writer.add_chat_template(TEMPLATE)
layer = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
shapes = {"token_embd": (258, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
for name, shape in (shapes | {f"blk.0.{each}": (32, 32) for each in layer}).items():
    writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = "model.gguf", 64, 1, False
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": TOOL}]}
request = Request(f"{server.listening_address}/apply-template", json.dumps(body).encode())
request.add_header("Content-Type", "application/json")
seen = json.load(urlopen(request))["prompt"]
whole = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, [("a", "b")]))
other = PreTrainedTokenizerFast(tokenizer_object=whole, chat_template=TEMPLATE)
guess = other.apply_chat_template(body["messages"], tools=body["tools"], tokenize=False)
print("xllamacpp", version("xllamacpp"), "and transformers", version("transformers"))
print("guess:", guess)
print("seen: ", seen)
sys.exit(not ('"maximum": 1.0,' in guess and seen == guess.replace('"maximum": 1.0,', '"maximum": 1,')))
PYTHON
