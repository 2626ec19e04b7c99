"""Copies of cached keys and values from block to block, where a prompt parts from another within a block.

Cells are copied as they are, also those of an FP8 cache, whose scales hold for all blocks.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import await_inputs, by_device, jit, pdl_options, tl

_TILE = 4096  # elements of a program, of keys and of values
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element


@jit("copies_ptr")
def _copy_cells_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    copies_ptr: tl.tensor,
    PAGE: tl.constexpr,
    CELL: tl.constexpr,
    USE_PDL: tl.constexpr,
    TILE: tl.constexpr = _TILE,
) -> None:
    """A program copies TILE elements of one copy: cells of a block are contiguous."""
    row = copies_ptr + 4 * tl.program_id(0)
    source = tl.load(row).to(tl.int64)
    target = tl.load(row + 1).to(tl.int64)
    first = tl.load(row + 2)
    size = tl.load(row + 3) * CELL
    start = tl.program_id(1) * TILE
    await_inputs(USE_PDL)
    if start < size:
        offsets = start + tl.arange(0, TILE)
        mask = offsets < size
        read = (source * PAGE + first) * CELL + offsets
        written = (target * PAGE + first) * CELL + offsets
        k = tl.load(k_ptr + read, mask=mask)
        v = tl.load(v_ptr + read, mask=mask)
        tl.store(k_ptr + written, k, mask=mask)
        tl.store(v_ptr + written, v, mask=mask)


def copy_cells_triton(k: torch.Tensor, v: torch.Tensor, copies: torch.Tensor, longest: int) -> None:
    """Copy cells of k and v, both [num_blocks, block_size, KV heads, head_dim], within each of them.

    copies [C, 4] int32, contiguous: source block, target block, first cell, number of cells, at most
    `longest`. No cell is both source and target, so the order does not matter. k and v are contiguous; on a
    CPU the heads of a block may come first.
    """
    assert k.is_contiguous() and v.is_contiguous() and copies.is_contiguous()
    words = _WORDS[k.itemsize]
    page, cell = k.shape[1], k.shape[2] * k.shape[3]
    _copy_cells_kernel[(len(copies), -(-longest * cell // _TILE))](
        k.view(words), v.view(words), copies, PAGE=page, CELL=cell, **pdl_options(k)
    )


def copy_cells_reference(k: torch.Tensor, v: torch.Tensor, copies: torch.Tensor, longest: int) -> None:
    """`copy_cells` in plain torch."""
    cells = torch.arange(longest, device=copies.device)
    copy, cells = (cells < copies[:, 3:]).nonzero(as_tuple=True)
    source, target, first, _ = copies[copy].long().unbind(1)
    for part in (k, v):
        words = part.view(_WORDS[part.itemsize])  # torch cannot index 8-bit floats
        words[target, first + cells] = words[source, first + cells]


copy_cells = by_device(copy_cells_triton, copy_cells_reference, "copy_cells.copy_cells")
