#!/usr/bin/env bash
# transformers: what naming AutoTokenizer imports.
#
# Guess: AutoTokenizer chooses a class of tokenizers by its name, so it imports about what PreTrainedTokenizerFast
#   does; nothing that trains or shards models.
# Seen: 5.17 imports the code of generation and of sharded training with it, torch.distributed.fsdp and
#   torch.distributed.tensor among them, several hundred modules more. PreTrainedTokenizerFast imports none of these.
#   An engine's start pays for it: where Python may not write bytecode it took seven of twelve seconds. 5.24 imports
#   them no more.
# Ours: tests/cpu/jobs/test_tune_trials.py::test_the_process_that_trials_are_forked_from_uses_no_gpu
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo "guess: AutoTokenizer imports about what PreTrainedTokenizerFast does, and nothing that trains"
for version in 5.17.0 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet torch==2.13.0 "transformers==$version"
    for name in PreTrainedTokenizerFast AutoTokenizer; do
        HF_HUB_OFFLINE=1 "$folder/$version/bin/python" - "$name" "$version" <<'PYTHON'
import sys

import torch  # what it imports by itself does not count
import transformers

before = set(sys.modules)
getattr(transformers, sys.argv[1])
new = set(sys.modules) - before
heavy = [name for name in ("torch.distributed.fsdp", "torch.distributed.tensor") if name in new]
print(f"transformers {transformers.__version__}, {sys.argv[1]}: {len(new)} modules, {heavy or 'none that train'}")
assert bool(heavy) == (sys.argv[1] == "AutoTokenizer" and sys.argv[2] == "5.17.0")
PYTHON
    done
done
