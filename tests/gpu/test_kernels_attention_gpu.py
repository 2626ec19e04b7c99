"""The compiled kernels of attention and its KV cache on a CUDA device: the checks of the CPU tests, a CUDA
graph, a huge cache.
"""

from __future__ import annotations

import attention_cases
import layer_cases
import pytest
import sampling_cases
import torch
from attention_cases import Heads
from needs import needs_kv_cache_dtype
from tensors import BF16, F16, F32, FP8, assert_near, randn

from nanovllm.kernels.attention_reference import paged_decode_attention_reference
from nanovllm.kernels.copy_cells import copy_cells_reference, copy_cells_triton
from nanovllm.kernels.decode_attention import paged_decode_attention_triton
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.prefill_attention import LONG, SHORT, WIDE
from nanovllm.kernels.rotary import Rotation, qk_norm_rope_store
from nanovllm.kernels.sampling import sample_triton

pytestmark = pytest.mark.gpu

GPU = "cuda"
SHAPES = [
    Heads(16, 8, 128, 256, BF16),
    Heads(16, 8, 128, 16, BF16),
    Heads(32, 8, 128, 16, F16),
    Heads(64, 8, 64, 32, BF16),
    Heads(14, 2, 64, 16, F32),
    Heads(20, 1, 80, 48, BF16),  # more query heads per KV head than a tile holds
    Heads(6, 3, 24, 16, BF16),
    Heads(8, 8, 256, 16, BF16),
    Heads(4, 2, 128, 16, F32),
    Heads(4, 2, 256, 16, F32),
    Heads(2, 2, 8, 16, F16),
]
ATTENTION_SHAPES = [
    *SHAPES,
    Heads(5, 1, 128, 784, BF16),
    Heads(16, 1, 64, 256, BF16),
    Heads(16, 8, 128, 256, BF16, FP8),
    Heads(32, 8, 128, 16, BF16, FP8),
    Heads(14, 2, 64, 256, F16, FP8),
    Heads(5, 1, 80, 784, BF16, FP8),
    Heads(20, 1, 80, 48, BF16, FP8),
    Heads(8, 8, 256, 32, BF16, FP8),
    Heads(2, 2, 8, 16, F16, FP8),
]
MIXED = [1, 15, 16, 17, 0, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 1025, 2048, 3000]


@pytest.mark.parametrize("heads", ATTENTION_SHAPES, ids=str)
def test_decode(heads: Heads) -> None:
    attention_cases.check_decode(MIXED, heads, GPU)


@pytest.mark.parametrize("heads", ATTENTION_SHAPES, ids=str)
def test_copies_of_cells(heads: Heads) -> None:
    for copy_cells in (copy_cells_triton, copy_cells_reference):
        attention_cases.check_copy_cells(copy_cells, heads, GPU)


@pytest.mark.parametrize("sequences", [1, 3, 17, 97, 256])
def test_decode_batches(sequences: int) -> None:
    attention_cases.check_decode([(397 * row) % 2049 for row in range(1, sequences + 1)], SHAPES[0], GPU)


@pytest.mark.parametrize("context", [8191, 8192, 8193, 20_000])
def test_decode_of_a_long_context(context: int) -> None:
    attention_cases.check_decode([context], SHAPES[0], GPU)


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
def test_decode_of_more_chunks_than_lanes(cache_dtype: torch.dtype | None) -> None:
    attention_cases.check_decode([3000, *[100] * 128, 6000], Heads(16, 8, 128, 256, BF16, cache_dtype), GPU)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(16, 8, 128, 256, BF16),
        Heads(8, 8, 128, 16, BF16),
        Heads(14, 2, 64, 256, F16),
        Heads(5, 1, 80, 784, BF16),
        Heads(16, 8, 128, 256, BF16, FP8),
    ],
    ids=str,
)
@pytest.mark.parametrize(("tile", "at_a_time"), [(16, 16), (16, 1), (64, 16), (64, 2)])
def test_decode_of_shared_prefixes(
    heads: Heads, tile: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.kernels.decode_attention._UNITS", at_a_time)
    contexts = [5000, *[4097 + 31 * row for row in range(20)], 0, 1100, 2000, 600, 513, 512]
    shares = {**dict.fromkeys(range(1, 21), 0), 23: 22, 25: 24}
    attention_cases.check_shared_prefixes(contexts, shares, heads, GPU, tile)


def test_fp8_pairs() -> None:
    attention_cases.check_fp8_pairs(GPU)


def test_decode_of_padding_alone_is_zero() -> None:
    attention_cases.check_decode([0, 0, 0], SHAPES[0], GPU)


@pytest.mark.parametrize("heads", ATTENTION_SHAPES, ids=str)
def test_prefill(heads: Heads) -> None:
    lengths = [(1, 1), (63, 63), (129, 129), (1, 700), (200, 713), (0, 9), (4, 0), (128, 1024), (577, 577)]
    attention_cases.check_prefill(lengths, heads, GPU)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_prefill_of_long_prompts(dtype: torch.dtype) -> None:
    """The tiles for many long prompts, alternating with the others; a large batch selects them by itself."""
    heads = Heads(6, 2, 128, 256, dtype)
    lengths = [(1000, 1259), (0, 5), (31, 31), (256, 256), (1, 700), (3, 0), (129, 129), (1500, 1500)]
    attention_cases.check_prefill(lengths, heads, GPU, LONG)
    attention_cases.check_prefill([(2049, 2049), (1025, 3000)], heads, GPU)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_prefill_after_long_prefixes(dtype: torch.dtype) -> None:
    """A context beyond 1,024 positions selects other tiles for the whole step."""
    lengths = [(177, 4273), (1, 1), (80, 1104), (63, 63), (0, 9), (4, 0), (65, 1025)]
    for heads in (Heads(6, 2, 128, 256, dtype), Heads(4, 2, 80, 48, dtype)):
        attention_cases.check_prefill(lengths, heads, GPU)
        attention_cases.check_prefill(lengths, heads, GPU, WIDE)
        attention_cases.check_prefill(lengths, heads, GPU, SHORT)


@pytest.mark.parametrize(
    "heads", [SHAPES[0], SHAPES[3], SHAPES[4], SHAPES[7], Heads(16, 8, 128, 256, BF16, FP8)], ids=str
)
@pytest.mark.parametrize("chunks", [[1, 400], [7], [255, 256, 257], [1000, 20]], ids=str)
def test_prefill_bits_do_not_depend_on_chunks(chunks: list[int], heads: Heads) -> None:
    attention_cases.check_chunked_prefill(1111, chunks, heads, GPU)


def test_keys_that_are_not_finite() -> None:
    attention_cases.check_keys_that_are_not_finite(GPU)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17, 97])
def test_store(tokens: int, heads: Heads) -> None:
    layer_cases.check_store(tokens, heads, GPU)
    if torch.cuda.get_device_capability() >= (8, 9):  # before this, Triton has no FP8
        layer_cases.check_store(tokens, heads, GPU, fp8=True)


def test_quantised_values_that_are_not_finite_spoil_their_key() -> None:
    """They are stored as 0 and their key as NaN; finite values that are too large are clamped."""
    needs_kv_cache_dtype("fp8")
    heads = Heads(2, 1, 16, 16, BF16)
    k_cache, v_cache = torch.zeros(2, 1, 16, 1, 16, device=GPU).to(torch.float8_e4m3fn).unbind()
    row = torch.ones(1, 1, 16, dtype=BF16, device=GPU)
    row[0, 0, 1], row[0, 0, 2], row[0, 0, 3] = torch.nan, torch.inf, -1e30
    zero = torch.zeros(1, dtype=torch.int32, device=GPU)
    table = torch.cat((torch.ones(1, 8), torch.zeros(1, 8)), 1).to(GPU)
    q = attention_cases.fused_queries(1, heads, GPU)
    scale = torch.full((1,), 0.5, device=GPU)
    cache = KVCache(k_cache, v_cache, scale, scale)
    qk_norm_rope_store(q, row * 0, row, Rotation(zero, table), cache, zero)
    expected = torch.tensor([2.0, 0.0, 0.0, -448.0] + [2.0] * 12, device=GPU)
    torch.testing.assert_close(v_cache[0, 0, 0].float(), expected, rtol=0, atol=0, equal_nan=True)
    assert k_cache[0, 0, 0].float().isnan().all()


def test_slots_beyond_32_bits_of_elements() -> None:
    """A cache of more than 2**31 elements is written and read at its end."""
    heads = Heads(2, 1, 128, 256, BF16)
    blocks = 2**31 // (heads.page * heads.head_dim) + 3
    cells = blocks * heads.page * heads.head_dim * 2
    if torch.cuda.mem_get_info()[0] < 5 * cells:
        pytest.skip("a cache of 2**31 elements, which is the point, needs 22 GB of free device memory")
    k_cache = torch.empty((blocks, heads.page, 1, heads.head_dim), dtype=BF16, device=GPU)
    v_cache = torch.empty_like(k_cache)
    last = blocks * heads.page - 1
    key = torch.zeros(2, 1, heads.head_dim, dtype=BF16, device=GPU)
    value = randn(2, 1, heads.head_dim, dtype=BF16, device=GPU)
    slots = torch.tensor([last - heads.page + 1, last - heads.page + 2], dtype=torch.int32, device=GPU)
    positions = torch.zeros(2, dtype=torch.int32, device=GPU)
    table = torch.cat((torch.ones(1, 64), torch.zeros(1, 64)), 1).to(GPU)  # position 0: no rotation
    cache = KVCache(k_cache, v_cache)
    qk_norm_rope_store(key, key, value, Rotation(positions, table), cache, slots)
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device=GPU)
    context = torch.tensor([2], dtype=torch.int32, device=GPU)
    q = torch.zeros(1, 2, heads.head_dim, dtype=BF16, device=GPU)
    out = paged_decode_attention_triton(q, cache, table, context, 2, 1.0)
    assert_near(out[0, 1], value.double().mean(dim=(0, 1)))


def test_a_cuda_graph_replays_decode_and_sampling() -> None:
    """Captured once with an upper bound, replayed after the inputs changed in place."""
    heads = SHAPES[0]
    first, second = [2000, 5, 0, 900], [17, 1500, 513, 0]
    caches = [attention_cases.make_cache(contexts, heads, GPU) for contexts in (first, second)]
    width = max(cache.tables.shape[1] for cache in caches)
    tables = [torch.nn.functional.pad(c.tables, (0, width - c.tables.shape[1]), value=-1) for c in caches]
    blocks = max(len(cache.kv.k) for cache in caches)
    k, v = (
        torch.empty((blocks, *cache.shape[1:]), dtype=BF16, device=GPU)
        for cache in (caches[0].kv.k, caches[0].kv.v)
    )
    table, context = tables[0].clone(), caches[0].contexts.clone()
    q = attention_cases.fused_queries(4, heads, GPU)
    logits = randn(4, 5000, dtype=BF16, device=GPU)
    rows = sampling_cases.make_rows(4, GPU, (0.0, 1.0))
    picked = rows.pick(sampling_cases.ALL)

    def load(index: int) -> None:
        k[: len(caches[index].kv.k)] = caches[index].kv.k
        v[: len(caches[index].kv.v)] = caches[index].kv.v
        table.copy_(tables[index])
        context.copy_(caches[index].contexts)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        attended = paged_decode_attention_triton(q, KVCache(k, v), table, context, 4096, 0.1)
        return attended, sample_triton(logits, *picked)

    load(0)
    step()  # compiles, which a capture must not do
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, ids = step()
    for index in (1, 0, 1):
        load(index)
        rows.positions.add_(1)
        graph.replay()
        expected_out, expected_ids = step()
        assert torch.equal(out, expected_out)
        assert torch.equal(ids, expected_ids)
        reference = paged_decode_attention_reference(q, KVCache(k, v), table, context, 4096, 0.1)
        assert_near(out, reference)
