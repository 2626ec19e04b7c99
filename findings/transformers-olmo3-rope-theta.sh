#!/usr/bin/env bash
# transformers: rope_theta of OLMo 3 in the form of version 4.
#
# Guess: a config.json with rope_theta at its top gives this theta to all layers, as the one key says; those with a
#   window only have no scaling.
# Seen: the layers without a window get it. Those with a window get the class's default, 500,000: the key is taken out
#   for the first kind of layer, and is missing for the second.
# Ours: tests/cpu/models/test_spellings.py::test_ropes_of_kinds_of_layers
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from transformers import AutoConfig

Path(sys.argv[1], "config.json").write_text(json.dumps({"model_type": "olmo3", "rope_theta": 1000000.0}))
ropes = AutoConfig.from_pretrained(sys.argv[1]).rope_parameters
print("transformers", transformers.__version__)
for kind, rope in sorted(ropes.items()):
    print(f"{kind}: theta {rope['rope_theta']:,.0f}")
assert ropes["full_attention"]["rope_theta"] == 1000000.0
assert ropes["sliding_attention"]["rope_theta"] == 500000.0, "both kinds have the theta of the file"
PYTHON
