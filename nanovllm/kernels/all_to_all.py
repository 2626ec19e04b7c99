"""Columns of all rows at each rank become all columns of some rows: every GPU writes into the others' memory.

Owns no memory and exchanges no address. Nobody waits here: a sum over the ranks that comes after this kernel
tells that all of it has arrived.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import await_inputs, early, jit, tl, triton

BLOCK = 4096  # columns of a program


@jit("rooms_ptr", "columns", "first_column", "rows_per_rank")
def _all_to_all_kernel(
    x_ptr: tl.tensor,
    rooms_ptr: tl.tensor,
    sent_ptr: tl.tensor,
    x_stride: int,
    room_stride: int,
    columns: int,
    first_column: int,
    rows_per_rank: int,
    BITS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
) -> None:
    """One program per (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    receiver = row // rows_per_rank
    room = tl.load(rooms_ptr + receiver).to(tl.pointer_type(BITS))
    await_inputs(EARLY)
    x = tl.load(x_ptr + row * x_stride + index, mask=index < columns, other=0.0)
    place = (row - receiver * rows_per_rank) * room_stride + first_column + index
    tl.store(room + place, x.to(BITS, bitcast=True), mask=index < columns)
    tl.debug_barrier()
    # Released to the whole system: no rank sees a later kernel's writes before these.
    tl.atomic_add(sent_ptr + row, 1, sem="release", scope="sys")


def all_to_all_triton(
    x: torch.Tensor,
    rooms: torch.Tensor,
    sent: torch.Tensor,
    width: int,
    first_column: int,
    rows_per_rank: int,
) -> None:
    """Write x [S, n] to the ranks' rooms; row s goes to row s % rows_per_rank of rank s // rows_per_rank.

    rooms: [ranks] int64, the address of each rank's room [at least rows_per_rank, width] of x's dtype, in
    which x's first column is `first_column`. sent: [at least S] int32, any numbers, which are changed.
    """
    rows, columns = x.shape
    if not (rows and columns):
        return
    assert x.stride(1) == 1 and first_column + columns <= width and rows <= len(sent)
    assert rows <= rows_per_rank * len(rooms)
    _all_to_all_kernel[(rows, triton.cdiv(columns, BLOCK))](
        x,
        rooms,
        sent,
        x.stride(0),
        width,
        columns,
        first_column,
        rows_per_rank,
        BITS=tl.int16 if x.element_size() == 2 else tl.int32,
        num_warps=4,
        **early(x),
    )
