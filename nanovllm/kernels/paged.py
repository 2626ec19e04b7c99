"""The attention step that decode and prefill share: a tile of queries meets a tile of paged keys and values.

Called from inside other kernels only; owns no launch and no memory.
"""

from __future__ import annotations

from nanovllm.kernels.compat import jit, tl


@jit()
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor, INTERPRET: tl.constexpr) -> tl.tensor:
    """total + a @ b in float32."""
    if INTERPRET:  # the interpreter would multiply bfloat16 as the integers that hold its bits
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@jit()
def attend_tile(
    acc: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    q: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start: tl.tensor,
    context: tl.tensor,
    last: tl.tensor,
    scale_log2: tl.tensor,
    MASKED: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
) -> tl.tensor:
    """Fold positions start .. start + BLOCK_N into the running softmax of q [M, DIM].

    Its state is acc [M, DIM], the sum of weights `total` [M] and the top score [M]; the new ones return.
    Row m sees positions up to last[m]; nothing at or past `context` is read. Without MASKED the caller
    vouches that every row sees every position. Each position is found through its own page, so the tile
    need not match the page size. The softmax is kept in base 2; `scale_log2` holds the factor log2(e).
    Online softmax: Milakov and Gimelshein, 2018.
    """
    positions = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, DIM)
    if MASKED:
        stored = positions < context
        pages = tl.load(table_ptr + positions // PAGE, mask=stored, other=0)
        readable = stored[:, None] & (dims < HEAD_DIM)[None, :]
    else:
        pages = tl.load(table_ptr + positions // PAGE)
        readable = (dims < HEAD_DIM)[None, :]
    slots = pages.to(tl.int64) * PAGE + positions % PAGE
    cells = slots[:, None] * TOKEN_STRIDE + dims[None, :]
    k = tl.load(k_ptr + cells, mask=readable, other=0.0)
    scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32), INTERPRET) * scale_log2
    # Masking leaves the exponent's arithmetic alone, so that a row has the same bits in either kind of tile:
    # `scores - new_top` is contracted with the product above, and a mask in between would prevent that.
    if MASKED:
        seen = positions[None, :] <= last[:, None]
        new_top = tl.maximum(top, tl.max(tl.where(seen, scores, float("-inf")), axis=1))
        weights = tl.where(seen, tl.exp2(scores - new_top[:, None]), 0.0)
    else:
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, axis=1)
    v = tl.load(v_ptr + cells, mask=readable, other=0.0)
    acc = dot(weights.to(v.dtype), v, acc * decay[:, None], INTERPRET)
    return acc, total, new_top
