#!/usr/bin/env bash
# transformers: rope_scaling that is added to a saved config.json.
#
# Guess: model cards say how to extend a context: add "rope_scaling" to config.json. In a file that transformers 5
#   saved, rope_theta stands within rope_parameters; the two dictionaries are merged, so theta stays 1,000,000. And
#   from_pretrained(..., rope_theta=500.0) sets theta.
# Seen: rope_scaling replaces rope_parameters whole, and theta becomes the class's default, 10,000, without a word.
#   The keyword rope_theta changes nothing.
# Ours: tests/cpu/models/test_spellings.py::test_rope_settings_by_every_spelling
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from transformers import AutoConfig, Qwen3Config

folder = Path(sys.argv[1])
Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}).save_pretrained(folder)
file = folder / "config.json"
saved = json.loads(file.read_text())
overridden = AutoConfig.from_pretrained(folder, rope_theta=500.0).rope_parameters["rope_theta"]
yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
file.write_text(json.dumps({**saved, "rope_scaling": yarn}))
extended = AutoConfig.from_pretrained(folder).rope_parameters
print("transformers", transformers.__version__)
print("saved:                ", saved["rope_parameters"])
print("with rope_scaling:    ", extended)
print("with rope_theta=500.0:", overridden)
assert saved["rope_parameters"]["rope_theta"] == 1000000.0 and "rope_theta" not in saved
assert extended["rope_type"] == "yarn" and extended["rope_theta"] == 10000.0, "theta is kept"
assert overridden == 1000000.0, "the keyword has an effect"
PYTHON
