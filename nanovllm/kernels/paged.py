"""The attention step that decode and prefill share: a tile of queries with a tile of paged keys and values.

Only other kernels call it; owns no launch and no memory. `KVCache` is a view of what the runner allocates.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from nanovllm.kernels.compat import INTERPRETED, jit, next_power_of_2, tl
from nanovllm.kernels.kinds import Kinds

# Kernels read an FP8 cache as int16: two neighbouring elements of a head in one word. Words can be loaded
# from shared memory in the layout of tensor cores; bytes cannot, which reaches two thirds of the speed.
FP8 = torch.float8_e4m3fn
_WORD = Kinds(  # elements of a head in one element of the cache as kernels read it
    "dtype of a KV cache", {FP8: 2, torch.bfloat16: 1, torch.float16: 1, torch.float32: 1}
)
LOG2_E = math.log2(math.e)


def as_words(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels read it: unchanged, or FP8 as int16 with half as many elements."""
    return cache.view(torch.int16) if _WORD[cache.dtype] == 2 else cache


def dequantized(cells: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Cells [..., kv_heads, head_dim] of a cache in float32, multiplied by scale [kv_heads] if given."""
    return cells.float() if scale is None else cells.float() * scale[:, None]


class Variant(NamedTuple):
    """What attention does beyond a causal softmax; the defaults do nothing."""

    window: int | None = None  # a query sees so many positions, its own included
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  # [q_heads] scores that take weight and add nothing

    @property
    def is_softmax(self) -> bool:
        """Whether a mask is all that differs from a softmax of scores."""
        return self.softcap is None and self.sinks is None

    def options(self) -> dict[str, Any]:
        """The arguments of an attention kernel; those that do nothing are left out."""
        values = {"sinks_ptr": self.sinks, "WINDOW": self.window, "SOFTCAP": self.softcap}
        return {name: value for name, value in values.items() if value is not None}


PLAIN = Variant()


class Heads(NamedTuple):
    """The layout of heads in the cache: a compile-time constant of attention kernels."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dim: int  # head_dim, padded to a power of 2
    page: int  # positions of a block
    step: int  # elements of a head in one element of the cache: 2 for FP8, else 1

    @property
    def group(self) -> int:
        """The number of query heads of each KV head."""
        return self.q_heads // self.kv_heads

    @classmethod
    def of(cls, q: torch.Tensor, cache: KVCache) -> Heads:
        """The heads of queries [T, q_heads, head_dim] and a cache; checks the layout of both."""
        assert cache.k.is_contiguous() and cache.v.is_contiguous() and q.stride(2) == 1
        cache.check()
        step = _WORD[cache.k.dtype]
        page, kv_heads, head_dim = cache.k.shape[1:]
        dim = max(16 * step, next_power_of_2(head_dim))
        return cls(q.shape[1], kv_heads, head_dim, dim, page, step)


class Softmax(NamedTuple):
    """A running softmax of M rows, in base 2 (online softmax: Milakov and Gimelshein, 2018)."""

    acc: tl.tensor  # [M, dim] weighted sum of values; for an FP8 cache of even elements
    acc_odd: tl.tensor  # the same of odd elements, for an FP8 cache
    total: tl.tensor  # [M] sum of weights
    top: tl.tensor  # [M] largest score


@jit()
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a @ b in float32."""
    if INTERPRETED:  # the interpreter would multiply bfloat16 as the integers that hold its bits
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@jit()
def fp8_pair(words: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The float8_e4m3fn values in the lower and in the upper bytes of int16 `words`, as float16 (exactly)."""
    if INTERPRETED:  # The exponent of float16 has one bit more, and a bias larger by 8. NaN becomes 480.
        even = ((words & 0x80) << 8) | ((words & 0x7F) << 7)
        odd = (words & -0x8000) | ((words >> 1) & 0x3F80)
        even = even.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        odd = odd.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    else:  # two words in a register: tensor cores want neighbouring rows side by side there
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
    return even.to(tl.float16), odd.to(tl.float16)


@jit()
def load_pages(
    table_ptr: tl.tensor, start: tl.tensor, end: tl.tensor, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """The blocks ("pages") of positions start .. start + BLOCK_N: one if a tile lies within a block, else
    [BLOCK_N].

    Call it one tile ahead, so that the loads of keys and values do not wait for it. Nothing at or past `end`
    is read. `start` is a multiple of BLOCK_N.
    """
    if PAGE % BLOCK_N == 0:
        return tl.load(table_ptr + start // PAGE, mask=start < end, other=0)
    else:
        positions = start + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + positions // PAGE, mask=positions < end, other=0)


@jit()
def window_start(context: tl.tensor, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """The start of the first tile with a position that the last of `context` tokens sees."""
    return tl.maximum(context - WINDOW, 0) // BLOCK_N * BLOCK_N


@jit()
def start_softmax(q: tl.tensor, HEADS: tl.constexpr) -> tuple[tuple[tl.tensor, tl.tensor], Softmax]:
    """Queries [M, dim] in the form of `attend_range`, and the initial softmax."""
    M: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = HEADS.dim // HEADS.step
    q_odd = q
    if HEADS.step == 2:  # float16 holds every FP8 value
        q, q_odd = tl.split(tl.reshape(q.to(tl.float16), (M, DIM, 2)))
    acc = tl.zeros((M, DIM), tl.float32)
    acc_odd = tl.zeros((M, DIM), tl.float32)
    total = tl.zeros((M,), tl.float32)
    return (q, q_odd), Softmax(acc, acc_odd, total, tl.full((M,), float("-inf"), tl.float32))


@jit()
def with_sinks(state: Softmax, sinks: tl.tensor, LOG2_E: tl.constexpr = LOG2_E) -> Softmax:
    """An initial softmax whose rows have a score, `sinks` [M] float32, that adds no value. -inf: they have
    none."""
    acc, acc_odd, total, _top = state
    return Softmax(acc, acc_odd, tl.where(sinks > float("-inf"), 1.0, total), sinks * LOG2_E)


@jit()
def before_window(state: Softmax) -> Softmax:
    """An initial softmax for rows that may see nothing in their first tiles: -inf - -inf would be NaN."""
    acc, acc_odd, total, top = state
    return Softmax(acc, acc_odd, total, tl.maximum(top, -1e30))


@jit()
def attend_range(
    state: Softmax,
    queries: tl.tuple,
    cache: tl.tuple,
    kv_head: tl.tensor,
    pages: tl.tensor,
    bounds: tl.tuple,
    last: tl.tensor,
    scale_log2: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr = False,
    WINDOW: tl.constexpr = 0,
    SOFTCAP: tl.constexpr = 0.0,
    LOG2_E: tl.constexpr = LOG2_E,
) -> tuple[Softmax, tl.tensor]:
    """Add positions start .. stop of a KV head to the softmax of some query rows.

    bounds: start, stop and end; nothing at or past `end` is read. pages: the result of `load_pages` for the
    first tile; the pages of the tile at `stop` are returned with the new state. Row m sees positions up to
    last[m], with a WINDOW only so many. Without MASKED the caller guarantees that every row sees every
    position. scale_log2: the scale times log2(e). SOFTCAP: of the scores; 0: none.

    cache: pointers to keys, values and the sequence's block table. With DESCRIBED the first two are tensor
    descriptors of [tokens, KV heads * dim], in blocks [BLOCK_N, dim]. Then head_dim is dim, BLOCK_N divides
    the page, and cells past `end` are read but do not count.
    """
    PAGE: tl.constexpr = HEADS.page
    DIM: tl.constexpr = HEADS.dim // HEADS.step
    WIDTH: tl.constexpr = HEADS.head_dim // HEADS.step
    TOKEN_STRIDE: tl.constexpr = HEADS.kv_heads * HEADS.head_dim // HEADS.step
    FP8: tl.constexpr = HEADS.step == 2
    q, q_odd = queries
    acc, acc_odd, total, top = state
    start, stop, end = bounds
    k_ptr, v_ptr, table_ptr = cache
    column = kv_head * WIDTH
    if not DESCRIBED:
        k_ptr += column
        v_ptr += column
    next_pages = pages
    for tile in range(start, stop, BLOCK_N):
        pages = next_pages
        next_pages = load_pages(table_ptr, tile + BLOCK_N, end, PAGE, BLOCK_N)
        offsets = tl.arange(0, BLOCK_N)
        dims = tl.arange(0, DIM)
        positions = tile + offsets
        readable = (dims < WIDTH)[None, :]
        if MASKED:
            readable = (positions < end)[:, None] & readable
        if DESCRIBED:
            row = pages * PAGE + tile % PAGE
            k = k_ptr.load([row, column])
            v = v_ptr.load([row, column])
            if MASKED:  # cells past the end may hold NaN, and 0 * NaN is NaN
                v = tl.where((positions < end)[:, None], v, 0.0)
        else:
            k_tile_ptr = k_ptr
            v_tile_ptr = v_ptr
            if PAGE % BLOCK_N == 0:
                first = (pages.to(tl.int64) * PAGE + tile % PAGE) * TOKEN_STRIDE
                k_tile_ptr += first
                v_tile_ptr += first
                cells = offsets[:, None] * TOKEN_STRIDE + dims[None, :]
            else:
                slots = pages.to(tl.int64) * PAGE + positions % PAGE
                cells = slots[:, None] * TOKEN_STRIDE + dims[None, :]
            k = tl.load(k_tile_ptr + cells, mask=readable, other=0)
        scores = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
        if FP8:
            even, odd = fp8_pair(k)
            scores = dot(q, tl.trans(even), scores)
            scores = dot(q_odd, tl.trans(odd), scores)
        else:
            scores = dot(q, tl.trans(k), scores)
        factor = scale_log2
        if SOFTCAP > 0:  # 1 - 2 / (exp(2 x) + 1) is tanh(x)
            doubled = tl.exp2(scores * (scale_log2 * (2.0 / SOFTCAP)))
            scores = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))
            factor = 1.0
        # The factor is positive, so max(scores) * factor has the same bits as max(scores * factor), and
        # product and difference are one instruction (FMA). Masking comes after both. In between it would
        # split the instruction, and masked and unmasked tiles would have different bits.
        if MASKED:
            seen = positions[None, :] <= last[:, None]
            if WINDOW:
                seen = seen & (positions[None, :] > last[:, None] - WINDOW)
            new_top = tl.maximum(top, tl.max(tl.where(seen, scores, float("-inf")), axis=1) * factor)
            weights = tl.where(seen, tl.exp2(scores * factor - new_top[:, None]), 0.0)
        else:
            new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
            weights = tl.exp2(scores * factor - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=1)
        if not DESCRIBED:
            v = tl.load(v_tile_ptr + cells, mask=readable, other=0)
        if FP8:
            even, odd = fp8_pair(v)
            acc = dot(weights.to(even.dtype), even, acc * decay[:, None])
            acc_odd = dot(weights.to(odd.dtype), odd, acc_odd * decay[:, None])
        else:
            acc = dot(weights.to(v.dtype), v, acc * decay[:, None])
        top = new_top
    return Softmax(acc, acc_odd, total, top), next_pages


@jit()
def finish_softmax(
    state: Softmax, context: tl.tensor, v_scale_ptr: tl.tensor, kv_head: tl.tensor, HEADS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The attention output [M, dim], zeros for an empty context; and log2 of the sums of weights [M]."""
    acc, acc_odd, total, top = state
    total = tl.where(context > 0, total, 1.0)
    v_scale = 1.0
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + kv_head)
    if HEADS.step == 2:
        acc = tl.interleave(acc, acc_odd)
    return acc / total[:, None] * v_scale, top + tl.log2(total)


class KVCache(NamedTuple):
    """Keys and values of one layer, in blocks.

    k, v: [num_blocks, block_size, kv_heads, head_dim] of the model's dtype, or of float8_e4m3fn. Contiguous,
    or for a backend with `heads_first` a view of [num_blocks, kv_heads, block_size, head_dim].
    k_scale, v_scale: of an FP8 cache, [kv_heads] float32. A store divides by the head's scale, a load
    multiplies by it.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def check(self) -> None:
        """ValueError for a cache that no kernel reads or writes, by its dtype and its scales."""
        needs = _WORD[self.k.dtype] == 2
        if not needs == (self.k_scale is not None) == (self.v_scale is not None):
            raise ValueError(f"a KV cache of {self.k.dtype} {'needs' if needs else 'takes no'} scales")
