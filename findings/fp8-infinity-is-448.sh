#!/usr/bin/env bash
# torch 2.13.0 casts numbers that are too large, and infinity, to the four dtypes of FP8: does a sum that overflowed
# still show after the cast?
# Guess: as NaN in float8_e4m3fn, which has NaN and no infinity. ml_dtypes 0.5.4 does so.
# Seen:  1000 and infinity become 448, from every dtype; only NaN stays NaN. In float8_e4m3fnuz both are NaN, in
#        float8_e5m2 infinity stays. So whether a broken activation is noticed depends on the dtype of its codes.
# Ours:  a row's scale has the infinity, so its results are NaN,
#        tests/cpu/models/test_fp8_kernels.py::test_a_row_that_is_not_finite_stays_alone
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 ml-dtypes==0.5.4 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version
from math import inf, isnan, nan

import ml_dtypes
import numpy
import torch

VALUES = [1000.0, inf, -inf, nan]
SEEN = {
    "float8_e4m3fn": [448.0, 448.0, -448.0, nan],
    "float8_e4m3fnuz": [nan] * 4,
    "float8_e5m2": [1024.0, inf, -inf, nan],
    "float8_e5m2fnuz": [1024.0, nan, nan, nan],
}
MOST = {**SEEN, "float8_e4m3fn": [nan] * 4}  # of ml_dtypes


def same(found, wanted):
    return all(one == other or isnan(one) and isnan(other) for one, other in zip(found, wanted, strict=True))


print("torch", torch.__version__, "and ml_dtypes", version("ml_dtypes"), "of", VALUES)
print("guess: NaN in float8_e4m3fn by torch")
right = []
for name, wanted in SEEN.items():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # one tile for the instructions that take many, and one for what is left over
        found = torch.tensor(VALUES * 33, dtype=dtype).to(getattr(torch, name)).float()
        right += [same(each, wanted) for each in found.view(33, 4).tolist()]
    other = numpy.array(VALUES, numpy.float32).astype(getattr(ml_dtypes, name)).astype(float).tolist()
    right.append(same(other, MOST[name]))
    print(f"seen:  {name:<16} {found[:4].tolist()} by torch, {other} by ml_dtypes")
sys.exit(not all(right))
PYTHON
