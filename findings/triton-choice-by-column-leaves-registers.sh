#!/usr/bin/env bash
# A weight is dequantised in registers for tl.dot on tensor cores, and columns 0 to 31 of a tile have another scale than
# 32 to 63: does a kernel that chooses the scale with tl.where on tl.arange keep the tile in registers?
# Guess: yes. A choice by column needs no data of another thread, so the layout of the product reaches the loads.
# Seen: Triton 3.6.0, for compute capability 9.0, leaves a change of layout of the whole tile in the loop: it is written
# to shared memory and read back. If both scales are joined beside the two halves of the columns, it does not.
# Ours: words of NVFP4 are halves whose columns share a scale, and both scales are joined beside them,
# tests/cpu/models/test_nvfp4.py::test_products_of_4_bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps triton==3.6.0
cat > "$folder/layouts.py" <<'PYTHON'
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def chosen(words, scales, x, out, blocks):
    """The scale of a column is chosen by its number."""
    i, j, n = tl.arange(0, 64), tl.arange(0, 64), tl.arange(0, 16)
    total = tl.zeros((64, 16), tl.float32)
    for block in range(blocks):
        word = tl.load(words + block * 4096 + i[:, None] * 64 + j[None, :])
        first, second = tl.load(scales + block * 128 + i), tl.load(scales + block * 128 + 64 + i)
        scale = tl.where((j < 32)[None, :], first[:, None], second[:, None])
        rows = tl.load(x + block * 1024 + n[None, :] * 64 + j[:, None])
        total = tl.dot(word.to(tl.bfloat16) * scale, rows, total)
    tl.store(out + i[:, None] * 16 + n[None, :], total)


@triton.jit
def joined(words, scales, x, out, blocks):
    """The same, with both scales joined beside the halves of the columns."""
    i, j, n = tl.arange(0, 64), tl.arange(0, 64), tl.arange(0, 16)
    total = tl.zeros((64, 16), tl.float32)
    for block in range(blocks):
        word = tl.load(words + block * 4096 + i[:, None] * 64 + j[None, :])
        first, second = tl.load(scales + block * 128 + i), tl.load(scales + block * 128 + 64 + i)
        halves = word.to(tl.bfloat16).reshape(64, 2, 32) * tl.join(first, second)[:, :, None]
        rows = tl.load(x + block * 1024 + n[None, :] * 64 + j[:, None])
        total = tl.dot(halves.reshape(64, 64), rows, total)
    tl.store(out + i[:, None] * 16 + n[None, :], total)


def shared(kernel):
    """How often in the loop a whole tile [64, 64] changes its layout, which goes through shared memory."""
    types = {"words": "*i8", "scales": "*bf16", "x": "*bf16", "out": "*fp32", "blocks": "i32"}
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(fn=kernel, signature=types, constexprs={}, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
    loop = made.asm["ttgir"].split("scf.for", 1)[1]
    assert "warp_group_dot" in loop
    return len(re.findall(r"ttg\.convert_layout %\w+ : tensor<64x64xbf16", loop))


print(f"triton {triton.__version__}")
print("guess: 0 changes of layout in the loop, however the scale is chosen")
found = shared(chosen), shared(joined)
print(f"seen: {found[0]} where the scale is chosen by the column's number, {found[1]} where both are joined")
sys.exit(found != (1, 0))
PYTHON
TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/layouts.py"
