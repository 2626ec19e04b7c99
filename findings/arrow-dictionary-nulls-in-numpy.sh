#!/usr/bin/env bash
# pyarrow 26.0.1: a null of a dictionary-encoded column becomes a value when the column becomes a NumPy array.
#
# Guess: `ChunkedArray.to_numpy()` of ["red", null, "green"], dictionary-encoded, has None in the second place, as
#        `Array.to_numpy(zero_copy_only=False)` and the plain string column have.
# Seen:  the second place holds "green", the last value of the dictionary. Of dictionary-encoded integers the result is
#        an integer array without any null. `Array.to_numpy`, `to_pylist` and a cast to the value type are right.
#
# Ours: a dictionary is cast to its values before ids are read; columns stay Arrow's.
#       tests/plan/test_ray_batches.py::test_an_id_has_the_same_text_beside_any_others[dictionary]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import pyarrow as pa

print("pyarrow", pa.__version__)
print("guess: ['red', None, 'green'] from both kinds of array")
colours = pa.array(["red", None, "green"]).dictionary_encode()
numbers = pa.array([10, None, 20]).dictionary_encode()
one = colours.to_numpy(zero_copy_only=False).tolist()
chunked = pa.chunked_array([colours]).to_numpy().tolist()
plain = pa.chunked_array([colours]).cast(pa.string()).to_numpy().tolist()
integers = pa.chunked_array([numbers]).to_numpy()
print("seen: Array", one, "ChunkedArray", chunked, "cast", plain, "integers", integers.tolist(), integers.dtype)
right = ["red", None, "green"]
same = one == right and plain == right and pa.chunked_array([colours]).to_pylist() == right
wrong = chunked == ["red", "green", "green"] and integers.tolist() == [10, 20, 20]
sys.exit(0 if same and wrong else "the behaviour has changed")
PYTHON
