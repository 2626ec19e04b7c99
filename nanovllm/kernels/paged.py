"""The attention step that decode and prefill share: a tile of queries meets a tile of paged keys and values.

Called from inside other kernels only; owns no launch and no memory.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import INTERPRET, capability, jit, tl

# An FP8 cache reaches the kernels as int16: two neighbouring elements of a head in one word. Shared memory
# hands out words in the layout that tensor cores want, but bytes one by one, at two thirds of the speed.
FP8 = torch.float8_e4m3fn


def as_words(cache: torch.Tensor) -> torch.Tensor:
    """The cache as the kernels take it: itself, or an FP8 one as int16 with half as many elements."""
    return cache.view(torch.int16) if cache.dtype == FP8 else cache


def dequantized(cells: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Cells [..., kv_heads, head_dim] of a cache in float32, times scale [kv_heads] if there is one."""
    return cells.float() if scale is None else cells.float() * scale[:, None]


def converts_fp8(device: torch.device) -> bool:
    """Whether the device has an instruction that turns FP8 into float16."""
    return not INTERPRET and capability(device) >= (8, 9)


@jit()
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor, INTERPRET: tl.constexpr) -> tl.tensor:
    """total + a @ b in float32."""
    if INTERPRET:  # the interpreter would multiply bfloat16 as the integers that hold its bits
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@jit()
def fp8_pair(words: tl.tensor, CONVERTS: tl.constexpr) -> tl.tensor:
    """The float8_e4m3fn values in the lower and in the upper bytes of int16 `words`, as float16 (exactly)."""
    if CONVERTS:  # two words in a register: tensor cores want neighbouring rows side by side there
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 lower, upper;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lower, upper}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:  # The exponent of float16 has one bit more, and a bias that is larger by 8. NaN becomes 480.
        even = ((words & 0x80) << 8) | ((words & 0x7F) << 7)
        odd = (words & -0x8000) | ((words >> 1) & 0x3F80)
        even = even.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        odd = odd.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return even.to(tl.float16), odd.to(tl.float16)


@jit()
def load_pages(
    table_ptr: tl.tensor, start: tl.tensor, end: tl.tensor, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """The pages of positions start .. start + BLOCK_N: one page if a tile cannot leave it, else [BLOCK_N].

    To be called one tile ahead, else the loads of keys and values wait for it and cannot run ahead
    themselves. Nothing at or past `end` is read. `start` is a multiple of BLOCK_N.
    """
    if PAGE % BLOCK_N == 0:
        return tl.load(table_ptr + start // PAGE, mask=start < end, other=0)
    else:
        positions = start + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + positions // PAGE, mask=positions < end, other=0)


@jit()
def attend_tile(
    acc: tl.tensor,
    acc_odd: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    q: tl.tensor,
    q_odd: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    column: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    context: tl.tensor,
    last: tl.tensor,
    scale_log2: tl.tensor,
    MASKED: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    CONVERTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    INTERPRET: tl.constexpr,
) -> tl.tensor:
    """Fold positions start .. start + BLOCK_N into the running softmax of q [M, DIM].

    Its state is acc [M, DIM], the sum of weights `total` [M] and the top score [M]; the new ones return.
    Row m sees positions up to last[m]; nothing at or past `context` is read. Without MASKED the caller
    vouches that every row sees every position. `pages` are what `load_pages` found for this tile. The
    softmax is kept in base 2; `scale_log2` holds the factor log2(e). WIDTH elements of a cache row, padded
    to DIM, hold a head. With FP8 they are int16 words: q and acc belong to the even elements of a head,
    q_odd and acc_odd to the odd ones, and q is float16, which holds every FP8 value. Online softmax: Milakov
    and Gimelshein, 2018.

    k_ptr and v_ptr point to the head in the first token. With DESCRIBED they are tensor descriptors of the
    whole caches as [tokens, KV heads * DIM], in blocks [BLOCK_N, DIM], and the head begins at `column`; then
    WIDTH is DIM, BLOCK_N divides PAGE, and cells past `context` are read but do not count.
    """
    offsets = tl.arange(0, BLOCK_N)
    positions = start + offsets
    dims = tl.arange(0, DIM)
    readable = (dims < WIDTH)[None, :]
    if MASKED:
        readable = (positions < context)[:, None] & readable
    if DESCRIBED:
        row = pages * PAGE + start % PAGE
        k = k_ptr.load([row, column])
        v = v_ptr.load([row, column])
        if MASKED:  # cells past the context may hold NaN, and 0 * NaN is NaN
            v = tl.where((positions < context)[:, None], v, 0.0)
    else:
        if PAGE % BLOCK_N == 0:
            first = (pages.to(tl.int64) * PAGE + start % PAGE) * TOKEN_STRIDE
            k_ptr += first
            v_ptr += first
            cells = offsets[:, None] * TOKEN_STRIDE + dims[None, :]
        else:
            slots = pages.to(tl.int64) * PAGE + positions % PAGE
            cells = slots[:, None] * TOKEN_STRIDE + dims[None, :]
        k = tl.load(k_ptr + cells, mask=readable, other=0)
    scores = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
    if FP8:
        even, odd = fp8_pair(k, CONVERTS)
        scores = dot(q, tl.trans(even), scores, INTERPRET)
        scores = dot(q_odd, tl.trans(odd), scores, INTERPRET)
    else:
        scores = dot(q, tl.trans(k), scores, INTERPRET)
    # The factor is positive, so the top score times it is the top of the scores times it, bit by bit; product
    # and difference are one instruction. Masking comes after both: in between it would part them, and a row
    # would not have the same bits in either kind of tile.
    if MASKED:
        seen = positions[None, :] <= last[:, None]
        new_top = tl.maximum(top, tl.max(tl.where(seen, scores, float("-inf")), axis=1) * scale_log2)
        weights = tl.where(seen, tl.exp2(scores * scale_log2 - new_top[:, None]), 0.0)
    else:
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, axis=1)
    if not DESCRIBED:
        v = tl.load(v_ptr + cells, mask=readable, other=0)
    if FP8:
        even, odd = fp8_pair(v, CONVERTS)
        acc = dot(weights.to(even.dtype), even, acc * decay[:, None], INTERPRET)
        acc_odd = dot(weights.to(odd.dtype), odd, acc_odd * decay[:, None], INTERPRET)
    else:
        acc = dot(weights.to(v.dtype), v, acc * decay[:, None], INTERPRET)
    return acc, acc_odd, total, new_top


@jit()
def attend_range(
    acc: tl.tensor,
    acc_odd: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    q: tl.tensor,
    q_odd: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    column: tl.tensor,
    table_ptr: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    end: tl.tensor,
    last: tl.tensor,
    scale_log2: tl.tensor,
    MASKED: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    CONVERTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    INTERPRET: tl.constexpr,
) -> tl.tensor:
    """`attend_tile` over positions start .. stop, of which `pages` holds the first tile's pages.

    Nothing at or past `end` is read. Returns the state, and the pages of the tile at `stop`.
    """
    for position in range(start, stop, BLOCK_N):
        next_pages = load_pages(table_ptr, position + BLOCK_N, end, PAGE, BLOCK_N)
        acc, acc_odd, total, top = attend_tile(
            acc,
            acc_odd,
            total,
            top,
            q,
            q_odd,
            k_ptr,
            v_ptr,
            column,
            pages,
            position,
            end,
            last,
            scale_log2,
            MASKED,
            TOKEN_STRIDE,
            WIDTH,
            DIM,
            PAGE,
            BLOCK_N,
            FP8,
            CONVERTS,
            DESCRIBED,
            INTERPRET,
        )
        pages = next_pages
    return acc, acc_odd, total, top, pages
