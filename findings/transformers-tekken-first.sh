#!/usr/bin/env bash
# transformers: a folder with tokenizer.json and tekken.json.
#
# Guess: AutoTokenizer reads tokenizer.json where a folder has one, whatever else is installed; tekken.json is for
#   mistral-common alone.
# Seen: once mistral-common is installed (other packages bring it along), the same call on the same folder of a
#   Mistral gives a MistralCommonBackend made of tekken.json, with another vocabulary and other ids. Its
#   added_tokens_decoder is a method, and not the dictionary that other tokenizers have.
# Ours: tests/cpu/models/test_files.py::test_a_tokenizer_of_mistral_common_beside_another
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile transformers==5.24.0 tokenizers==0.23.3
mkdir "$folder/model"
cat > "$folder/write.py" <<'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

folder = Path(sys.argv[1])
tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "Hello": 1, "world": 2}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.save(str(folder / "tokenizer.json"))
settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
(folder / "tokenizer_config.json").write_text(json.dumps(settings))
(folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
PYTHON
cat > "$folder/read.py" <<'PYTHON'
import sys

import transformers
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("Hello world", add_special_tokens=False)["input_ids"]
table = type(tokenizer.added_tokens_decoder).__name__
print("transformers", transformers.__version__, type(tokenizer).__name__, ids, table)
assert (ids == [1, 2]) == (sys.argv[2] == "tokenizer.json"), f"the ids are not those of {sys.argv[2]}"
assert (table == "dict") == (sys.argv[2] == "tokenizer.json")
PYTHON
export HF_HUB_OFFLINE=1
python="$folder/venv/bin/python"
"$python" "$folder/write.py" "$folder/model"
HF_HUB_OFFLINE=0 "$folder/venv/bin/pip" download -q --no-deps -d "$folder" mistral-common==1.13.1
"$python" -c "
import sys, zipfile
[wheel] = __import__('pathlib').Path(sys.argv[1]).glob('mistral_common-*.whl')
data = zipfile.ZipFile(wheel).read('mistral_common/data/tekken_240911.json')
open(sys.argv[1] + '/model/tekken.json', 'wb').write(data)" "$folder"
"$python" "$folder/read.py" "$folder/model" tokenizer.json
HF_HUB_OFFLINE=0 "$folder/venv/bin/pip" install -q --no-compile mistral-common==1.13.1
"$python" "$folder/read.py" "$folder/model" tekken.json
