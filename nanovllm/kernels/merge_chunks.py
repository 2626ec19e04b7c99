"""The second half of decode attention: merges a sequence's partial results of chunks into one.

Weights them by their softmax sums. Knows nothing of keys, values and blocks.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import await_inputs, jit, next_power_of_2, pdl_options, tl
from nanovllm.kernels.paged import window_start

_MERGE_TILE = 8  # chunks merged at a time, by one warp: measured on an H200 (log)


@jit("contexts_ptr", "chunks")
def _decode_merge_kernel(
    partial_ptr: tl.tensor,
    log_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    chunks: int,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    USE_PDL: tl.constexpr,
    MERGE_TILE: tl.constexpr = _MERGE_TILE,
    WINDOW: tl.constexpr = 0,
    BLOCK_N: tl.constexpr = 0,
) -> None:
    """One program per (sequence, HEADS query heads): merges its chunks, if there are several."""
    sequence = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    length = tl.load(contexts_ptr + sequence)
    if WINDOW:
        length -= window_start(length, WINDOW, BLOCK_N)
    live = tl.cdiv(length, CHUNK)
    await_inputs(USE_PDL)
    if live <= 1:
        return
    rows = sequence * Q_HEADS + heads
    exists = heads < Q_HEADS  # padding heads get finite values
    dims = tl.arange(0, DIM)
    acc = tl.zeros((HEADS, DIM), tl.float32)
    total = tl.where(exists, 0.0, 1.0)
    top = tl.where(exists, float("-inf"), 0.0)
    for first in range(0, live, MERGE_TILE):
        members = first + tl.arange(0, MERGE_TILE)
        parts = rows[:, None] * chunks + members[None, :]  # [HEADS, MERGE_TILE]
        present = exists[:, None] & (members < live)[None, :]
        logs = tl.load(log_ptr + parts, mask=present, other=float("-inf"))
        places = parts[:, :, None] * HEAD_DIM + dims[None, None, :]
        mask = present[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        partial = tl.load(partial_ptr + places, mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(logs, axis=1))
        weights = tl.exp2(logs - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * partial, axis=1)
        top = new_top
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + rows[:, None] * HEAD_DIM + dims[None, :], out, mask=mask)


def merge_chunks(
    partial: torch.Tensor,
    logs: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    chunk: int,
    heads: int,
    begin: tuple[int, int] | None = None,
) -> None:
    """Write the merged attention of rows with more than one chunk to out [S, q_heads, head_dim].

    partial: [S, q_heads, chunks, head_dim] float32, each chunk's own attention over `chunk` positions. logs:
    [S, q_heads, chunks] float32, log2 of its softmax sum. context_lens: [S] int32; chunks past a context are
    not read. All contiguous. heads: query heads of a program; it may change the last bits. begin: a window
    and the positions of a tile, if the first chunk begins at the window's first tile. Other rows of `out` do
    not change. The merge is that of flash-decoding (Dao et al., 2023).
    """
    sequences, q_heads, chunks, head_dim = partial.shape
    _decode_merge_kernel[(sequences, -(-q_heads // heads))](
        partial,
        logs,
        context_lens,
        out,
        chunks,
        Q_HEADS=q_heads,
        HEAD_DIM=head_dim,
        DIM=next_power_of_2(head_dim),
        CHUNK=chunk,
        HEADS=heads,
        num_warps=1,
        **({} if begin is None else {"WINDOW": begin[0], "BLOCK_N": begin[1]}),
        **pdl_options(out),
    )
