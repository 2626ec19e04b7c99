#!/usr/bin/env bash
# Mistral's first SentencePiece model, converted to tokenizer.json by transformers 4.57.1, from which many such files are.
# Guess: the converted tokenizer gives the ids of SentencePiece for plain text, code that is indented included.
# Seen:  from 16 spaces on it does not. All runs of spaces have one score; SentencePiece then joins the leftmost pair, to
#        a run of 16, and the merges of tokenizer.json, which have an order, make one of 14.
# Ours:  tests/cpu/test_file_tokenizers.py, test_a_folder_with_a_sentencepiece_model
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q transformers==4.57.1 mistral-common==1.8.5 sentencepiece==0.2.1 protobuf==6.33.0
venv/bin/python - <<'PY'
import json, os, shutil, mistral_common, sentencepiece, transformers
from transformers import AutoTokenizer

source = os.path.join(os.path.dirname(mistral_common.__file__), "data", "tokenizer.model.v1")
os.makedirs("model")
shutil.copy(source, "model/tokenizer.model")
for name, content in (("tokenizer_config", {"tokenizer_class": "LlamaTokenizer"}), ("config", {"model_type": "llama"})):
    with open(f"model/{name}.json", "w") as file:
        json.dump(content, file)
converted, original = AutoTokenizer.from_pretrained("model"), sentencepiece.SentencePieceProcessor(source)
print("transformers", transformers.__version__, "sentencepiece", sentencepiece.__version__)
for count in (15, 16):
    text = " " * count + "x = 1"
    pieces = converted.convert_ids_to_tokens(converted(text, add_special_tokens=False)["input_ids"])
    theirs = original.encode(text, out_type=str)
    print(count, "spaces:", [*map(len, pieces)], "and SentencePiece", [*map(len, theirs)])
    assert (pieces == theirs) == (count == 15)
PY
echo "as seen"
