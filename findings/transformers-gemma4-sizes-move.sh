#!/usr/bin/env bash
# transformers 5.24.0 reads a Gemma 4 config.json with "global_head_dim" and "num_global_key_value_heads", as published,
# and saves it again. What do the config and the saved file call the heads of layers without a window?
# Guess: as the file that was read does; both are attributes of the config, and keys of the saved file.
# Seen:  neither is an attribute or a key any more. The sizes are in "per_layer_config", for each such layer, and reading
#        config.head_dim raises an error. A reader that asks for the published names finds none, and a default that it
#        has in their place gives those layers the heads of the others.
# Ours:  tests/cpu/models/test_gemma4.py::test_sizes_by_the_names_of_the_published_files reads both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from transformers import AutoConfig

folder = Path(sys.argv[1])
written = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
}
(folder / "config.json").write_text(json.dumps(written))
config = AutoConfig.from_pretrained(folder)
config.save_pretrained(folder / "again")
saved = json.loads((folder / "again" / "config.json").read_text())
names = ("global_head_dim", "num_global_key_value_heads")
seen = [(name, hasattr(config, name), name in saved) for name in names]
try:
    head_dim = str(config.head_dim)
except Exception as error:
    head_dim = type(error).__name__
print("transformers", transformers.__version__, "| attribute, key:", seen, "| head_dim:", head_dim)
print("per_layer_config:", saved.get("per_layer_config"))
assert seen == [(name, False, False) for name in names], "the behaviour has changed"
assert head_dim == "AmbiguousGlobalPerLayerAttributeError", "the behaviour has changed"
assert saved["per_layer_config"] == {"5": {"head_dim": 512, "num_key_value_heads": 2}}
PYTHON
