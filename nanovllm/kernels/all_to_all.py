"""All-to-all from some columns of all rows to all columns of some rows: GPUs write to each other's memory.

Owns no memory and exchanges no addresses. The kernel does not wait: a later sum over the ranks acts as the
barrier.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import await_inputs, jit, pdl_options, tl

BLOCK = 4096  # columns of a program


@jit("buffer_ptrs_ptr", "columns", "first_column", "rows_per_rank")
def _all_to_all_kernel(
    x_ptr: tl.tensor,
    buffer_ptrs_ptr: tl.tensor,
    sent_ptr: tl.tensor,
    x_stride: int,
    buffer_stride: int,
    columns: int,
    first_column: int,
    rows_per_rank: int,
    BITS: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
) -> None:
    """One program per (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    receiver = row // rows_per_rank
    buffer_ptr = tl.load(buffer_ptrs_ptr + receiver).to(tl.pointer_type(BITS))
    await_inputs(USE_PDL)
    x = tl.load(x_ptr + row * x_stride + index, mask=index < columns, other=0.0)
    place = (row - receiver * rows_per_rank) * buffer_stride + first_column + index
    tl.store(buffer_ptr + place, x.to(BITS, bitcast=True), mask=index < columns)
    tl.debug_barrier()
    # Release at system scope: no rank sees a later kernel's writes before these.
    tl.atomic_add(sent_ptr + row, 1, sem="release", scope="sys")


def all_to_all_triton(
    x: torch.Tensor,
    buffer_ptrs: torch.Tensor,
    sent: torch.Tensor,
    width: int,
    first_column: int,
    rows_per_rank: int,
) -> None:
    """Write x [S, n] to the ranks' buffers; row s goes to row s % rows_per_rank of rank s // rows_per_rank.

    buffer_ptrs: [ranks] int64, the addresses of the receive buffers [at least rows_per_rank, width] of x's
    dtype. x's first column goes to column `first_column`. sent: [at least S] int32 scratch memory.
    """
    rows, columns = x.shape
    if not (rows and columns):
        return
    assert x.stride(1) == 1 and first_column + columns <= width and rows <= len(sent)
    assert rows <= rows_per_rank * len(buffer_ptrs)
    _all_to_all_kernel[(rows, -(-columns // BLOCK))](
        x,
        buffer_ptrs,
        sent,
        x.stride(0),
        width,
        columns,
        first_column,
        rows_per_rank,
        BITS=tl.int16 if x.element_size() == 2 else tl.int32,
        num_warps=4,
        **pdl_options(x),
    )
