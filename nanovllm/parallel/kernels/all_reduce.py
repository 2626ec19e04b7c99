"""All-reduce of rows over GPUs that write to each other's memory, alone or fused with residual add and
RMSNorm, in one shot or two. Owns no memory and exchanges no addresses; `Peers` has the layout.

The all-to-all sends columns and does not wait: a later sum over the ranks acts as the barrier.
"""

# A program sums one row. One shot: it writes its rank's row to a slot at every other rank, waits until the
# other rows are in its own slots, and adds in rank order, so that all ranks get the same bits. Two shots: the
# ranks write the row only to slots of its owner (row modulo ranks). The owner adds the parts and writes the
# sum to every rank. With more than two ranks this moves less data, but waits twice.
#
# There are no flags and no fences. Rooms (receive buffers) are filled with EMPTY, which no sender writes, and
# a receiver reads until no EMPTY is left. The calls of a row use three sets of buffers in turn. Each call
# empties the buffers of the previous call. They are filled again two calls later, by ranks that have finished
# the call in between; for that they needed the row that this rank sent after it had emptied the buffers.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.compat import await_inputs, jit, next_power_of_2, pdl_options, row_warps, tl
from nanovllm.kernels.rms_norm import add_rms_norm_reference, normalised

TURNS = 3
EMPTY = -(2**15)  # every two bytes of a buffer: -0.0 in 16-bit types, next to -0.0 in float32
EMPTY_BY_SIZE = {2: EMPTY, 4: -(2**31) + 2**15}  # the same pattern by element size in bytes


def _bits(x: torch.Tensor) -> Any:
    """The integers that carry x's elements. ValueError for elements of another size."""
    if x.element_size() not in EMPTY_BY_SIZE:
        raise ValueError(f"{x.dtype} cannot be sent: elements have 2 or 4 bytes")
    return tl.int16 if x.element_size() == 2 else tl.int32


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """The memory layout that rank `rank` of `size` ranks uses; `size` is a power of 2.

    All buffers start filled with EMPTY.
    """

    rank: int
    size: int
    slots: torch.Tensor  # [size] int64: the ranks' buffers [TURNS, size - 1, max_rows, row_bytes]
    sums: torch.Tensor | None  # [size] int64: the same for sums [TURNS, max_rows, row_bytes]; for two shots
    turns: torch.Tensor  # [max_rows] int32, local: the current turn of each row, initially 0
    aborted: torch.Tensor  # [1] int32, local: if not 0, waiting programs continue with invalid data
    row_bytes: int  # a multiple of 16


@jit()
def _row_ptr(
    buffers: tl.tensor,
    index: tl.tensor,
    row: tl.tensor,
    max_rows: tl.tensor,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """A pointer to row `row`, of ROW elements, in buffer `index` at address `buffers`."""
    return tl.multiple_of(buffers.to(tl.pointer_type(BITS)), 16) + (index * max_rows + row) * ROW


@jit()
def _slot(sender: tl.tensor, receiver: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The index of the sender's slot at the receiver, which has no slot for itself."""
    return (sender - receiver - 1 + SIZE) % SIZE


@jit()
def _sendable(x: tl.tensor, BITS: tl.constexpr, EMPTY: tl.constexpr) -> tl.tensor:
    """The bits of x, with EMPTY (-0.0 or next to it) replaced by 0."""
    bits = x.to(BITS, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits).to(BITS)


@jit()
def _receive(ptrs: tl.tensor, mask: tl.tensor, aborted_ptr: tl.tensor, EMPTY: tl.constexpr) -> tl.tensor:
    """Wait until no element at `ptrs` is EMPTY; return the elements."""
    bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
    waits = tl.load(aborted_ptr, volatile=True) == 0  # part of the maximum, so all warps continue together
    while tl.max(((bits == EMPTY) & waits).to(tl.int32)) > 0:
        bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
        waits = tl.load(aborted_ptr, volatile=True) == 0
    return bits


@jit()
def _sum(
    x: tl.tensor,
    slots: tl.tensor,
    slot_size: tl.tensor,
    mask: tl.tensor,
    columns: tl.tensor,
    aborted_ptr: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    EMPTY: tl.constexpr,
) -> tl.tensor:
    """Wait for the other ranks' rows in `slots`; return the bits of their sum with x."""
    # With several ranks, wait for all rows together and then read them again: one by one takes longer.
    # Not with `_receive`: Triton 3.6 fails to compile it if its result is unused.
    if SIZE > 2:
        ranks = tl.arange(0, SIZE)[:, None]
        ptrs = slots + _slot(ranks, RANK, SIZE) * slot_size + columns[None, :]
        others = (ranks != RANK) & mask[None, :]
        missing = 1
        while missing > 0:
            bits = tl.load(ptrs, mask=others, other=0, volatile=True)
            waits = tl.load(aborted_ptr, volatile=True) == 0
            missing = tl.max(((bits == EMPTY) & waits).to(tl.int32))
    total = tl.zeros(x.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        part = x
        if rank != RANK:
            ptr = slots + _slot(rank, RANK, SIZE) * slot_size + columns
            if SIZE > 2:
                bits = tl.load(ptr, mask=mask, other=0, volatile=True)
            else:
                bits = _receive(ptr, mask, aborted_ptr, EMPTY)
            part = bits.to(x.dtype, bitcast=True)
        total += part.to(tl.float32)
    return _sendable(total.to(x.dtype), BITS, EMPTY)


@jit("slots_ptr", "sums_ptr", "max_rows")
def _all_reduce_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    turns_ptr: tl.tensor,
    aborted_ptr: tl.tensor,
    max_rows: tl.tensor,
    eps: float,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    ROW: tl.constexpr,
    ROW_PADDED: tl.constexpr,
    BITS: tl.constexpr,
    EMPTY: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    USE_PDL: tl.constexpr,
    TURNS: tl.constexpr = TURNS,
) -> None:
    """One program per row. ROW: elements in a row of a buffer, at least N."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N_PADDED)
    mask = columns < N
    cells = row * N + columns
    own_slots = tl.load(slots_ptr + RANK)
    if sums_ptr is not None:
        own_sums = tl.load(sums_ptr + RANK)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    await_inputs(USE_PDL)
    bits = _sendable(tl.load(x_ptr + cells, mask=mask, other=0.0), BITS, EMPTY)
    x = bits.to(dtype, bitcast=True)
    turn = tl.load(turns_ptr + row)
    owner = (row % SIZE).to(tl.int32)
    if TWO_SHOT:
        slot = turn * (SIZE - 1) + _slot(RANK, owner, SIZE)
        if owner != RANK:
            ptr = _row_ptr(tl.load(slots_ptr + owner), slot, row, max_rows, ROW, BITS)
            tl.store(ptr + columns, bits, mask=mask)
    else:
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                slot = turn * (SIZE - 1) + _slot(RANK, rank, SIZE)
                ptr = _row_ptr(tl.load(slots_ptr + rank), slot, row, max_rows, ROW, BITS)
                tl.store(ptr + columns, bits, mask=mask)

    # Empty the previous call's buffers while the rows are in transit.
    last = (turn + TURNS - 1) % TURNS
    slot_size = max_rows.to(tl.int64) * ROW
    words = tl.arange(0, ROW_PADDED)
    nothing = tl.full((ROW_PADDED,), EMPTY, BITS)
    for index in tl.static_range(SIZE - 1):
        ptr = _row_ptr(own_slots, last * (SIZE - 1) + index, row, max_rows, ROW, BITS)
        tl.store(ptr + words, nothing, mask=words < ROW)
    if sums_ptr is not None:
        ptr = _row_ptr(own_sums, last, row, max_rows, ROW, BITS)
        tl.store(ptr + words, nothing, mask=words < ROW)
    if weight_ptr is not None:
        residual = tl.load(residual_ptr + cells, mask=mask, other=0.0)

    if TWO_SHOT:
        if owner == RANK:
            slots = _row_ptr(own_slots, turn * (SIZE - 1), row, max_rows, ROW, BITS)
            bits = _sum(x, slots, slot_size, mask, columns, aborted_ptr, RANK, SIZE, BITS, EMPTY)
            for rank in tl.static_range(SIZE):
                if rank != RANK:
                    ptr = _row_ptr(tl.load(sums_ptr + rank), turn, row, max_rows, ROW, BITS)
                    tl.store(ptr + columns, bits, mask=mask)
        else:
            ptr = _row_ptr(own_sums, turn, row, max_rows, ROW, BITS)
            bits = _receive(ptr + columns, mask, aborted_ptr, EMPTY)
    else:
        slots = _row_ptr(own_slots, turn * (SIZE - 1), row, max_rows, ROW, BITS)
        bits = _sum(x, slots, slot_size, mask, columns, aborted_ptr, RANK, SIZE, BITS, EMPTY)
    tl.store(turns_ptr + row, (turn + 1) % TURNS)  # all warps have read it, because they synchronised above
    out = bits.to(dtype, bitcast=True)
    if weight_ptr is not None:  # rounded after each step, as on one rank
        rounded = (out.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + cells, rounded, mask=mask)
        out = normalised(rounded.to(tl.float32), weight.to(tl.float32), eps, N, dtype)
    tl.store(out_ptr + cells, out, mask=mask)


def _launch(
    peers: Peers,
    x: torch.Tensor,
    two_shot: bool,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, n = x.shape
    out = torch.empty_like(x)
    if rows == 0:
        return out
    itemsize = x.element_size()
    assert x.is_contiguous() and (residual is None or residual.is_contiguous()) and rows <= len(peers.turns)
    assert n * itemsize <= peers.row_bytes and (peers.sums is not None or not two_shot)
    padded, row = next_power_of_2(n), peers.row_bytes // itemsize
    _all_reduce_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        peers.slots,
        peers.sums,
        peers.turns,
        peers.aborted,
        len(peers.turns),
        eps,
        RANK=peers.rank,
        SIZE=peers.size,
        N=n,
        N_PADDED=padded,
        ROW=row,
        ROW_PADDED=next_power_of_2(row),
        BITS=_bits(x),
        EMPTY=EMPTY_BY_SIZE[itemsize],
        TWO_SHOT=two_shot,
        num_warps=row_warps(padded),  # not more: one thread waits for each element
        maxnreg=64,  # so that two programs of 16 warps fit on a multiprocessor, and 256 rows run at once
        **pdl_options(x),
    )
    return out


def all_reduce_triton(peers: Peers, x: torch.Tensor, two_shot: bool = False) -> torch.Tensor:
    """Return the sum of `x` [T, N] over the ranks, rounded once, in a new tensor; every rank calls this.

    x: contiguous, 16 or 32 bits per element, rows of at most `row_bytes`; T is at most `max_rows`, the same
    on all ranks. One and two shots are as in TensorRT-LLM and vLLM's custom_all_reduce. Waiting for the data
    itself is as in TensorRT-LLM's "Lamport" kernels.
    """
    return _launch(peers, x, two_shot)


def all_reduce_add_rms_norm_triton(
    peers: Peers,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    two_shot: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `all_reduce_triton`, then `add_rms_norm` of the sum; both results are new tensors.

    residual: [T, N] contiguous, the same on all ranks; weight: [N]; all of one dtype.
    """
    total = torch.empty_like(x)
    return _launch(peers, x, two_shot, residual, weight, eps, total), total


def all_reduce_reference(xs: list[torch.Tensor]) -> torch.Tensor:
    """`all_reduce_triton` in plain torch; xs[r] is the input of rank r."""
    total = torch.zeros_like(xs[0], dtype=torch.float32)
    for x in xs:
        total += x.float()
    return total.to(xs[0].dtype)


def all_reduce_add_rms_norm_reference(
    xs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`all_reduce_add_rms_norm_triton` in plain torch; xs[r] is the input of rank r."""
    return add_rms_norm_reference(all_reduce_reference(xs), residual, weight, eps)


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
        BITS=_bits(x),
        num_warps=4,
        **pdl_options(x),
    )
