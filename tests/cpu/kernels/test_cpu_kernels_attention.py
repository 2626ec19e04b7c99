"""The CPU's attention kernels, and the rotation and store before them, against their twins in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_cases import Heads, check_copy_cells, fused_queries, make_cache, variant_of
from tensors import BF16, F16, F32, assert_near, randn

from nanovllm.kernels.attention_reference import (
    paged_decode_attention_reference,
    paged_prefill_attention_reference,
)
from nanovllm.kernels.copy_cells import copy_cells_reference
from nanovllm.kernels.paged import PLAIN, KVCache, Variant
from nanovllm.kernels.rotary import Rotation, qk_norm_rope_store_reference

pytest.importorskip("numba")

from nanovllm.cpu.kernels.copy_cells import copy_cells
from nanovllm.cpu.kernels.decode_attention import paged_decode_attention
from nanovllm.cpu.kernels.prefill_attention import paged_prefill_attention
from nanovllm.cpu.kernels.recording import Arena, Recording
from nanovllm.cpu.kernels.rotary import qk_norm_rope_store
from nanovllm.cpu.kernels.team import num_threads

SMALL = Heads(4, 2, 24, 7)
PAIRS = Heads(4, 1, 32, 16, BF16)  # in a prefill its products are of pairs, on a CPU that has them
SHAPES = [
    SMALL,
    Heads(3, 3, 80, 256, F16),
    Heads(5, 1, 256, 1, F32),
    PAIRS,
    *(
        pytest.param(each, marks=pytest.mark.full)
        for each in (
            Heads(8, 1, 64, 64, BF16),
            Heads(6, 2, 16, 256),
            Heads(12, 2, 128, 64, BF16),
            Heads(7, 1, 96, 64),
        )
    ),
]
VARIANTS = [(None, None, False), (1, None, False), (100, None, True), (600, 5.0, True)]
CONTEXTS = (1, 600, 0, 129, 4500)


def heads_first(cache: torch.Tensor) -> torch.Tensor:
    """The same cells, in memory where a block's heads come before its positions."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def turned(cache: KVCache) -> KVCache:
    return KVCache(heads_first(cache.k), heads_first(cache.v))


@pytest.mark.parametrize(("window", "softcap", "sinks"), VARIANTS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_decode(heads: Heads, window: int | None, softcap: float | None, sinks: bool) -> None:
    """Unused cells are NaN; contexts have one part or several, and one is empty."""
    variant = variant_of(heads, "cpu", window, softcap, sinks)
    cache = make_cache(CONTEXTS, heads, "cpu")
    q = fused_queries(len(CONTEXTS), heads, "cpu")
    places = cache.tables, cache.contexts, 5000, heads.head_dim**-0.5, variant
    expected = paged_decode_attention_reference(
        q.float(), KVCache(*(x.float() for x in cache.kv[:2])), *places
    )
    for kv in (turned(cache.kv), cache.kv):
        assert_near(paged_decode_attention(q, kv, *places), expected)


def prefill_inputs(heads: Heads, contexts: Sequence[int], new: Sequence[int]) -> tuple[Any, ...]:
    """(q, cache, tables, bounds, contexts, longest) of sequences with so many new tokens, and 3 tokens of
    padding."""
    cache = make_cache(contexts, heads, "cpu")
    q = fused_queries(sum(new) + 3, heads, "cpu")
    bounds = torch.tensor([0, *new]).cumsum(0).int()
    return q, cache.kv, cache.tables, bounds, cache.contexts, max(new)


@pytest.mark.parametrize(("window", "softcap", "sinks"), VARIANTS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_prefill(heads: Heads, window: int | None, softcap: float | None, sinks: bool) -> None:
    variant = variant_of(heads, "cpu", window, softcap, sinks)
    q, kv, *places = prefill_inputs(heads, (1, 150, 0, 129, 900), (1, 150, 0, 60, 5))
    scale = heads.head_dim**-0.5
    wide = KVCache(kv.k.float(), kv.v.float())
    expected = paged_prefill_attention_reference(q.float(), wide, *places, scale, variant)
    for cells in (turned(kv), kv):
        assert_near(paged_prefill_attention(q, cells, *places, scale, variant), expected)


@pytest.mark.parametrize("heads", [SMALL, PAIRS], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_with_any_number_of_threads(
    window: int | None, heads: Heads
) -> None:
    contexts = (700, 33, 4500)
    cache = make_cache(contexts, heads, "cpu")
    kv, q, variant = turned(cache.kv), fused_queries(3, heads, "cpu"), Variant(window)
    decoded, filled = [], []
    new = 250, 33, 10
    rows, _, tables, bounds, lens, longest = prefill_inputs(heads, contexts, new)
    for threads in (1, 2, 3):
        token = num_threads.set(threads)
        decoded.append(paged_decode_attention(q, kv, cache.tables, cache.contexts, 40960, 0.2, variant))
        filled.append(paged_prefill_attention(rows, kv, tables, bounds, lens, longest, 0.2, variant))
        num_threads.reset(token)
    for row, context in enumerate(contexts):
        own = slice(row, row + 1)
        alone = paged_decode_attention(
            q[own], kv, cache.tables[own], cache.contexts[own], context, 0.2, variant
        )
        decoded.append(torch.cat((decoded[0][:row], alone, decoded[0][row + 1 :])))
        first, end = bounds[row], bounds[row + 1]
        for start in (first, min(first + 7, end - 3), end - 3):  # all new tokens, and the last ones
            part = torch.tensor([0, end - start], dtype=torch.int32)
            places = tables[own], part, lens[own], int(end - start)
            got = paged_prefill_attention(rows[start:end], kv, *places, 0.2, variant)
            assert got.equal(filled[0][start:end])
    assert all(each.equal(decoded[0]) for each in decoded)
    assert all(each.equal(filled[0]) for each in filled)


def test_a_key_that_is_nan_spoils_only_queries_that_attend_to_it() -> None:
    """Key 70 of a context of 100: of queries from 60 on those from 70 on; with a window of 5 up to 74."""
    cache = make_cache((100,), SMALL, "cpu")
    block = cache.tables[0, 70 // SMALL.page]
    cache.kv.k[block, 70 % SMALL.page, 0] = math.nan  # of the first of two KV heads
    kv, q = turned(cache.kv), fused_queries(40, SMALL, "cpu")
    bounds = torch.tensor([0, 40], dtype=torch.int32)
    for window, spoilt in ((None, range(10, 40)), (5, range(10, 15))):
        places = cache.tables, bounds, cache.contexts, 40, 0.2, Variant(window)
        found = paged_prefill_attention(q, kv, *places).isnan().all(2)
        assert found.any(1).nonzero().flatten().tolist() == list(spoilt)
        assert not found[:, 2:].any()
        decoded = paged_decode_attention(q[:1], kv, cache.tables, cache.contexts, 100, 0.2, Variant(window))
        assert decoded.isnan().all(2).tolist() == [[window is None] * 2 + [False] * 2]


def test_a_recorded_decode_reads_the_contexts_of_each_run() -> None:
    cache = make_cache(CONTEXTS, SMALL, "cpu")
    kv, q = turned(cache.kv), fused_queries(len(CONTEXTS), SMALL, "cpu")
    contexts = torch.zeros_like(cache.contexts)
    places = cache.tables, contexts, 8000, 0.2, PLAIN
    recording = Recording.record(lambda: paged_decode_attention(q, kv, *places), Arena())
    for shorter in (0, 1, 300):
        contexts.copy_((cache.contexts - shorter).clamp(min=0))
        assert recording.replay().equal(paged_decode_attention(q, kv, *places))
    assert not recording.result.isnan().any()


@pytest.mark.parametrize("heads", [*SHAPES, Heads(3, 3, 7, 5), Heads(1, 1, 9, 4, BF16)], ids=str)
def test_copies_of_cells(heads: Heads) -> None:
    """Also of heads that are no whole vectors, and of an odd number of 2-byte elements."""
    for turn in (heads_first, torch.clone):
        for threads in (1, 3):
            token = num_threads.set(threads)
            check_copy_cells(copy_cells, heads, "cpu", turn)
            num_threads.reset(token)
        check_copy_cells(copy_cells_reference, heads, "cpu", turn)


def fused(tokens: int, heads: Heads) -> tuple[torch.Tensor, ...]:
    width = heads.q_heads + 2 * heads.kv_heads
    rows = randn(tokens, width, heads.head_dim, dtype=heads.dtype, seed=5)
    return rows.split((heads.q_heads, heads.kv_heads, heads.kv_heads), dim=1)


def weights(heads: Heads, dtype: torch.dtype | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if dtype is None:
        return None, None
    q_weight, k_weight = 1 + 0.1 * randn(2, heads.head_dim, seed=6)
    return q_weight.to(dtype), k_weight.to(dtype)


@pytest.mark.parametrize("heads", [*SHAPES, Heads(4, 2, 64, 16, BF16)], ids=str)
@pytest.mark.parametrize(("rotary", "interleaved"), [(0, False), (8, False), (8, True), (0, True)])
def test_rotation_and_store(heads: Heads, rotary: int, interleaved: bool) -> None:
    """Some tokens have no slot, one value is infinite; all other cells keep their NaN."""
    q, k, v = fused(9, heads)
    v[4, -1, 3] = math.inf
    slots = torch.tensor([5, -1, 0, 17, 9, 1, -1, 2, 30], dtype=torch.int32)
    angles = 6 * torch.rand(50, heads.head_dim // 2, generator=torch.Generator().manual_seed(7))
    if rotary:
        angles[:, rotary // 2 :] = 0
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    blocks = -(-31 // heads.page)
    for weight_dtype in (None, heads.dtype, F32):
        for position_dtype in (torch.int32, torch.int64):
            positions = torch.arange(40, 49, dtype=position_dtype)
            norms = weights(heads, weight_dtype)
            rotation = Rotation(positions, table, *norms, 1e-6, rotary, interleaved)
            shape = blocks, heads.page, heads.kv_heads, heads.head_dim
            expected, found = (
                KVCache(*(heads_first(torch.full(shape, math.nan, dtype=heads.dtype)) for _ in "kv"))
                for _ in range(2)
            )
            turned_q = qk_norm_rope_store(q, k, v, rotation, found, slots)
            assert_near(turned_q, qk_norm_rope_store_reference(q, k, v, rotation, expected, slots))
            assert found.v.nan_to_num(7.0).equal(expected.v.nan_to_num(7.0))
            assert found.k.isnan().equal(expected.k.isnan())
            assert_near(found.k.nan_to_num(0.0), expected.k.nan_to_num(0.0))
            for threads in (1, 3):
                token = num_threads.set(threads)
                assert qk_norm_rope_store(
                    q[3:], k[3:], v[3:], rotation._replace(positions=positions[3:]), found, slots[3:]
                ).equal(turned_q[3:])
                num_threads.reset(token)
