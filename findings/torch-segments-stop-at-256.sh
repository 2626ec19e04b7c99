#!/usr/bin/env bash
# torch 2.13.0 on a CPU: many rows of bfloat16 are added to one in a single call, as for the mean of a packed text's
# hidden states, or the outputs of a token's experts. Which calls add in float32?
# Guess: segment_reduce does, so 1,000 ones are 1000, and cumsum too; index_add_, scatter_add_ and index_put_ round each
#        sum to bfloat16, where 256 + 1 is 256.
# Seen:  the other way round, but for cumsum and index_put_. segment_reduce stops at 256, so the mean of 1,000 ones is
#        0.256; scatter_add_ gives 1000. index_add_ gives 1000 for rows of a matrix and 256 for the same as a vector.
# Ours:  sums are of float32,
#        tests/cpu/models/test_embedding_models.py::test_means_of_long_texts_are_summed_in_float32
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch

COUNT = 1000
rows = torch.ones(COUNT, 64, dtype=torch.bfloat16)
first = torch.zeros(COUNT, dtype=torch.long)  # each row goes to row 0
empty = torch.zeros_like(rows[:2])
lengths = torch.tensor([COUNT])
sums = {
    "segment_reduce, sum": torch.segment_reduce(rows, "sum", lengths=lengths)[0, 0],
    "segment_reduce, mean": torch.segment_reduce(rows, "mean", lengths=lengths)[0, 0],
    "index_put_, accumulate": empty.clone().index_put_((first,), rows, accumulate=True)[0, 0],
    "index_add_ of a vector": empty[:, 0].clone().index_add_(0, first, rows[:, 0])[0],
    "index_add_ of a matrix": empty.clone().index_add_(0, first, rows)[0, 0],
    "scatter_add_": empty.clone().scatter_add_(0, first[:, None].expand(-1, 64), rows)[0, 0],
    "cumsum": rows.cumsum(0)[-1, 0],
    "mean": rows.mean(0)[0],
}
GUESS = [1000, 1, 256, 256, 256, 256, 1000, 1]
SEEN = [256, 0.256, 256, 256, 1000, 1000, 1000, 1]
print("torch", torch.__version__, f"adds {COUNT} ones in bfloat16")
for (name, value), guess in zip(sums.items(), GUESS, strict=True):
    print(f"{name:<24} guess: {guess:<5} seen: {value.item():g}")
sys.exit(torch.stack(list(sums.values())).tolist() != torch.tensor(SEEN, dtype=torch.bfloat16).tolist())
PYTHON
