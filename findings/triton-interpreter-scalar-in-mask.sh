#!/usr/bin/env bash
# May a mask of tl.load join a vector with a condition on one number, such as `(i < 8) & (n > 0)`, in the interpreter?
# Guess: yes, as in a compiled kernel: the condition is spread over the vector, and stays a bool.
# Seen: Triton 3.9.0 spreads it as int32, and the load is a ValueError, "mask has unsupported dtype". 3.6.0 took it.
# Ours: kernels compare the vector with a bound that the condition chooses, `i < tl.where(n > 0, 8, 0)`; the states of
# sequences that have none are masked so, tests/cpu/kernels/test_states.py::test_prefill_of_packed_sequences.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --no-deps --force-reinstall triton==3.9.0
cat > "$folder/masks.py" <<'PYTHON'
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, out, n):
    i = tl.arange(0, 16)
    value = tl.load(x + i, mask=(i < 8) & (tl.load(n) > 0), other=0.0)
    tl.store(out + i, value, mask=i < 8)


@triton.jit
def bounded(x, out, n):
    i = tl.arange(0, 16)
    value = tl.load(x + i, mask=i < tl.where(tl.load(n) > 0, 8, 0), other=0.0)
    tl.store(out + i, value, mask=i < 8)


def seen(function):
    out = torch.zeros(16)
    try:
        function[(1,)](torch.ones(16), out, torch.ones(1, dtype=torch.int32))
    except Exception as error:
        return str(error)
    return f"a sum of {out.sum().item():.0f}"


print(f"triton {triton.__version__}")
print("guess: a sum of 8")
found = seen(kernel)
print(f"seen: {found}; with a bound in place of the condition: {seen(bounded)}")
sys.exit("mask has unsupported dtype" not in found or seen(bounded) != "a sum of 8")
PYTHON
"$folder/venv/bin/python" "$folder/masks.py"
