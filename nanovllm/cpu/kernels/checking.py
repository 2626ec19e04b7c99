"""With NANOVLLM_CPU_CHECK=1 every address that a kernel reads or writes must lie in a tensor that its launch
was given. For tests: several times slower, and nothing is recorded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import numpy as np
import torch

CHECKED = os.environ.get("NANOVLLM_CPU_CHECK") == "1"
CHECK_SYMBOL = "nanovllm_check_address"  # i64 (address, bytes) -> the address, or a harmless one
table_lock = threading.RLock()  # one launch at a time has its ranges in the table
_MOST = 64  # ranges of a launch
_ANYWHERE = 1 << 16  # bytes; where accesses go that are not allowed
_memory = np.zeros(2 + 2 * _MOST + _ANYWHERE // 8, np.int64)  # number of ranges, first wrong address, ranges
_CODE = """
define i64 @{symbol}(i64 %address, i64 %bytes) {{
entry:
  %end = add i64 %address, %bytes
  %number = load i64, i64* inttoptr (i64 {table} to i64*)
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %following, %other ]
  %more = icmp slt i64 %i, %number
  br i1 %more, label %look, label %wrong
look:
  %at = mul i64 %i, 16
  %place = add i64 %at, {ranges}
  %first = inttoptr i64 %place to i64*
  %low = load i64, i64* %first
  %second = getelementptr i64, i64* %first, i64 1
  %high = load i64, i64* %second
  %above = icmp uge i64 %address, %low
  %below = icmp ule i64 %end, %high
  %inside = and i1 %above, %below
  br i1 %inside, label %right, label %other
other:
  %following = add i64 %i, 1
  br label %next
right:
  ret i64 %address
wrong:
  store i64 %address, i64* inttoptr (i64 {error} to i64*)
  ret i64 {anywhere}
}}
"""


def check_code() -> str:
    """The function that looks an address up, in LLVM's language."""
    table = _memory.ctypes.data
    anywhere = table + 16 + 16 * _MOST
    return _CODE.format(
        symbol=CHECK_SYMBOL, table=table, error=table + 8, ranges=table + 16, anywhere=anywhere
    )


def allow(tensors: Iterable[object], block: tuple[int, int]) -> None:
    """Allow the next launch these tensors' memory, and its argument block (address, bytes)."""
    ranges = [(block[0], sum(block))]
    for each in tensors:
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    assert len(ranges) <= _MOST
    _memory[0], _memory[1] = len(ranges), 0
    _memory[2 : 2 + 2 * len(ranges)] = np.array(ranges, np.int64).flatten()


def complain(what: str) -> None:
    """Raise AssertionError if the launch `what` used an address outside what it was allowed."""
    wrong = int(_memory[1])
    if wrong:
        count = int(_memory[0])
        ranges = ", ".join(f"{low:#x}-{high:#x}" for low, high in _memory[2 : 2 + 2 * count].reshape(-1, 2))
        raise AssertionError(f"{what} used the address {wrong:#x}, outside of {ranges}")
