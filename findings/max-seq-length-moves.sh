#!/usr/bin/env bash
# Where does sentence-transformers keep the length at which it cuts texts off?
# Guess: as max_seq_length in sentence_bert_config.json, where files on the hub have it.
# Seen: that file has no such key any more; the length is model_max_length of tokenizer_config.json, which other readers
# of the folder take for a mere property of the tokenizer. Longer texts are cut off without a word.
# Ours: both files are read, texts are used whole, and a warning says so, tests/cpu/models/test_embedding_models.py::
# test_texts_that_sentence_transformers_cuts_off.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.17.0 sentence-transformers==6.2.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys
from pathlib import Path

import sentence_transformers
import tokenizers
import torch
import transformers
from sentence_transformers import SentenceTransformer

words = {f"w{number}": number for number in range(60)} | {"<eos>": 60, "<unk>": 61}
words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
words_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
transformers.PreTrainedTokenizerFast(
    tokenizer_object=words_only, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
).save_pretrained("model")
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
)
transformers.LlamaModel(config).save_pretrained("model")
made = SentenceTransformer("model", device="cpu")
made.max_seq_length = 7
made.save("saved")
own = json.loads(Path("saved/sentence_bert_config.json").read_text()).get("max_seq_length")
tokenizers_ = json.loads(Path("saved/tokenizer_config.json").read_text()).get("model_max_length")
texts = [" ".join(f"w{number}" for number in range(count)) for count in (7, 12)]
first, second = SentenceTransformer("saved", device="cpu").encode(texts)
is_cut = bool((abs(first - second) < 1e-5).all())
print(f"sentence-transformers {sentence_transformers.__version__}, transformers {transformers.__version__}")
print("guess: max_seq_length 7 in sentence_bert_config.json")
print(f"seen: there {own}; model_max_length of tokenizer_config.json {tokenizers_}; texts are cut off: {is_cut}")
sys.exit((own, tokenizers_, is_cut) != (None, 7, True))
PYTHON
