#!/usr/bin/env bash
# Does a kernel that reads a property of a NamedTuple, passed as tl.constexpr, compile in each version of Triton?
#
# Guess: yes. Triton 3.6.0 compiles it, so 3.9.0 does; a constant is the Python object that was passed.
# Seen: Triton 3.9.0 raises "'tuple' object has no attribute": a kernel sees a tuple with the fields' names, and none of
#   the class's properties and methods. Reading the fields compiles in both. The interpreter of 3.9.0 runs both kernels,
#   so tests on a CPU do not show it.
# Ours: tests/test_architecture.py::test_kernels_read_fields_of_their_constants
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/shape_kernels.py" <<'PYTHON'
from typing import NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Shape(NamedTuple):
    rows: int
    columns: int

    @property
    def size(self):
        return self.rows * self.columns


@triton.jit
def by_fields(out, SHAPE: tl.constexpr):
    tl.store(out, SHAPE.rows * SHAPE.columns)


@triton.jit
def by_property(out, SHAPE: tl.constexpr):
    tl.store(out, SHAPE.size)


for kernel in (by_fields, by_property):
    source = ASTSource(kernel, {"out": "*i32", "SHAPE": "constexpr"}, {"SHAPE": Shape(3, 5)})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(triton.__version__, kernel.__name__, "compiles")
    except Exception as error:
        assert "has no attribute" in str(error), error
        print(triton.__version__, kernel.__name__, "has no attribute")
PYTHON
for version in 3.6.0 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --no-deps "triton==$version"
    TRITON_CACHE_DIR="$folder/cache" "$folder/$version/bin/python" "$folder/shape_kernels.py" 2>/dev/null | tee -a "$folder/seen"
done
echo "guess: all four compile"
cmp "$folder/seen" - <<'SEEN'
3.6.0 by_fields compiles
3.6.0 by_property compiles
3.9.0 by_fields compiles
3.9.0 by_property has no attribute
SEEN
