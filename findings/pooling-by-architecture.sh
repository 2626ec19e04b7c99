#!/usr/bin/env bash
# How does sentence-transformers pool a decoder whose folder has no modules.json?
# Guess: by the mean, the default of its Pooling module, whatever the folder holds.
# Seen: by the last token if architectures of config.json is LlamaForCausalLM, and by the mean if it is LlamaModel, so
# that the same decoder saved without its LM head gives other embeddings. Neither is normalised.
# Ours: embed() takes the last token of both, and normalises, as docs/options.md says, tests/cpu/models/test_embedding_models.py
# ::test_without_such_files_the_last_token_is_normalised.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.17.0 sentence-transformers==6.2.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import sentence_transformers
import tokenizers
import torch
import transformers
from sentence_transformers import SentenceTransformer

words = {f"w{number}": number for number in range(60)} | {"<eos>": 60, "<unk>": 61}
words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
words_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=words_only, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
)
modes, lengths = [], []
for name, model in {
    "whole": transformers.LlamaForCausalLM(config),
    "bare": transformers.LlamaModel(config),
}.items():
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)
    made = SentenceTransformer(name, device="cpu")
    modes.append(made[1].pooling_mode)
    lengths.append(float((made.encode(["w1 w2 w3"]) ** 2).sum() ** 0.5))
print(f"sentence-transformers {sentence_transformers.__version__}, transformers {transformers.__version__}")
print("guess: pooling_mode 'mean' for both")
print(f"seen: {modes}, lengths of embeddings {[round(each, 2) for each in lengths]}")
sys.exit(modes != ["lasttoken", "mean"] or any(abs(each - 1) < 0.01 for each in lengths))
PYTHON
