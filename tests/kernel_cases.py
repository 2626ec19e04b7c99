"""Checks of the kernels for any device: interpreted in the CPU tests, compiled in the GPU tests.

A check compares the Triton launcher and the torch reference with a computation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy as np
import torch

from nanovllm.batch import LAST_SAMPLED, NO_SLOT, NOT_FINITE
from nanovllm.distributed.exchanged_rows import ExchangedRows
from nanovllm.kernels import activation, decode_attention, sampling
from nanovllm.kernels.activation import silu_and_mul_reference, silu_and_mul_triton
from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.compat import INTERPRET, jit, tl
from nanovllm.kernels.decode_attention import (
    CHUNK,
    SHARED_CHUNK,
    Shared,
    SharedUnit,
    paged_decode_attention_reference,
    paged_decode_attention_triton,
)
from nanovllm.kernels.filters import Filters
from nanovllm.kernels.gemv import gemv_reference, gemv_triton
from nanovllm.kernels.last_tokens import (
    keep_tokens_reference,
    keep_tokens_triton,
    take_tokens_reference,
    take_tokens_triton,
)
from nanovllm.kernels.matmul import _TILES, Tile, linear_reference, linear_triton
from nanovllm.kernels.paged import fp8_pair
from nanovllm.kernels.prefill_attention import (
    Tiles,
    paged_prefill_attention_reference,
    paged_prefill_attention_triton,
)
from nanovllm.kernels.random_bits import random_pair, random_pair_reference
from nanovllm.kernels.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_reference,
    rms_norm_triton,
)
from nanovllm.kernels.rotary import (
    Rotation,
    qk_norm_rope_store_reference,
    qk_norm_rope_store_triton,
    quantise_reference,
)
from nanovllm.kernels.sampling import sample_reference, sample_triton
from nanovllm.runner.shared_prefixes import find_shared_prefixes

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
DECODE = (paged_decode_attention_triton, paged_decode_attention_reference)
PREFILL = (paged_prefill_attention_triton, paged_prefill_attention_reference)
STORES = (qk_norm_rope_store_triton, qk_norm_rope_store_reference)
SAMPLERS = (sample_triton, sample_reference)
SAMPLE_BLOCK = sampling.BLOCK  # of the vocabulary
TOLERANCE = {F32: 1e-5, F16: 4e-3, BF16: 3e-2}  # a few roundings; the interpreter truncates to bfloat16


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check each element against the exact `expected`, within the accuracy of its dtype for the values of its
    row.
    """
    expected = expected.double()
    size = expected.abs() + expected.square().mean(dim=-1, keepdim=True).sqrt()
    bound = TOLERANCE[actual.dtype] * size + torch.finfo(actual.dtype).tiny
    excess = (actual.double() - expected).abs() - bound
    assert (excess <= 0).all(), excess.max()  # also fails for NaN


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


# ---- paged attention ----


@dataclass(frozen=True)
class Heads:
    """The heads of a cache and of the queries that attend to it."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype = F32
    cache_dtype: torch.dtype | None = None  # None: the dtype of the queries

    def __str__(self) -> str:
        dtype = "-".join(str(t).removeprefix("torch.") for t in (self.dtype, self.cache_dtype) if t)
        return f"{self.q_heads}q{self.kv_heads}kv-d{self.head_dim}-p{self.page}-{dtype}"


@dataclass(frozen=True)
class PagedCache:
    """Random contexts in scattered pages. Unused cells, and a page before and after the cache, are NaN."""

    kv: KVCache
    tables: torch.Tensor  # [S, W] int32
    contexts: torch.Tensor  # [S] int32
    keys: list[torch.Tensor]  # for each sequence [context, kv_heads, head_dim], as read back from the cache
    values: list[torch.Tensor]


def guarded(num_blocks: int, heads: Heads, device: str) -> torch.Tensor:
    """A buffer of num_blocks pages plus one page before and after, filled with NaN."""
    shape = (num_blocks + 2, heads.page, heads.kv_heads, heads.head_dim)
    return torch.full(shape, math.nan, device=device).to(heads.cache_dtype or heads.dtype)


def write_cells(
    cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """Write rows [n, kv_heads, head_dim] into `slots` of the cache; return what the cache gives back."""
    stored = (rows if scale is None else rows / scale[:, None]).to(cache.dtype)
    bits = torch.int16 if cache.dtype.itemsize == 2 else torch.int32
    bits = torch.uint8 if cache.dtype.itemsize == 1 else bits  # CPUs cannot index FP8
    cache.view(bits).flatten(0, 1)[slots.to(cache.device)] = stored.view(bits)
    return stored if scale is None else stored.float() * scale[:, None]


def make_cache(contexts: Sequence[int], heads: Heads, device: str, seed: int = 0) -> PagedCache:
    counts = [-(-context // heads.page) for context in contexts]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    tables = torch.full((len(contexts), max(counts) + 2), -1, dtype=torch.int32)
    k, v = (guarded(num_blocks, heads, device)[1:-1] for _ in range(2))
    k_scale = v_scale = None
    if heads.cache_dtype == FP8:
        k_scale = torch.linspace(0.02, 0.04, heads.kv_heads, device=device)
        v_scale = torch.linspace(0.3, 0.1, heads.kv_heads, device=device)
    keys, values = [], []
    used = 0
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        tables[row, :count] = order[used : used + count]
        used += count
        shape = (context, heads.kv_heads, heads.head_dim)
        positions = torch.arange(context)
        slots = tables[row, positions // heads.page].long() * heads.page + positions % heads.page
        for index, (cache, scale, cells) in enumerate(((k, k_scale, keys), (v, v_scale, values))):
            drawn = randn(*shape, dtype=heads.dtype, device=device, seed=seed + 2 * row + index)
            cells.append(write_cells(cache, slots, drawn, scale))
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    return PagedCache(KVCache(k, v, k_scale, v_scale), tables.to(device), lengths, keys, values)


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Exact causal attention of the last n positions: q [n, q_heads, d], k and v [context, kv_heads, d]."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    future = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)


def fused_queries(tokens: int, heads: Heads, device: str) -> torch.Tensor:
    """Queries as a strided view, as in the output of a fused projection."""
    shape = (tokens, heads.q_heads + 2 * heads.kv_heads, heads.head_dim)
    return randn(*shape, dtype=heads.dtype, device=device, seed=99)[:, : heads.q_heads]


def check_decode(contexts: Sequence[int], heads: Heads, device: str) -> None:
    """Kernel and reference are right; neither the bound on the context nor the batch changes a bit of the
    kernel's result.
    """
    cache = make_cache(contexts, heads, device)
    q = fused_queries(len(contexts), heads, device)
    scale = heads.head_dim**-0.5
    expected = torch.zeros(q.shape, dtype=torch.float64, device=device)
    for row, context in enumerate(contexts):
        if context:
            expected[row] = naive_attention(q[row : row + 1], cache.keys[row], cache.values[row], scale)[0]
    longest = max(contexts)
    for attend in DECODE:
        out = attend(q, cache.kv, cache.tables, cache.contexts, longest, scale)
        assert out.shape == q.shape
        assert out.is_contiguous()
        assert_near(out, expected)
        assert not out[cache.contexts == 0].any()
    run = paged_decode_attention_triton
    out = run(q, cache.kv, cache.tables, cache.contexts, longest, scale)
    loose = run(q, cache.kv, cache.tables, cache.contexts, longest + 700, scale)
    assert torch.equal(loose, out)
    for row in {0, len(contexts) // 2, len(contexts) - 1}:
        one = slice(row, row + 1)
        inputs = (q[one], cache.kv, cache.tables[one], cache.contexts[one])
        alone = run(*inputs, max(1, contexts[row]), scale)
        assert torch.equal(alone, out[one])
        few = run(*inputs, max(1, contexts[row]), scale, invariant=False)
        assert_near(few, expected[one])
        loose = run(*inputs, contexts[row] + 700, scale, invariant=False)
        assert torch.equal(loose, few)
    # Few rows, some, and many by lowered thresholds, also with long chunks and with those of an FP8 cache.
    many, full, shorter = {"_MANY_PROGRAMS": 1}, {"_FULL_PROGRAMS": 1}, {"_FP8_CHUNK": 256}
    most = len(contexts)
    for rows, patched in (
        (2, many),
        (8, {}),
        (most, {}),
        (most, many),
        (most, many | full),
        (most, many | full | shorter),
    ):
        inputs = (q[:rows], cache.kv, cache.tables[:rows], cache.contexts[:rows])
        with mock.patch.dict(vars(decode_attention), patched):
            out = run(*inputs, longest, scale, invariant=False)
        assert_near(out, expected[:rows])


def check_shared_prefixes(
    contexts: Sequence[int], shares: dict[int, int], heads: Heads, device: str, tile: int = 16
) -> None:
    """Row r shares its first blocks with row shares[r], as many as both fill.

    With tiles of 16 rows (`invariant`) no bit changes on a device; wider tiles sum in another order. The
    interpreter uses BLAS, whose rounding depends on a row's place in its tile.
    """
    invariant = tile == 16
    chunk = CHUNK if invariant else SHARED_CHUNK
    cache = make_cache(contexts, heads, device)
    expected = []
    for row, other in shares.items():
        blocks = max(0, min(contexts[row], contexts[other]) - 1) // heads.page
        cache.tables[row, :blocks] = cache.tables[other, :blocks]
        expected.append(blocks * heads.page // chunk)
    fields = find_shared_prefixes(
        cache.tables.cpu().numpy(),
        cache.contexts.cpu().numpy(),
        heads.page,
        SharedUnit(tile // (heads.q_heads // heads.kv_heads), chunk),
    )
    assert fields is not None
    columns = fields.members, fields.lens, fields.skips, fields.units
    shared = Shared(*(torch.from_numpy(column).to(device) for column in columns), chunk)
    # In each group one sequence may share with none; `shares` has no entry for the first row of a group.
    assert int((shared.skips > 0).sum()) >= sum(common > 0 for common in expected)
    q = fused_queries(len(contexts), heads, device)
    inputs = (q, cache.kv, cache.tables, cache.contexts, max(contexts) + 600, heads.head_dim**-0.5)
    out, alone = (paged_decode_attention_triton(*inputs, plan, invariant) for plan in (shared, None))
    if not invariant:
        assert_near(out, alone)
        for chunk in (CHUNK, 2 * CHUNK):
            whole = {name: getattr(shared, name) // chunk * chunk for name in ("lens", "skips")}
            coarse = shared._replace(chunk=chunk, **whole)
            assert_near(paged_decode_attention_triton(*inputs, coarse, invariant), alone)
    else:
        tolerance = 0.0 if out.is_cuda else 1e-6
        torch.testing.assert_close(out, alone, rtol=tolerance, atol=tolerance)


def check_prefill(
    lengths: Sequence[tuple[int, int]], heads: Heads, device: str, tiles: Tiles | None = None
) -> None:
    """`lengths` holds (new tokens, context) for each sequence; each query attends to its causal context."""
    cache = make_cache([context for _, context in lengths], heads, device)
    new = torch.tensor([0, *(queries for queries, _ in lengths)])
    bounds = new.cumsum(0).to(device, torch.int32)
    q = fused_queries(int(new.sum()), heads, device)
    scale = heads.head_dim**-0.5
    expected = torch.zeros(q.shape, dtype=torch.float64, device=device)
    for row, (queries, context) in enumerate(lengths):
        begin = int(bounds[row])
        if context:
            expected[begin : begin + queries] = naive_attention(
                q[begin : begin + queries], cache.keys[row], cache.values[row], scale
            )
    for attend in PREFILL if tiles is None else (partial(paged_prefill_attention_triton, tiles=tiles),):
        inputs = (q, cache.kv, cache.tables, bounds, cache.contexts)
        out = attend(*inputs, int(new.max()), scale)
        assert out.shape == q.shape
        assert out.is_contiguous()
        assert_near(out, expected)


def check_chunked_prefill(length: int, chunks: Sequence[int], heads: Heads, device: str) -> None:
    """A prompt in `chunks` (the last one repeats) gives the kernel's result for the whole prompt.

    Bit for bit on a device; the interpreter uses BLAS, whose rounding depends on a row's place in its tile.
    """
    cache = make_cache([length], heads, device)
    q = fused_queries(length, heads, device)

    def run(begin: int, end: int) -> torch.Tensor:
        bounds = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        context = torch.tensor([end], dtype=torch.int32, device=device)
        inputs = (q[begin:end], cache.kv, cache.tables, bounds, context)
        longest = end - begin
        return paged_prefill_attention_triton(*inputs, longest, heads.head_dim**-0.5, invariant=True)

    pieces, begin = [], 0
    while begin < length:
        end = min(length, begin + chunks[min(len(pieces), len(chunks) - 1)])
        pieces.append(run(begin, end))
        begin = end
    whole = run(0, length)
    tolerance = 0.0 if whole.is_cuda else 1e-6
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=tolerance, atol=tolerance)


@jit()
def _fp8_pair_kernel(words_ptr: tl.tensor, out_ptr: tl.tensor) -> None:
    index = tl.arange(0, 256)
    even, odd = fp8_pair(tl.load(words_ptr + index))
    tl.store(out_ptr + 2 * index, even)
    tl.store(out_ptr + 2 * index + 1, odd)


def check_fp8_pairs(device: str) -> None:
    """Every byte as the low and as the high byte of a word. NaN stays NaN where possible."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    cells = torch.stack([codes, codes.roll(77)], dim=1)
    expected = cells.view(FP8).to(F16)
    out = torch.empty_like(expected)
    _fp8_pair_kernel[(1,)](cells.view(torch.int16), out)
    whole = torch.where(expected.isnan(), out, expected) if INTERPRET else expected
    torch.testing.assert_close(out, whole, rtol=0, atol=0, equal_nan=True)


def guarded_bytes(num_blocks: int, heads: Heads, cache_dtype: torch.dtype, device: str) -> torch.Tensor:
    """`guarded` in any dtype: all bits are set, which is NaN in each float format of a cache."""
    size = (num_blocks + 2) * heads.page * heads.kv_heads * heads.head_dim * cache_dtype.itemsize
    return (
        torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
        .view(cache_dtype)
        .view(num_blocks + 2, heads.page, heads.kv_heads, heads.head_dim)
    )


def check_store(tokens: int, heads: Heads, device: str, *, num_blocks: int = 9, fp8: bool = False) -> None:
    """Exactly the given slots change, in the whole cache and around it; negative slots change nothing.

    Position 0 rotates nothing, so the stored bits are known. In FP8 they are the nearest number of the
    format, and of two equally near ones the number with the even code.
    """
    capacity = num_blocks * heads.page
    slots = torch.randperm(capacity, generator=torch.Generator().manual_seed(tokens))[:tokens]
    slots[::3] = -1
    slots[-1:] = capacity - 1 if capacity - 1 not in slots else slots[-1]
    shape = (tokens, heads.q_heads + 2 * heads.kv_heads, heads.head_dim)
    wide = randn(*shape, dtype=heads.dtype, device=device)
    if fp8:  # ties, numbers below the smallest, and some above the largest, which are clamped
        wide *= torch.tensor([1e-3, 0.02, 1.0, 300.0], dtype=heads.dtype, device=device)[
            torch.arange(tokens, device=device) % 4, None, None
        ]
        wide[:, :, ::2] = (wide[:, :, ::2] * 8).round() / 8
    q, k, v = wide.split((heads.q_heads, heads.kv_heads, heads.kv_heads), dim=1)
    zeros = torch.zeros(tokens, dtype=torch.int32, device=device)
    table = torch.cat((torch.ones(1, heads.head_dim // 2), torch.zeros(1, heads.head_dim // 2)), 1).to(device)
    cache_dtype = torch.float8_e4m3fn if fp8 else heads.dtype
    powers = 2.0 ** (torch.arange(heads.kv_heads, device=device) % 3 - 1)
    scales = (powers, 0.7 * powers) if fp8 else (None, None)
    for store in STORES:
        buffers = [guarded_bytes(num_blocks, heads, cache_dtype, device) for _ in range(2)]
        expected = [buffer.clone() for buffer in buffers]
        for target, source, scale in zip(expected, (k, v), scales, strict=True):
            stored = source if scale is None else nearest_fp8(source.float() / scale[:, None])
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    target[1 + slot // heads.page, slot % heads.page] = stored[token]
        cache = KVCache(buffers[0][1:-1], buffers[1][1:-1], *scales)
        out = store(q, k, v, Rotation(zeros, table), cache, slots.to(device, torch.int32))
        assert torch.equal(out, q)
        for buffer, target in zip(buffers, expected, strict=True):
            torch.testing.assert_close(buffer.float(), target.float(), rtol=0, atol=0, equal_nan=True)


def nearest_fp8(x: torch.Tensor) -> torch.Tensor:
    """The float8_e4m3fn number nearest to each x, by comparison with all of them."""
    codes = torch.arange(127, dtype=torch.uint8, device=x.device)  # 0 to 448; 127 is NaN
    table = codes.view(torch.float8_e4m3fn).double()
    above = torch.searchsorted(table, x.double().abs().contiguous()).clamp(1, 126)
    low, high = x.double().abs() - table[above - 1], table[above] - x.double().abs()
    code = torch.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    return (code.to(torch.uint8) | (x.signbit().to(torch.uint8) << 7)).view(torch.float8_e4m3fn)


# ---- row-wise kernels ----


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check_rms_norm(rows: int, n: int, dtype: torch.dtype, device: str) -> None:
    """For a strided matrix and a 3-d tensor, and fused with the residual add."""
    eps = 1e-6
    weight = 1 + 0.1 * randn(n, dtype=dtype, device=device, seed=1)
    x = randn(rows, 2 * n, dtype=dtype, device=device)[:, n:]
    residual = randn(rows, 3 * n, dtype=dtype, device=device, seed=2)[:, :n]
    for norm in (rms_norm_triton, rms_norm_reference):
        assert_near(norm(x, weight, eps), exact_rms_norm(x, weight, eps))
        deep = x.reshape(rows, 1, n).expand(rows, 2, n).contiguous()
        out = norm(deep, weight, eps)
        assert out.shape == deep.shape
        assert_near(out, exact_rms_norm(deep, weight, eps))
        assert not norm(torch.zeros_like(x), weight, eps).any()
    kept = residual.clone()
    for norm in (add_rms_norm_triton, add_rms_norm_reference):
        out, total = norm(x, residual, weight, eps)
        assert torch.equal(residual, kept)
        assert_near(total, x.double() + residual.double())
        assert_near(out, exact_rms_norm(total, weight, eps))


# ---- the tokens drawn last ----


def check_last_tokens(tokens: int, device: str) -> None:
    """Tokens are stored by slot and read from there, also if they are no tokens."""
    vocab, slots = 100, torch.randperm(tokens + 3, generator=torch.Generator().manual_seed(1)).to(device)
    drawn = torch.arange(tokens, device=device) % vocab
    drawn[::5] = NOT_FINITE
    drawn[1::5] = 2**40
    ids = torch.where(torch.arange(tokens, device=device) % 3 == 0, 7, LAST_SAMPLED)
    kept = torch.arange(tokens, device=device) % 7 != 6
    lasts = torch.where(kept, drawn, 50).clamp(0, vocab - 1)
    expected = torch.where(ids == LAST_SAMPLED, lasts, ids)
    if device != "cpu":
        torch.cuda.synchronize()  # slots are also an input of the step
    for keep, take in (
        (keep_tokens_triton, take_tokens_triton),
        (keep_tokens_reference, take_tokens_reference),
    ):
        last = torch.full((tokens + 3,), 50, device=device)
        keep(drawn, torch.where(kept, slots[:tokens], NO_SLOT), last)
        assert torch.equal(last[slots[:tokens]], torch.where(kept, drawn, 50))
        assert (last[slots[tokens:]] == 50).all()
        asking = torch.where(ids == LAST_SAMPLED, slots[:tokens], NO_SLOT)
        assert torch.equal(take(ids, asking, last, vocab), expected)


# ---- matrix products ----

TILES = (None, *_TILES)  # None: the tile that `choose_tile` returns


def check_linear(rows: int, n: int, k: int, dtype: torch.dtype, device: str, *, bias: bool) -> None:
    """Kernel and reference, for a strided matrix and every tile."""
    x = randn(rows, 2 * k, dtype=dtype, device=device)[:, k:]
    weight = randn(n, k, dtype=dtype, device=device, seed=1)
    vector = randn(n, dtype=dtype, device=device, seed=2) if bias else None
    exact = x.double() @ weight.double().T + (0 if vector is None else vector.double())
    for out in (linear_reference(x, weight, vector), linear_triton(x, weight, vector)):
        assert out.dtype == dtype and out.shape == (rows, n)
        assert_near(out, exact)
    for tile in TILES if (rows, k) == (130, 104) and dtype != F32 else ():
        assert_near(linear_triton(x, weight, vector, tile=tile), exact)
    residual = randn(rows, n, dtype=dtype, device=device, seed=3)
    for linear in (linear_reference, linear_triton):
        place = residual.clone()
        assert linear(x, weight, vector, place) is place
        assert_near(place, exact + residual.double())


def check_linear_rows_are_independent(
    n: int, k: int, dtype: torch.dtype, device: str, counts: Sequence[int], tiles: Sequence[Tile | None]
) -> None:
    """A row has the same bits beside any number of rows, with any of `tiles`, and beside NaN; compiled, also
    at any place.

    The interpreter adds with BLAS, which depends on a row's place in a tile. The last tile of 32 rows
    overlaps the one before: rows that only the last tile has are compared within a tolerance.
    """

    def check_same(out: torch.Tensor, rows: slice, expected: torch.Tensor) -> None:
        whole = rows.stop if device != "cpu" or rows.stop <= 32 else rows.stop // 32 * 32
        places = torch.arange(len(expected))[rows]
        equal, near = places < whole, places >= whole
        assert torch.equal(out[equal], expected[rows][equal]), rows
        assert_near(out[near], expected[rows][near].double())

    x = randn(max(counts), k, dtype=dtype, device=device)
    weight = randn(n, k, dtype=dtype, device=device, seed=1) * k**-0.5
    spoilt = x.clone()
    spoilt[::3] = math.nan
    full = linear_triton(x, weight)
    residual = randn(max(counts), n, dtype=dtype, device=device, seed=2)
    full_total = linear_triton(x, weight, residual=residual.clone())
    for tile in tiles:
        assert torch.equal(linear_triton(x, weight, tile=tile), full), tile
    for count in counts:
        check_same(linear_triton(x[:count], weight), slice(count), full)
        if device != "cpu":
            assert torch.equal(linear_triton(x[len(x) - count :], weight), full[len(x) - count :]), count
        check_same(
            linear_triton(x[:count], weight, residual=residual[:count].clone()), slice(count), full_total
        )
        beside = linear_triton(spoilt[:count], weight)
        assert beside[::3].isnan().all()
        for first in (1, 2):
            check_same(beside[first::3], slice(first, count, 3), full)


def check_rope(
    tokens: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, *, norm: bool
) -> None:
    """Against a rotation of complex numbers in float64, for views of a fused projection."""
    half, eps = head_dim // 2, 1e-6
    angles = torch.outer(torch.arange(50.0), 1 / 100 ** (torch.arange(half) / half)).to(device)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    wide = randn(tokens, q_heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    q, k = wide[:, :q_heads], wide[:, q_heads : q_heads + kv_heads]
    q_weight, k_weight = (
        1 + 0.1 * randn(head_dim, dtype=dtype, device=device, seed=seed) if norm else None for seed in (1, 2)
    )
    positions = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(3)).to(device)

    def exact(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.double() if weight is None else exact_rms_norm(x, weight, eps)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[positions][:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    k_exact, v = exact(k, k_weight), wide[:, q_heads + kv_heads :]
    slots = torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(4))[:tokens].to(device)
    rotation = Rotation(positions, table, q_weight, k_weight, eps)
    for store in STORES:
        for index_dtype in (torch.int32, torch.int64):
            caches = [torch.zeros(tokens, 2, kv_heads, head_dim, dtype=dtype, device=device) for _ in "kv"]
            turn = rotation._replace(positions=positions.to(index_dtype))
            q_out = store(q, k, v, turn, KVCache(*caches), slots.int())
            assert q_out.is_contiguous()
            assert_near(q_out, exact(q, q_weight))
            k_stored, v_stored = (cache.flatten(0, 1)[slots] for cache in caches)
            assert_near(k_stored, k_exact)
            assert torch.equal(v_stored, v)
        turn = rotation._replace(positions=positions[-1:])
        alone = store(q[-1:], k[-1:], v[-1:], turn, KVCache(*caches), slots[-1:].int())
        assert torch.equal(alone, q_out[-1:])
        assert torch.equal(caches[0].flatten(0, 1)[slots], k_stored)

    # With `rms_of`, q, k and v are still to be divided by the root mean square of another row.
    rms_of = randn(tokens, 40, dtype=dtype, device=device, seed=5) + 2
    factor = rms_of.double().square().mean(-1, keepdim=True).add(eps).rsqrt()[..., None]
    before = [(x.double() * factor).to(dtype) for x in (q, k, v)]
    for store in STORES:
        outs = []
        for parts, divisor in (((q, k, v), rms_of), (before, None)):
            caches = [torch.zeros(tokens, 2, kv_heads, head_dim, dtype=dtype, device=device) for _ in "kv"]
            q_out = store(*parts, rotation, KVCache(*caches), slots.int(), divisor)
            outs.append((q_out, *caches))
        for scaled, exact_out in zip(*outs, strict=True):
            assert_near(scaled, exact_out.double())

    # In FP8: what a cache of q's dtype would hold, quantised.
    scale = torch.linspace(0.01, 0.02, kv_heads, device=device)
    caches = [torch.zeros_like(cache, dtype=torch.float8_e4m3fn) for cache in caches]
    for store in STORES:
        plain = [torch.zeros(tokens, 2, kv_heads, head_dim, dtype=dtype, device=device) for _ in "kv"]
        store(q, k, v, rotation, KVCache(*plain), slots.int())
        store(q, k, v, rotation, KVCache(*caches, scale, scale), slots.int())
        for cache, source in zip(caches, plain, strict=True):
            expected = quantise_reference(source.flatten(0, 1)[slots], scale)
            assert torch.equal(cache.float().flatten(0, 1)[slots], expected.float())


def check_silu(rows: int, n: int, dtype: torch.dtype, device: str) -> None:
    x = randn(rows, 2 * n + 8, dtype=dtype, device=device)[:, : 2 * n]
    rms_of = randn(rows, 24, dtype=dtype, device=device, seed=1) + 1
    scale = rms_of.double().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    gate, up = (x.double() * scale).chunk(2, dim=-1)
    for silu in (silu_and_mul_triton, silu_and_mul_reference):
        assert_near(silu(x, rms_of, 1e-6), gate * torch.sigmoid(gate) * up)
    with mock.patch.object(activation, "_MANY_ROWS", 0):
        many = silu_and_mul_triton(x, rms_of, 1e-6)
    assert torch.equal(many, silu_and_mul_triton(x, rms_of, 1e-6))
    x[0, 0], x[-1, n - 1] = 60.0, -60.0
    gate, up = x[:, :n].double(), x[:, n:].double()
    for silu in (silu_and_mul_triton, silu_and_mul_reference):
        assert_near(silu(x), gate * torch.sigmoid(gate) * up)


GEMVS = (gemv_triton, gemv_reference)


def check_gemv(rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> None:
    """Every combination that a model uses; behind the last rows of weight and bias is NaN."""
    x = randn(rows, k + 8, dtype=dtype, device=device)[:, :k]
    residual = randn(rows, k, dtype=dtype, device=device, seed=1)
    norm_weight = randn(k, dtype=dtype, device=device, seed=2)
    weight = randn(2 * n + 3, k, dtype=dtype, device=device, seed=3) / math.sqrt(k)
    bias = randn(2 * n + 3, dtype=dtype, device=device, seed=4)
    weight[2 * n :] = bias[2 * n :] = math.nan
    weight, bias = weight[: 2 * n], bias[: 2 * n]
    exact_sum = x.double() + residual.double()
    normed = exact_rms_norm(exact_sum.to(dtype), norm_weight, 1e-6)
    with_norm = {"norm_weight": norm_weight, "eps": 1e-6}
    for gemv in GEMVS:
        out, total = gemv(x, weight)
        assert_near(out, x.double() @ weight.double().T)
        assert torch.equal(total, x)
        for own_bias in (None, bias):
            plus = 0.0 if own_bias is None else own_bias.double()
            out, total = gemv(x, weight, own_bias, **with_norm, residual=residual)
            assert_near(total, exact_sum)
            assert_near(out, normed @ weight.double().T + plus)
            out, _ = gemv(x, weight, own_bias, **with_norm, residual=residual, silu=True)
            gate, up = (normed @ weight.double().T + plus).chunk(2, dim=-1)
            assert_near(out, gate * torch.sigmoid(gate) * up)
        out, total = gemv(x, weight, eps=1e-6)
        assert_near(out, exact_rms_norm(x, torch.ones_like(norm_weight), 1e-6) @ weight.double().T)
        out, total = gemv(x, weight, **with_norm)
        assert_near(out, exact_rms_norm(x, norm_weight, 1e-6) @ weight.double().T)
        assert torch.equal(total, x)
    together = gemv_triton(x, weight, bias, **with_norm, residual=residual, silu=True)[0]
    for row in range(rows):
        one = slice(row, row + 1)
        alone = gemv_triton(x[one], weight, bias, **with_norm, residual=residual[one], silu=True)[0]
        assert torch.equal(together[one], alone)


# ---- sampling ----

TEMPERATURES = (0.0, 1e-8, 1e-4, 0.01, 0.6, 1.0, 5.0)
Sampler = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """The columns of a sampling call in addition to its logits."""

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def pick(self, index: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.temperature[index], self.seeds[index], self.positions[index]


def make_rows(count: int, device: str, temperatures: Sequence[float] = TEMPERATURES) -> Rows:
    generator = torch.Generator().manual_seed(count)
    temperature = torch.tensor([temperatures[i % len(temperatures)] for i in range(count)], dtype=F32)
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    positions = torch.randint(0, 2**31 - 1, (count,), generator=generator, dtype=torch.int32)
    return Rows(temperature.to(device), seeds.to(device), positions.to(device))


ALL = slice(None)


def assert_drawn(part: torch.Tensor, sums: torch.Tensor, ids: torch.Tensor, bits: torch.Tensor) -> None:
    """Check that bits / 2**32, within rounding, is in the share of `sums` [S] that ids [S] of part [S, n]
    have.
    """
    after = part.cumsum(-1).gather(-1, ids[:, None])[:, 0]
    before = after - part.gather(-1, ids[:, None])[:, 0]
    target = bits.double() * 2.0**-32 * sums
    assert ((before <= target + 2e-5 * sums) & (target <= after + 2e-5 * sums)).all()


def check_sample(count: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Each id matches its row's two random numbers and has a positive probability; a greedy row has the first
    of the largest logits.
    """
    rows = make_rows(count, device)
    block_bits, token_bits = random_pair_reference(rows.seeds, rows.positions)
    drawn = rows.temperature >= 1e-5
    divisor = rows.temperature.double().where(drawn, 1.0)[:, None]
    blocks = -(-vocab // SAMPLE_BLOCK)
    for spread in (3.0, 0.0):  # at temperature 0 each block of the vocabulary wins somewhere
        logits = (spread * randn(count, vocab + 5, dtype=F32, device=device)).to(dtype)
        logits[:, vocab:] = 1e4  # would win if it were read
        logits = logits[:, :vocab]
        wide = logits.double()
        weights = ((wide - wide.amax(-1, keepdim=True)) / divisor).exp()
        weights = torch.nn.functional.pad(weights, (0, blocks * SAMPLE_BLOCK - vocab))
        by_block = weights.view(count, blocks, SAMPLE_BLOCK)
        shares = by_block.sum(-1)
        for sampler in SAMPLERS:
            ids = sampler(logits, *rows.pick(ALL))
            assert ids.dtype == torch.int64
            assert torch.equal(ids[~drawn], logits[~drawn].argmax(-1))
            block, token = ids // SAMPLE_BLOCK, ids % SAMPLE_BLOCK
            inside = by_block[torch.arange(count, device=device), block]
            assert_drawn(shares[drawn], shares[drawn].sum(-1), block[drawn], block_bits[drawn])
            assert_drawn(inside[drawn], inside[drawn].sum(-1), token[drawn], token_bits[drawn])


def check_sampling_rows_are_independent(count: int, vocab: int, device: str, filters: bool = False) -> None:
    """A row gives the same id alone, among 2 and 17, in another order, and beside rows with NaN."""
    logits = randn(count, vocab, dtype=F32, device=device).to(BF16 if filters else F32)
    rows, of_all = make_rows(count, device, (0.0, 0.7, 1.3)), make_filters(count, device)
    bad = torch.arange(count, device=device) % 4 == 1
    spoilt = logits.clone()
    spoilt[bad, vocab // 2] = math.nan

    def draw(sampler: Sampler, logits: torch.Tensor, index: torch.Tensor | slice) -> torch.Tensor:
        own = Filters(of_all.top_k[index], of_all.top_p[index], of_all.min_p[index]) if filters else None
        return sampler(logits[index], *rows.pick(index), own)

    for sampler in SAMPLERS:
        ids = draw(sampler, logits, ALL)
        for size in (1, 2, 17, count):
            some = torch.randperm(count, generator=torch.Generator().manual_seed(size))[:size].to(device)
            assert torch.equal(draw(sampler, logits, some), ids[some])
        assert torch.equal(draw(sampler, spoilt, ALL), ids.masked_fill(bad, -1))


def check_sampling_extremes(vocab: int, device: str, kept: tuple[int, float, float] | None = None) -> None:
    """Rows that are not finite give -1, ties the lowest index, masked tokens never win, and no finite logit
    is too large.

    kept: top_k, top_p and min_p of all rows.
    """
    inf, nan, last = math.inf, math.nan, vocab - 1
    # changed logits, the base of all others, the expected id
    cases: list[tuple[dict[int, float], float, int]] = [
        ({0: nan}, 0.0, -1),
        ({last: nan}, 0.0, -1),
        ({last: inf}, 0.0, -1),
        ({0: nan, last: inf}, -inf, -1),
        ({}, -inf, -1),
        ({last: -1e30}, -inf, last),
        ({last: 3.4e38}, -3.4e38, last),
        ({last // 2: 3.4e38, last: 3.4e38}, 0.0, last // 2),
        ({last: 1e3}, -inf, last),
    ]
    logits = torch.full((len(cases), vocab), 0.0, device=device)
    for row, (cells, base, _) in enumerate(cases):
        logits[row] = base
        for column, value in cells.items():
            logits[row, column] = value
    expected = torch.tensor([case[2] for case in cases], device=device)
    filters = None
    if kept is not None:
        dtypes = torch.int32, F32, F32
        columns = zip(kept, dtypes, strict=True)
        filters = Filters(*(torch.full((len(cases),), x, dtype=t, device=device) for x, t in columns))
    for temperature in (0.0, 1e-8, 1e-4, 1.0):
        rows = make_rows(len(cases), device, (temperature,))
        for sampler in SAMPLERS:
            ids = sampler(logits, *rows.pick(ALL), filters)
            # Two equal logits: a tie for a greedy row, equal chances for any other row.
            tie = (ids == last) & (logits[:, last // 2] == logits[:, last]) & (temperature >= 1e-5)
            assert torch.equal(ids.masked_fill(tie, last // 2), expected), temperature


def check_exchanged_rows(vocab: int, size: int, count: int, dtype: torch.dtype, device: str) -> None:
    """Ranks with some columns each draw what one rank with all columns draws, for filters and rows that are
    not finite.
    """
    logits = randn(count, vocab, dtype=F32, device=device).round(decimals=1).to(dtype)
    logits[1::7, vocab // 2] = math.nan
    logits[2::7, vocab - 1] = math.inf
    logits[3::7] = -math.inf
    rows, filters = make_rows(count, device).pick(ALL), make_filters(count, device)
    part = -(-vocab // size)
    columns = torch.nn.functional.pad(logits, (0, size * part - vocab), value=1e4).split(part, dim=1)
    max_rows = count + 3
    buffers = logits.new_full((size, ExchangedRows.numel(max_rows, vocab, size)), math.nan)
    places = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
    ranks = [
        ExchangedRows(rank, places, buffers[rank], max_rows, vocab, lambda x: x) for rank in range(size)
    ]  # these ranks do not wait for each other
    assert ranks[0].fits(max_rows, dtype) and not ranks[0].fits(max_rows + 1, dtype)
    for rows_now in (count, 1):
        whole = [
            rank.whole_rows(own[:rows_now].contiguous()) for rank, own in zip(ranks, columns, strict=True)
        ]
        assert torch.equal(
            torch.cat([part for _, part in whole]).nan_to_num(), logits[:rows_now].nan_to_num()
        )
        ids = torch.zeros(rows_now, dtype=torch.int64, device=device)
        for rank, (mine, part) in zip(ranks, whole, strict=True):
            own = Filters(filters.top_k[mine], filters.top_p[mine], filters.min_p[mine])
            drawn = sample_triton(part, *(column[mine] for column in rows), own)
            ids += rank.join(drawn, mine, rows_now) + 1
        first = Filters(filters.top_k[:rows_now], filters.top_p[:rows_now], filters.min_p[:rows_now])
        expected = sample_triton(logits[:rows_now], *(column[:rows_now] for column in rows), first)
        assert torch.equal(ids - 1, expected)
    assert rows_now == 1 or (expected[1:4] == -1).all()


# ---- filters ----

# (top_k, top_p, min_p); 0, 1 and 0 keep all
FILTERS = (
    (0, 0.95, 0.0),
    (20, 0.95, 0.0),
    (20, 1.0, 0.0),
    (1, 1.0, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (5, 0.5, 0.02),
    (0, 0.3, 0.3),
    (0, 1e-30, 0.0),
    (0, 0.05, 0.0),
    (300, 0.9999, 1e-6),
    (2**31 - 1, 1.0, 0.0),
    (0, 1.0, 0.0),
    (700, 0.2, 0.0),
)


def make_filters(count: int, device: str) -> Filters:
    rows = [FILTERS[i % len(FILTERS)] for i in range(count)]
    top_k, top_p, min_p = zip(*rows, strict=True)
    return Filters(
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=F32, device=device),
        torch.tensor(min_p, dtype=F32, device=device),
    )


def kept_by_sorting(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """The tokens that the filters keep of logits [V], by definition: a stable sort, sums in float64."""
    wide = logits.double()
    order = wide.argsort(descending=True, stable=True)
    scaled = (wide[order] - wide.max()) / temperature
    keep = scaled >= (math.log(min_p) if min_p else -math.inf)
    if top_k:
        keep[top_k:] = False
    probs = scaled.masked_fill(~keep, -math.inf).softmax(-1)
    keep &= (probs.cumsum(-1) - probs < float(np.float32(top_p))) | (top_p == 1)
    return set(order[keep & (probs > 0)].tolist())


def adversarial_logits(vocab: int, device: str) -> list[torch.Tensor]:
    """All equal, two values, one finite, few finite, a bf16 grid, rising, falling, peaked, 0 and -0."""
    half = torch.arange(vocab, device=device) % 2
    few = torch.full((vocab,), -math.inf, device=device)
    few[:: max(1, vocab // 7)] = randn(len(few[:: max(1, vocab // 7)]), dtype=F32, device=device)
    one = torch.full((vocab,), -math.inf, device=device)
    one[vocab // 3] = -5.0
    rising = torch.linspace(-8, 8, vocab, device=device)
    coarse = (3 * randn(vocab, dtype=F32, device=device)).round()
    grid = randn(vocab, dtype=F32, device=device).bfloat16().float()
    equal, zeros = torch.zeros(vocab, device=device), torch.where(half > 0, 0.0, -0.0)
    return [equal, 2.0 * half, one, few, rising, rising.flip(0), coarse, grid, 8 * grid, zeros]


def check_filters(count: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Kernel and reference draw the same token for each filter; sorting the vocabulary keeps it."""
    filters = make_filters(count, device)
    rows = make_rows(count, device, (0.6, 1.0, 0.0, 3.0, 0.05))
    for base in adversarial_logits(vocab, device):
        logits = base.to(dtype).expand(count, -1).contiguous()
        ids = sample_triton(logits, *rows.pick(ALL), filters)
        assert torch.equal(ids, sample_reference(logits, *rows.pick(ALL), filters)), base
        for row, token in enumerate(ids.tolist()):
            temperature = float(rows.temperature[row])
            if temperature == 0:
                assert token == int(base.to(dtype).argmax())
                continue
            kept = kept_by_sorting(logits[row], temperature, *FILTERS[row % len(FILTERS)])
            assert token in kept, (row, FILTERS[row % len(FILTERS)])


def check_filters_keep_all_that_they_should(sampler: Sampler, vocab: int, draws: int, device: str) -> None:
    """Many draws give exactly the tokens that sorting keeps, each with its probability: chi-square.

    Rows differ in their position, and neighbouring rows in their filters.
    """
    for base in (
        *adversarial_logits(vocab, device)[:4],
        0.7 * randn(vocab, dtype=F32, device=device).bfloat16(),
    ):
        for index, case in enumerate(FILTERS):
            top_k, top_p, min_p = case
            temperature = (0.7, 1.0, 2.0)[index % 3]
            every = slice(index, len(FILTERS) * draws, len(FILTERS))
            count = len(FILTERS) * draws
            positions = torch.arange(count, device=device, dtype=torch.int32)[every]
            size = len(positions)
            own = Filters(
                torch.full((size,), top_k, dtype=torch.int32, device=device),
                torch.full((size,), top_p, device=device),
                torch.full((size,), min_p, device=device),
            )
            seeds = torch.full((size,), 77, device=device)
            column = torch.full((size,), temperature, device=device)
            ids = sampler(base.float().expand(size, -1).contiguous(), column, seeds, positions, own)
            kept = sorted(kept_by_sorting(base, temperature, *case))
            observed = torch.bincount(ids, minlength=vocab).double()
            assert not observed.index_fill(0, torch.tensor(kept, device=device), 0).any(), case
            expected = size * (base.double()[kept] / temperature).softmax(-1)
            likely = expected >= 5
            if likely.sum() > 1:
                error = ((observed[kept] - expected).square() / expected)[likely].sum()
                freedom = float(likely.sum()) - 1
                assert error < freedom + 5 * (2 * freedom) ** 0.5 + 10, (case, float(error), freedom)


def check_neutral_filters_change_nothing(vocab: int, device: str) -> None:
    count = 40
    logits = randn(count, vocab, dtype=F32, device=device)
    rows = make_rows(count, device)
    neutral = Filters(
        torch.zeros(count, dtype=torch.int32, device=device),
        torch.ones(count, device=device),
        torch.zeros(count, device=device),
    )
    for sampler in SAMPLERS:
        assert torch.equal(sampler(logits, *rows.pick(ALL)), sampler(logits, *rows.pick(ALL), neutral))


def check_sampling_keys(sampler: Sampler, device: str) -> None:
    """Each word of the seed and the position changes the draw; equal keys repeat it."""
    count, vocab = 8, 4000
    logits = torch.zeros(count, vocab, device=device)
    temperature = torch.ones(count, device=device)
    seeds = torch.tensor([0, 0, 1, 1 << 32, -1, 0, 7 << 40, 0], device=device)
    positions = torch.tensor([0, 1, 0, 0, 0, 2**31 - 1, 0, 0], dtype=torch.int32, device=device)
    ids = sampler(logits, temperature, seeds, positions).tolist()
    assert ids[0] == ids[7]
    assert len(set(ids[:7])) == 7


def check_sampling_distribution(sampler: Sampler, draws: int, device: str, *, blocks: int = 1) -> None:
    """Chi-square against softmax, for draws that differ in their position and in each word of their seed.

    32 tokens have a positive probability, spread over as many blocks of the vocabulary.
    """
    finite = torch.linspace(-3, 3, 32, device=device)
    logits = torch.full((32, 1 if blocks == 1 else blocks * SAMPLE_BLOCK // 32), -math.inf, device=device)
    logits[:, -1] = finite[torch.randperm(32, generator=torch.Generator().manual_seed(5)).to(device)]
    logits = logits.flatten()
    counter = torch.arange(draws, device=device)
    fixed = torch.full_like(counter, 1234)
    for temperature in (0.5, 1.0, 2.0):
        expected = draws * (logits.double() / temperature).softmax(-1)
        for seeds, positions in ((fixed, counter), (counter, fixed), (counter * 2**32, fixed)):
            column = torch.full((draws,), temperature, device=device)
            parts = [
                sampler(logits.expand(len(part), -1), *(x[part] for x in (column, seeds, positions.int())))
                for part in counter.split(4096 if blocks > 1 else draws)
            ]
            observed = torch.bincount(torch.cat(parts), minlength=len(logits)).double()
            assert observed.sum() == draws
            assert not observed[expected == 0].any()
            error = ((observed - expected).square() / expected)[expected > 0]
            assert error.sum() < 70, (temperature, error.sum())  # 31 degrees of freedom: p = 8e-5


@jit()
def _pair_kernel(
    seeds_ptr: tl.tensor, positions_ptr: tl.tensor, out_ptr: tl.tensor, count: int, BLOCK: tl.constexpr
) -> None:
    row = tl.arange(0, BLOCK)
    live = row < count
    first, second = random_pair(
        tl.load(seeds_ptr + row, mask=live, other=0),
        tl.load(positions_ptr + row, mask=live, other=0),
        row % 2,
    )
    tl.store(out_ptr + row, first.to(tl.int64), mask=live)
    tl.store(out_ptr + count + row, second.to(tl.int64), mask=live)


def check_random_pairs(device: str) -> None:
    """Kernel and reference draw the same bits. For random and consecutive keys, each bit is set about half
    the time, and any two bits agree about half the time.
    """
    count = 8192
    rows = make_rows(count, device)
    seeds = rows.seeds.clone()
    positions = rows.positions.clone()
    seeds[: count // 2] = torch.arange(count // 2, device=device) // 64
    positions[: count // 2] = torch.arange(count // 2, device=device, dtype=torch.int32) % 64
    out = torch.empty((2, count), dtype=torch.int64, device=device)
    _pair_kernel[(1,)](seeds, positions, out, count, BLOCK=count)
    pair = random_pair_reference(seeds, positions)
    again = random_pair_reference(seeds, positions, 1)
    odd = torch.arange(count, device=device) % 2 > 0
    assert torch.equal(out, torch.stack(again).where(odd, torch.stack(pair)))
    for half in (slice(None, count // 2), slice(count // 2, None)):
        bits = torch.cat([x[half, None] >> torch.arange(32, device=device) & 1 for x in pair], dim=1).double()
        signs = 2 * bits - 1  # [rows, 64]
        noise = (count // 2) ** -0.5
        assert signs.mean(0).abs().max() < 4.5 * noise
        agreement = signs.T @ signs / len(signs) - torch.eye(64, device=device)
        assert agreement.abs().max() < 5 * noise
