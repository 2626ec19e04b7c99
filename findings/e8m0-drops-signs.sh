#!/usr/bin/env bash
# What does torch make of a negative number in float8_e8m0fnu, the dtype of scales in MX formats, which has no sign?
# Guess: NaN (byte 255), which the format has, so that a reader notices the wrong scale.
# Seen: the sign is dropped: -2.0 becomes byte 128, 2.0. Infinity does become NaN; 0.0 becomes 2**-127.
# Ours: scales of all dtypes must be above 0 before they are used, tests/cpu/models/test_fp8_files.py::
# test_scales_that_are_refused_before_memory_is_taken; bytes are read as exponents, and 255 is refused,
# tests/cpu/models/test_other_writers.py::test_scales_that_are_powers_of_two.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import math
import sys

import torch

numbers = [-2.0, -3.0, math.inf, 0.0]
bytes_ = torch.tensor(numbers).to(torch.float8_e8m0fnu).view(torch.uint8).tolist()
print(f"torch {torch.__version__.partition('+')[0]}")
print("guess: -2.0 and -3.0 become byte 255, NaN")
for number, byte in zip(numbers, bytes_):
    print(f"seen: {number} becomes byte {byte}, {'NaN' if byte == 255 else f'2 ** {byte - 127}'}")
sys.exit(bytes_ != [128, 129, 255, 0])
PYTHON
