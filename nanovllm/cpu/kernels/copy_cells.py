"""Copies of cached keys and values on a CPU.

A program is one copy of keys or values; where the heads of a block come first in memory, of one head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.cpu.kernels.launch import Address, Kernel
from nanovllm.kernels.copy_cells import copy_cells_reference


def _make() -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    load, store, load_part, store_part = v.load_f32, v.store_f32, v.load_f32_part, v.store_f32_part
    get_i32 = v.get_i32

    def copy_cells(
        k: Address,
        values: Address,
        copies: Address,
        parts: int,
        block_bytes: int,
        part_bytes: int,
        cell_bytes: int,
        program: int,
        thread: int,
    ) -> None:
        copy, rest = copies + program // (2 * parts) * 16, program % (2 * parts)
        cache = k if rest % 2 == 0 else values
        start = rest // 2 * part_bytes + get_i32(copy + 8) * cell_bytes
        source = cache + get_i32(copy) * block_bytes + start
        target = cache + get_i32(copy + 4) * block_bytes + start
        size = get_i32(copy + 12) * cell_bytes
        for i in range(size // 64):
            store(target + 64 * i, load(source + 64 * i))
        rest = size % 64 // 4
        if rest:
            done = size // 64 * 64
            store_part(target + done, load_part(source + done, rest), rest)

    return copy_cells


_KERNEL = Kernel(_make)


def copy_cells(k: torch.Tensor, v: torch.Tensor, copies: torch.Tensor, longest: int) -> None:
    """`copy_cells` of kernels/copy_cells.py. Rows of an odd number of 2-byte elements are the reference's."""
    _, page, heads, head_dim = k.shape
    heads_first = k.stride(2) == page * head_dim and heads > 1
    parts, width = (heads, head_dim) if heads_first else (1, heads * head_dim)
    size = k.itemsize
    if width * size % 4:
        copy_cells_reference(k, v, copies, longest)
        return
    assert k.stride() == v.stride() and k.stride(3) == 1 and k.stride(1) == width and copies.is_contiguous()
    assert copies.dtype == torch.int32
    block, head, cell = k.stride(0) * size, page * width * size, width * size
    _KERNEL.launch((), len(copies) * 2 * parts, k, v, copies, parts, block, head, cell)
