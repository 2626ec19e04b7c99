#!/usr/bin/env bash
# Does the key of a compiled Triton kernel follow from its source, the target and the options alone?
#
# Guess: yes. The key of a kernel that calls a function is the same in each process that has the same source: it
#   counts the constants that the function uses, whichever kernels the process met before.
# Seen: not in Triton 3.6.0. A global constant that only the called function reads is among the kernel's constants
#   if this function, or another kernel that calls it, was hashed earlier in the process; otherwise it is not, and
#   the key is another one. So a kernel that one process compiled is compiled again by a process that met its
#   kernels in another order, with a cache on disk that both share. Triton 3.9.0 gives one key in each order.
# Ours: tests/cpu/engine/test_precompile.py::test_a_kernel_has_one_key_in_any_order
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernels.py" <<'PYTHON'
import sys

import triton
import triton.language as tl

SIZE = tl.constexpr(8)


@triton.jit
def scaled(x):
    return x * SIZE


@triton.jit
def kernel(pointer):
    tl.store(pointer, scaled(tl.load(pointer)))


@triton.jit
def other_kernel(pointer):
    tl.store(pointer, scaled(tl.load(pointer)) + 1)


for name in sys.argv[1:]:
    globals()[name].cache_key
key = kernel.cache_key
print(key, *sorted(name for name, _ in kernel.used_global_vals))
PYTHON
for version in 3.6.0 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --no-deps "triton==$version"
    for before in "" scaled other_kernel; do
        # shellcheck disable=SC2086
        "$folder/$version/bin/python" "$folder/kernels.py" $before > "$folder/seen.$version.${before:-nothing}"
        echo "Triton $version, hashed before: ${before:-nothing}: $(cut -c1-12 < "$folder/seen.$version.${before:-nothing}")..."
    done
done
echo "guess: one key a version, in each order, that counts SIZE"
keys() { cut -d' ' -f1 "$folder/seen.$1".* | sort -u | wc -l; }
constants() { cut -d' ' -f2- -s "$folder/seen.$1"; }
echo "seen: 3.6.0 has $(keys 3.6.0) keys, 3.9.0 has $(keys 3.9.0)"
[ "$(keys 3.6.0)" = 2 ] && [ "$(keys 3.9.0)" = 1 ]
[ -z "$(constants 3.6.0.nothing)" ] && [ "$(constants 3.6.0.scaled)" = SIZE ]
cmp "$folder/seen.3.6.0.scaled" "$folder/seen.3.6.0.other_kernel"
