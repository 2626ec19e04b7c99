"""Checks of paged attention for any device: decode, prefill, and reading an FP8 cache.

A check compares the Triton launcher and the torch reference with a computation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from tensors import F16, F32, FP8, assert_near, randn

from nanovllm.attention.backends import AttentionBackend
from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.kernels import decode_attention
from nanovllm.kernels.attention_reference import (
    paged_decode_attention_reference,
    paged_prefill_attention_reference,
)
from nanovllm.kernels.compat import INTERPRET, jit, tl
from nanovllm.kernels.decode_attention import (
    CHUNK,
    SHARED_CHUNK,
    Shared,
    SharedUnit,
    paged_decode_attention_triton,
)
from nanovllm.kernels.paged import PLAIN, KVCache, Variant, fp8_pair
from nanovllm.kernels.prefill_attention import Tiles, paged_prefill_attention_triton
from nanovllm.shared_prefixes.finder import find_shared_prefixes

DECODE = (paged_decode_attention_triton, paged_decode_attention_reference)
PREFILL = (paged_prefill_attention_triton, paged_prefill_attention_reference)


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


def check_copy_cells(
    copy_cells: Callable[..., None],
    heads: Heads,
    device: str,
    turned: Callable[[torch.Tensor], torch.Tensor] = lambda cache: cache,
) -> None:
    """Any bits are copied, and no other cell changes: copies of one cell and of all but one, two from one
    block and two to one block. turned: to the memory format of a backend."""
    page, dtype = heads.page, heads.cache_dtype or heads.dtype
    rng, shape = torch.Generator().manual_seed(3), (9, page, heads.kv_heads, heads.head_dim * dtype.itemsize)
    k, v = (torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8).to(device) for _ in "kv")
    half = max(1, page // 2)
    copies = [
        [7, 1, 0, page - 1],
        [7, 0, 0, 1],
        [3, 5, 0, half],
        [4, 5, half, page - half],
        [2, 8, page - 1, 1],
    ]
    expected = [k.clone(), v.clone()]
    for source, target, first, count in copies:
        for cells in expected:
            cells[target, first : first + count] = cells[source, first : first + count]
    found = [turned(each.view(dtype)) for each in (k, v)]
    copy_cells(*found, torch.tensor(copies, dtype=torch.int32, device=device), max(page - 1, 1))
    for cells, own in zip(found, expected, strict=True):
        assert cells.contiguous().view(torch.uint8).equal(own)


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: Variant = PLAIN
) -> torch.Tensor:
    """Exact causal attention of the last n positions: q [n, q_heads, d], k and v [context, kv_heads, d]."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if variant.softcap is not None:
        scores = variant.softcap * (scores / variant.softcap).tanh()
    unseen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    if variant.window is not None:
        unseen |= torch.ones_like(unseen).tril(len(k) - len(q) - variant.window)
    weights = scores.masked_fill(unseen, -math.inf)
    if variant.sinks is not None:
        sinks = variant.sinks.double()[:, None, None].expand(*weights.shape[:2], 1)
        weights = torch.cat((weights, sinks), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights.softmax(-1)[..., : len(k)], v)


def variant_of(
    heads: Heads, device: str, window: int | None, softcap: float | None, sinks: bool = False
) -> Variant:
    """A variant, with sinks that differ by head."""
    drawn = 2 * randn(heads.q_heads, dtype=heads.dtype, device=device, seed=77)
    return Variant(window, softcap, drawn if sinks else None)


def fused_queries(tokens: int, heads: Heads, device: str) -> torch.Tensor:
    """Queries as a strided view, as in the output of a fused projection."""
    shape = (tokens, heads.q_heads + 2 * heads.kv_heads, heads.head_dim)
    return randn(*shape, dtype=heads.dtype, device=device, seed=99)[:, : heads.q_heads]


def check_decode(contexts: Sequence[int], heads: Heads, device: str, variant: Variant = PLAIN) -> None:
    """Kernel and reference are right; neither the bound on the context nor the batch changes a bit of the
    kernel's result.
    """
    cache = make_cache(contexts, heads, device)
    q = fused_queries(len(contexts), heads, device)
    scale = heads.head_dim**-0.5
    expected = torch.zeros(q.shape, dtype=torch.float64, device=device)
    for row, context in enumerate(contexts):
        if context:
            cells = cache.keys[row], cache.values[row]
            expected[row] = naive_attention(q[row : row + 1], *cells, scale, variant)[0]
    longest = max(contexts)
    for attend in DECODE:
        out = attend(q, cache.kv, cache.tables, cache.contexts, longest, scale, variant=variant)
        assert out.shape == q.shape
        assert out.is_contiguous()
        assert_near(out, expected)
        assert not out[cache.contexts == 0].any()
    run = partial(paged_decode_attention_triton, variant=variant)
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


def check_backend(
    backend: AttentionBackend, spec: AttentionSpec, page: int, dtype: torch.dtype, device: str
) -> None:
    """A backend's decode and prefill, of whole contexts and of chunks, are near those of the reference."""
    heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, page, dtype)
    # new tokens and context of each sequence, also of several pages and longer than a window
    lengths = [(1, 1), (7, 7), (page, page), (3, 2 * page + 5), (page + 9, 3 * page + 1)]
    contexts = [context for _, context in lengths]
    cache, longest = make_cache(contexts, heads, device), max(contexts)
    bounds = (
        torch.tensor([0, *each], device=device).cumsum(0, dtype=torch.int32)
        for each in zip(*lengths, strict=True)
    )
    prefill = *bounds, max(queries for queries, _ in lengths)
    for tokens, ranges in ((len(lengths), ()), (sum(queries for queries, _ in lengths), prefill)):
        q = fused_queries(tokens, heads, device)
        meta = AttentionMetadata(cache.contexts, cache.contexts, cache.tables, longest, *ranges)
        out = backend.forward(q, cache.kv, meta, spec)
        assert out.shape == q.shape
        assert_near(out, ReferenceBackend().forward(q, cache.kv, meta, spec))


def check_shared_prefixes(
    contexts: Sequence[int],
    shares: dict[int, int],
    heads: Heads,
    device: str,
    tile: int = 16,
    variant: Variant = PLAIN,
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
    out, alone = (paged_decode_attention_triton(*inputs, plan, invariant, variant) for plan in (shared, None))
    if not invariant:
        assert_near(out, alone)
        for chunk in (CHUNK, 2 * CHUNK):
            whole = {name: getattr(shared, name) // chunk * chunk for name in ("lens", "skips")}
            coarse = shared._replace(chunk=chunk, **whole)
            assert_near(paged_decode_attention_triton(*inputs, coarse, invariant, variant), alone)
    else:
        tolerance = 0.0 if out.is_cuda else 1e-6
        torch.testing.assert_close(out, alone, rtol=tolerance, atol=tolerance)


def check_prefill(
    lengths: Sequence[tuple[int, int]],
    heads: Heads,
    device: str,
    tiles: Tiles | None = None,
    variant: Variant = PLAIN,
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
                q[begin : begin + queries], cache.keys[row], cache.values[row], scale, variant
            )
    for attend in PREFILL if tiles is None else (partial(paged_prefill_attention_triton, tiles=tiles),):
        inputs = (q, cache.kv, cache.tables, bounds, cache.contexts)
        out = attend(*inputs, int(new.max()), scale, variant=variant)
        assert out.shape == q.shape
        assert out.is_contiguous()
        # tanh of a score is off by up to 2**-23, and the softcap multiplies that
        assert_near(out, expected, factor=2 if variant.softcap and out.dtype == torch.float32 else 1)


def check_keys_that_are_not_finite(device: str, variant: Variant = PLAIN) -> None:
    """A key that is NaN makes the tokens NaN that attend to it, and changes no other token."""
    length, spoilt, heads = 40, 20, Heads(2, 2, 64, 16)
    cache = make_cache([length], heads, device)
    cells = cache.kv.k[int(cache.tables[0, spoilt // heads.page]), spoilt % heads.page]
    for new in (length, 30):  # a whole prompt, and a chunk of one
        q, bounds = (
            fused_queries(new, heads, device),
            torch.tensor([0, new], dtype=torch.int32, device=device),
        )
        for attend in PREFILL:
            inputs = (q, cache.kv, cache.tables, bounds, cache.contexts, new, heads.head_dim**-0.5)
            kept, expected = cells.clone(), attend(*inputs, variant=variant)
            cells[0] = math.nan
            out = attend(*inputs, variant=variant)
            cells.copy_(kept)
            before = spoilt - (length - new)
            after = min(new, before + (variant.window or length))
            for part in (slice(before), slice(after, None)):
                assert torch.equal(out[part], expected[part])
            assert torch.equal(out[:, 1], expected[:, 1])
            assert out[before:after, 0].isnan().all()


def check_chunked_prefill(
    length: int, chunks: Sequence[int], heads: Heads, device: str, variant: Variant = PLAIN
) -> None:
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
        run = partial(paged_prefill_attention_triton, invariant=True, variant=variant)
        return run(*inputs, longest, heads.head_dim**-0.5)

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
