#!/usr/bin/env bash
# A folder with a SentencePiece model alone, and the class LlamaTokenizer.
# Guess: transformers 5 begins a text with <s> there, as transformers 4 does and as the docstring of its class says
#        ("add_bos_token ... defaults to True").
# Seen:  4.57.1 begins with <s> and 5.24.0 does not; with "add_bos_token": true both do.
# Ours:  tests/cpu/text/test_file_tokenizers.py, test_a_folder_with_a_sentencepiece_model
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > look.py <<'PY'
import json, os, shutil, sys, mistral_common, transformers
from transformers import AutoTokenizer

source = os.path.join(os.path.dirname(mistral_common.__file__), "data", "tokenizer.model.v1")
seen = []
for stated in (None, True):
    folder = f"model-{stated}"
    os.makedirs(folder, exist_ok=True)
    shutil.copy(source, os.path.join(folder, "tokenizer.model"))
    config = {"tokenizer_class": "LlamaTokenizer"} | ({} if stated is None else {"add_bos_token": stated})
    for name, content in (("tokenizer_config", config), ("config", {"model_type": "llama"})):
        with open(os.path.join(folder, f"{name}.json"), "w") as file:
            json.dump(content, file)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Hello")["input_ids"]
    seen.append(ids[0] == 1)
    print(f"transformers {transformers.__version__}, add_bos_token {stated}: {tokenizer.convert_ids_to_tokens(ids)}")
sys.exit(seen != json.loads(sys.argv[1]))
PY
look() { # version of transformers, what begins with <s>
    python3 -m venv "venv-$1"
    "venv-$1/bin/pip" install -q "transformers==$1" mistral-common==1.8.5 sentencepiece==0.2.1 protobuf==6.33.0
    "venv-$1/bin/python" look.py "$2"
}
look 4.57.1 '[true, true]'
look 5.24.0 '[false, true]'
echo "as seen"
