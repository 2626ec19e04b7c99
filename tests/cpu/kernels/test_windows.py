"""Windows, softcaps and sinks: the interpreted kernels and their twins against exact computations."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import attention_cases
import inside
import pytest
import torch
from attention_cases import Heads, variant_of
from tensors import BF16, F16, F32, FP8

from nanovllm.attention.backends import TritonBackend
from nanovllm.attention.base import AttentionMetadata, SharedPrefixes
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.flash_attn.backend import FlashAttnBackend
from nanovllm.kernels import decode_attention
from nanovllm.kernels.compat import INTERPRET
from nanovllm.kernels.paged import Variant
from nanovllm.kernels.prefill_attention import Tiles, paged_prefill_attention_triton

CPU = "cpu"
interpreted = pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs these")
pytestmark = [
    interpreted,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # NumPy's
]
# Smaller than a tile, across tiles and chunks, of a whole context and beyond it; window, softcap and sinks
VARIANTS = [
    (1, None, False),
    (13, None, True),
    (70, 2.0, False),
    (600, None, True),
    (5000, 1.5, False),
    (None, None, True),
    (130, 30.0, True),
]


@pytest.mark.parametrize(("window", "softcap", "sinks"), VARIANTS)
def test_decode(window: int | None, softcap: float | None, sinks: bool) -> None:
    heads = Heads(4, 2, 16, 16)
    contexts = [1, 14, 0, 129, 600, 650]
    attention_cases.check_decode(contexts, heads, CPU, variant_of(heads, CPU, window, softcap, sinks))


@pytest.mark.parametrize(
    "heads",
    [
        Heads(2, 1, 256, 16, F16),
        Heads(8, 1, 24, 32, BF16),
        Heads(7, 1, 80, 48, F16, FP8),
        Heads(20, 1, 8, 256, F16),
    ],
    ids=str,
)
def test_decode_and_prefill_of_other_heads(heads: Heads) -> None:
    variant = variant_of(heads, CPU, heads.page + 3, 5.0, True)
    page = heads.page
    attention_cases.check_decode([1, page, page + 4, 2 * page + 5], heads, CPU, variant)
    lengths = [(page + 9, 2 * page + 9), (3, 3), (1, page + 2), (2, 0)]
    attention_cases.check_prefill(lengths, heads, CPU, variant=variant)


@pytest.mark.parametrize(("window", "softcap", "sinks"), VARIANTS)
def test_prefill(window: int | None, softcap: float | None, sinks: bool) -> None:
    heads = Heads(4, 2, 16, 16)
    lengths = [(140, 140), (1, 700), (0, 9), (3, 0), (65, 259), (14, 14)]
    variant = variant_of(heads, CPU, window, softcap, sinks)
    attention_cases.check_prefill(lengths, heads, CPU, variant=variant)


@pytest.mark.parametrize(
    "tiles", [Tiles(16, 64, 4, 1), Tiles(64, 16, 4, 1), Tiles(32, 32, 4, 1, described=True)], ids=str
)
def test_prefill_by_other_tiles(tiles: Tiles) -> None:
    """More rows than columns and fewer, and keys read through descriptors."""
    heads = Heads(6, 2, 32, 64, BF16)
    for window in (5, 40, 100):
        variant = variant_of(heads, CPU, window, None, True)
        attention_cases.check_prefill([(131, 259), (31, 31), (1, 100)], heads, CPU, tiles, variant)


@pytest.mark.parametrize("chunks", [[7], [15, 16, 17], [100, 20]], ids=str)
def test_prefill_bits_do_not_depend_on_chunks(chunks: list[int]) -> None:
    heads = Heads(2, 1, 32, 16)
    attention_cases.check_chunked_prefill(150, chunks, heads, CPU, variant_of(heads, CPU, 21, 9.0, True))


def test_a_spoilt_key_spoils_only_the_queries_whose_window_has_it() -> None:
    for window in (3, 11, 40):
        attention_cases.check_keys_that_are_not_finite(
            CPU, variant_of(Heads(2, 2, 64, 16), CPU, window, None)
        )


@pytest.mark.parametrize("tile", [16, 64])
def test_shared_prefixes_with_sinks_and_softcaps(tile: int) -> None:
    """Each row counts its sinks once, in the chunk that the first of its group reads."""
    heads = Heads(4, 2, 16, 16)
    variant = variant_of(heads, CPU, None, 4.0, True)
    contexts = [1100, 1030, 513, 0, 1025, 40, 600]
    attention_cases.check_shared_prefixes(contexts, {1: 0, 4: 0, 6: 2, 5: 2}, heads, CPU, tile, variant)


def test_a_layer_with_a_window_ignores_shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads(4, 2, 16, 16)
    cache = attention_cases.make_cache([700, 600], heads, CPU)
    q = attention_cases.fused_queries(2, heads, CPU)
    seen = []
    run = decode_attention.paged_decode_attention_triton
    name = "nanovllm.attention.backends.paged_decode_attention_triton"
    monkeypatch.setattr(name, lambda *args, **options: seen.append(args[6]) or run(*args, **options))
    nothing = torch.zeros(2, dtype=torch.int32)
    shared = SharedPrefixes(torch.full((1, 4), -1, dtype=torch.int32), nothing[:1], nothing, nothing[:1], 256)
    meta = AttentionMetadata(nothing, cache.contexts, cache.tables, 700, shared=shared)
    for window in (None, 100):
        TritonBackend().forward(q, cache.kv, meta, AttentionSpec(4, 2, 16, window=window))
    assert [each is None for each in seen] == [False, True]


@pytest.mark.parametrize(("window", "chunks"), [(128, 0), (500, 0), (1024, 2)])
def test_only_a_window_is_split_and_read(window: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, and so programs and partial results, follow the window and not the longest context. Blocks
    before the window's first tile are not read: there NaN changes nothing."""
    heads, contexts = Heads(2, 1, 16, 16), [3000, 2191, 40]
    cache = attention_cases.make_cache(contexts, heads, CPU)
    q = attention_cases.fused_queries(3, heads, CPU)
    merged, merge = [], decode_attention.merge_chunks
    monkeypatch.setattr(
        decode_attention, "merge_chunks", lambda *args: merged.append(args[0].shape[2]) or merge(*args)
    )
    inputs = q, cache.kv, cache.tables, cache.contexts, max(contexts), 0.25
    variant = Variant(window)
    expected = decode_attention.paged_decode_attention_triton(*inputs, variant=variant)
    assert merged == ([chunks] if chunks else [])
    for row, context in enumerate(contexts[:2]):
        unread = (context - window) // 128 * 128 // heads.page
        cache.kv.v[cache.tables[row, :unread].long()] = torch.nan
    assert torch.equal(decode_attention.paged_decode_attention_triton(*inputs, variant=variant), expected)
    prefill, new = paged_prefill_attention_triton, 70
    bounds = torch.tensor([0, new, new, new], dtype=torch.int32)
    q = attention_cases.fused_queries(new, heads, CPU)
    inputs = q, cache.kv, cache.tables, bounds, cache.contexts, new, 0.25
    near = Variant(window - 128 - new) if window > 300 else Variant(1)  # its first tile was not spoilt
    assert prefill(*inputs, variant=near).isfinite().all()


class FlashAttn(ModuleType):
    """The package by its documentation: query i of n, in a context of m, sees the keys from i + m - n - left
    to i + m - n + right.
    """

    __version__ = "2.8.3"

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        bounds = torch.arange(len(q) + 1, dtype=torch.int32)
        return self._attend(q[:, 0], k, v, bounds, cache_seqlens, **options)[:, None]

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> torch.Tensor:
        assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
        return self._attend(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), **options)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: torch.Tensor,
        contexts: torch.Tensor,
        *,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int] = (-1, 0),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        assert causal and window_size[1] == 0
        variant = Variant(window_size[0] + 1 or None, softcap or None)
        rows = []
        for row, context in enumerate(contexts.tolist()):
            table = block_table[row, : -(-context // k.shape[1])].long()
            cells = (each[table].flatten(0, 1)[:context] for each in (k, v))
            new = q[bounds[row] : bounds[row + 1]]
            rows.append(attention_cases.naive_attention(new, *cells, softmax_scale, variant))
        return torch.cat(rows).to(q.dtype)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(4, 2, 16),
        AttentionSpec(4, 2, 16, window=20),
        AttentionSpec(4, 1, 24, window=5, softcap=2.0, scale=1.0),
        AttentionSpec(2, 2, 256, softcap=2.0, scale=1.0),
    ],
    ids=["plain", "window", "all", "softcap"],
)
def test_backends_are_near_the_reference(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.look_for_flash_attn_again(monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttn("flash_attn"))
    for backend in (TritonBackend(), FlashAttnBackend()):
        attention_cases.check_backend(backend, spec, 16, F32, CPU)
