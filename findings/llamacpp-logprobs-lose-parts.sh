#!/usr/bin/env bash
# llama.cpp's server, as xllamacpp 2026.10.11549 has it, gives logprobs of an answer with characters of several tokens,
# as most characters of rarer scripts are. A grammar makes the answer "größe 日本".
# Guess: they have one entry for each generated token, also where tokens are parts of a character, in order.
# Seen:  tokens after which a character is not complete have none: 15 tokens have 9 entries. That of "日" has its three
#        bytes and the logprob of the last one alone, so the sum is not the log-probability of the text, without a word.
# Ours:  a row for each token, tests/cpu/text/test_texts.py::test_the_last_token_of_a_character_has_its_text
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.2.6 tokenizers==0.23.3
cd "$folder"
venv/bin/python - 2>errors <<'PYTHON' || { tail errors >&2; exit 1; }
import json
import sys
from importlib.metadata import version
from urllib.request import Request, urlopen

import gguf
import numpy as np
import xllamacpp
from tokenizers import pre_tokenizers

ANSWER = "größe 日本"
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
writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
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
body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 40}
body |= {"grammar": f'root ::= "{ANSWER}"', "logprobs": True, "top_logprobs": 1}
request = Request(f"{server.listening_address}/v1/chat/completions", json.dumps(body).encode())
request.add_header("Content-Type", "application/json")
answer = json.load(urlopen(request))
choice, count = answer["choices"][0], answer["usage"]["completion_tokens"]
found = [(bytes(entry["bytes"]).decode(), round(entry["logprob"], 3)) for entry in choice["logprobs"]["content"]]
each = round(-np.log(len(tokens)), 3)  # all logits are equal, so that each token has this logprob
print("xllamacpp", version("xllamacpp"), "answers", choice["message"]["content"], "in", count, "tokens")
print(f"guess: {count} entries of {each}, whose sum is {count * each:.2f}")
print(f"seen:  {len(found)} entries, whose sum is {sum(one for _, one in found):.2f}:", found)
is_byte_level = choice["message"]["content"] == ANSWER and count == len(ANSWER.encode()) + 1  # and the end
sys.exit(not (is_byte_level and found == [(letter, each) for letter in [*ANSWER, ""]]))
PYTHON
