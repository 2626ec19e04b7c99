"""The compiled Triton kernels on a CUDA device: the checks of the CPU tests, a CUDA graph, a huge cache."""

from __future__ import annotations

import math
from contextvars import copy_context

import kernel_cases as cases
import logits_cases
import pytest
import torch
from kernel_cases import BF16, F16, F32, FP8, Heads
from needs import needs_kv_cache_dtype

from nanovllm.kernels.cache import KVCache
from nanovllm.kernels.compat import in_graph
from nanovllm.kernels.decode_attention import paged_decode_attention_reference, paged_decode_attention_triton
from nanovllm.kernels.gemv import gemv_triton
from nanovllm.kernels.matmul import linear, use_linear
from nanovllm.kernels.prefill_attention import LONG, SHORT, WIDE
from nanovllm.kernels.rotary import Rotation, qk_norm_rope_store
from nanovllm.kernels.sampling import sample
from tools.measure_device import READS, read_triton

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
    cases.check_decode(MIXED, heads, GPU)


@pytest.mark.parametrize("sequences", [1, 3, 17, 97, 256])
def test_decode_batches(sequences: int) -> None:
    cases.check_decode([(397 * row) % 2049 for row in range(1, sequences + 1)], SHAPES[0], GPU)


@pytest.mark.parametrize("context", [8191, 8192, 8193, 20_000])
def test_decode_of_a_long_context(context: int) -> None:
    cases.check_decode([context], SHAPES[0], GPU)


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
def test_decode_of_more_chunks_than_lanes(cache_dtype: torch.dtype | None) -> None:
    cases.check_decode([3000, *[100] * 128, 6000], Heads(16, 8, 128, 256, BF16, cache_dtype), GPU)


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
    cases.check_shared_prefixes(contexts, shares, heads, GPU, tile)


def test_fp8_pairs() -> None:
    cases.check_fp8_pairs(GPU)


def test_decode_of_padding_alone_is_zero() -> None:
    cases.check_decode([0, 0, 0], SHAPES[0], GPU)


@pytest.mark.parametrize("heads", ATTENTION_SHAPES, ids=str)
def test_prefill(heads: Heads) -> None:
    lengths = [(1, 1), (63, 63), (129, 129), (1, 700), (200, 713), (0, 9), (4, 0), (128, 1024), (577, 577)]
    cases.check_prefill(lengths, heads, GPU)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_prefill_of_long_prompts(dtype: torch.dtype) -> None:
    """The tiles for many long prompts, alternating with the others; a large batch selects them by itself."""
    heads = Heads(6, 2, 128, 256, dtype)
    lengths = [(1000, 1259), (0, 5), (31, 31), (256, 256), (1, 700), (3, 0), (129, 129), (1500, 1500)]
    cases.check_prefill(lengths, heads, GPU, LONG)
    cases.check_prefill([(2049, 2049), (1025, 3000)], heads, GPU)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_prefill_after_long_prefixes(dtype: torch.dtype) -> None:
    """A context beyond 1,024 positions selects other tiles for the whole step."""
    lengths = [(177, 4273), (1, 1), (80, 1104), (63, 63), (0, 9), (4, 0), (65, 1025)]
    for heads in (Heads(6, 2, 128, 256, dtype), Heads(4, 2, 80, 48, dtype)):
        cases.check_prefill(lengths, heads, GPU)
        cases.check_prefill(lengths, heads, GPU, WIDE)
        cases.check_prefill(lengths, heads, GPU, SHORT)


@pytest.mark.parametrize(
    "heads", [SHAPES[0], SHAPES[3], SHAPES[4], SHAPES[7], Heads(16, 8, 128, 256, BF16, FP8)], ids=str
)
@pytest.mark.parametrize("chunks", [[1, 400], [7], [255, 256, 257], [1000, 20]], ids=str)
def test_prefill_bits_do_not_depend_on_chunks(chunks: list[int], heads: Heads) -> None:
    cases.check_chunked_prefill(1111, chunks, heads, GPU)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17, 97])
def test_store(tokens: int, heads: Heads) -> None:
    cases.check_store(tokens, heads, GPU)
    if torch.cuda.get_device_capability() >= (8, 9):  # before this, Triton has no FP8
        cases.check_store(tokens, heads, GPU, fp8=True)


def test_a_quantised_nan_stays_one() -> None:
    """A NaN stays visible; values that are too large are clamped."""
    needs_kv_cache_dtype("fp8")
    heads = Heads(2, 1, 16, 16, BF16)
    k_cache, v_cache = torch.zeros(2, 1, 16, 1, 16, device=GPU).to(torch.float8_e4m3fn).unbind()
    row = torch.ones(1, 1, 16, dtype=BF16, device=GPU)
    row[0, 0, 1], row[0, 0, 2], row[0, 0, 3] = torch.nan, torch.inf, -1e30
    zero = torch.zeros(1, dtype=torch.int32, device=GPU)
    table = torch.cat((torch.ones(1, 8), torch.zeros(1, 8)), 1).to(GPU)
    q = cases.fused_queries(1, heads, GPU)
    scale = torch.full((1,), 0.5, device=GPU)
    cache = KVCache(k_cache, v_cache, scale, scale)
    qk_norm_rope_store(q, row * 0, row, Rotation(zero, table), cache, zero)
    expected = torch.tensor([2.0, torch.nan, 448.0, -448.0] + [2.0] * 12, device=GPU)
    torch.testing.assert_close(v_cache[0, 0, 0].float(), expected, rtol=0, atol=0, equal_nan=True)
    assert k_cache[0, 0, 0].float().isnan().tolist()[1:3] == [True, True]  # 0 * inf is NaN


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
    value = cases.randn(2, 1, heads.head_dim, dtype=BF16, device=GPU)
    slots = torch.tensor([last - heads.page + 1, last - heads.page + 2], dtype=torch.int32, device=GPU)
    positions = torch.zeros(2, dtype=torch.int32, device=GPU)
    table = torch.cat((torch.ones(1, 64), torch.zeros(1, 64)), 1).to(GPU)  # position 0: no rotation
    cache = KVCache(k_cache, v_cache)
    qk_norm_rope_store(key, key, value, Rotation(positions, table), cache, slots)
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device=GPU)
    context = torch.tensor([2], dtype=torch.int32, device=GPU)
    q = torch.zeros(1, 2, heads.head_dim, dtype=BF16, device=GPU)
    out = paged_decode_attention_triton(q, cache, table, context, 2, 1.0)
    cases.assert_near(out[0, 1], value.double().mean(dim=(0, 1)))


@pytest.mark.parametrize("tokens", [0, 1, 97, 256, 1000])
def test_last_tokens(tokens: int) -> None:
    cases.check_last_tokens(tokens, GPU)


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 97, 130, 1000])
@pytest.mark.parametrize(("n", "k"), [(70, 104), (1024, 2048), (33, 8)])
@pytest.mark.parametrize(("dtype", "bias"), [(F32, False), (BF16, True)], ids=str)
def test_linear(rows: int, n: int, k: int, dtype: torch.dtype, bias: bool) -> None:
    cases.check_linear(rows, n, k, dtype, GPU, bias=bias)


# N, k of the 0.6B model.
QWEN3_PRODUCTS = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]
QWEN3_PRODUCTS += [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]  # of the 8B model


@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [*((n, k, BF16) for n, k in QWEN3_PRODUCTS), (70, 104, BF16), (1024, 3072, F16), (1024, 3072, F32)],
)
def test_rows_of_a_product_are_independent(n: int, k: int, dtype: torch.dtype) -> None:
    counts = [1, 2, 3, 8, 16, 17, 64, 65, 97, 128, 129, 256, 512, 1000, 4096]
    tiles = (None,) if dtype == F32 else cases.TILES
    cases.check_linear_rows_are_independent(n, k, dtype, GPU, counts, tiles)


def test_which_products_use_our_kernel_by_default() -> None:
    """In a graph: products of few rows or little work, aligned to 16 bytes, on GPUs like the one measured.

    Not for a large weight if the rows fill little of a tile of 64.
    """
    measured = torch.cuda.get_device_capability()[0] == 9

    def ours(rows: int, n: int, k: int, dtype: torch.dtype = BF16) -> bool:
        x, weight = (torch.empty(size, k, dtype=dtype, device=GPU) for size in (rows, n))
        return use_linear(x, weight)

    context = copy_context()
    context.run(in_graph.set, True)
    assert not ours(8, 1024, 1024)
    for rows in (3, 16, 32, 64, 128):
        assert context.run(ours, rows, 4096, 1024) == context.run(ours, rows, 1024, 2048) == measured
    assert context.run(ours, 32, 24576, 4096) == context.run(ours, 256, 1024, 3072) == measured
    assert not context.run(ours, 256, 6144, 1024) and not context.run(ours, 64, 24576, 4096)
    for rows in (40, 48, 80):
        assert not context.run(ours, rows, 6144, 1024) and context.run(ours, rows, 4096, 1024) == measured
    assert context.run(ours, 56, 6144, 1024) == measured
    assert not context.run(ours, 8, 1024, 1024, F32) and not context.run(ours, 8, 1024, 1028)


def test_a_product_of_more_than_2_to_the_31_elements() -> None:
    x = cases.randn(16384, 64, dtype=BF16, device=GPU)
    weight = cases.randn(151936, 64, dtype=BF16, device=GPU, seed=1)
    out = linear(x, weight)
    for rows in (slice(0, 64), slice(-64, None)):
        assert torch.equal(out[rows], linear(x[rows], weight))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("rows", "n"), [(1, 1), (97, 80), (1000, 128), (300, 1000), (256, 1024), (17, 16384)]
)
def test_rms_norm(rows: int, n: int, dtype: torch.dtype) -> None:
    cases.check_rms_norm(rows, n, dtype, GPU)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"),
    [(1, (16, 8), 128), (97, (14, 2), 80), (17, (3, 3), 24), (1000, (64, 8), 64), (33, (32, 8), 256)],
)
def test_rope(tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, norm: bool) -> None:
    cases.check_rope(tokens, *heads, head_dim, dtype, GPU, norm=norm)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (97, 1000), (256, 3072), (17, 12289)])
def test_silu_and_mul(rows: int, n: int, dtype: torch.dtype) -> None:
    cases.check_silu(rows, n, dtype, GPU)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 1, 1), (2, 40, 24), (3, 7, 1000), (2, 2048, 1024), (1, 2050, 4096), (2, 500, 9000)],
)
def test_gemv(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    cases.check_gemv(rows, n, k, dtype, GPU)


@pytest.mark.parametrize("rows", [1, 2])
def test_kernels_with_pdl_wait_for_their_inputs(rows: int) -> None:
    """A long chain of products in a graph, each of the last result, equals one product after another."""
    n = 1024
    torch.manual_seed(0)
    weights = [(torch.randn(n, n, device=GPU) / n**0.5).bfloat16() for _ in range(40)]
    norm = torch.ones(n, device=GPU, dtype=torch.bfloat16)

    def chain(wait: bool) -> list[torch.Tensor]:
        x, residual, results = start, None, []
        for index, weight in enumerate(weights):
            x, residual = gemv_triton(x, weight, norm_weight=norm, eps=1e-6, residual=residual)
            if index % 5 == 4:
                x, _ = gemv_triton(x, weight)
            results.append(x)
            if wait:
                torch.cuda.synchronize()
        return results

    start = torch.randn(rows, n, device=GPU).bfloat16()
    chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(wait=False)
    for _ in range(50):
        start.copy_(torch.randn(rows, n, device=GPU))
        for result in captured:
            result.fill_(math.nan)
        graph.replay()
        for ours, expected in zip(captured, chain(wait=True), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (97, 257), (14, 4096), (17, 8193), (256, 151_936)])
def test_sample(rows: int, vocab: int, dtype: torch.dtype) -> None:
    cases.check_sample(rows, vocab, dtype, GPU)


@pytest.mark.parametrize("vocab", [50, 151_936])
def test_sampling_rows_are_independent(vocab: int) -> None:
    cases.check_sampling_rows_are_independent(97, vocab, GPU)


@pytest.mark.parametrize("vocab", [3, 9000, 151_936])
def test_sampling_extremes(vocab: int) -> None:
    cases.check_sampling_extremes(vocab, GPU)


@pytest.mark.parametrize("rows", [4, 97, 256])
@pytest.mark.parametrize(
    ("size", "vocab", "dtype"),
    [(2, 3001, BF16), (2, 151936, BF16), (4, 10240, F32), (4, 151936, F16), (8, 20000, BF16)],
)
def test_rows_are_exchanged_and_drawn(size: int, vocab: int, dtype: torch.dtype, rows: int) -> None:
    cases.check_exchanged_rows(vocab, size, rows, dtype, GPU)


@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"), [(1, 33, F32), (17, 5003, BF16), (97, 2100, F16), (5, 151_936, BF16)]
)
def test_process_logits(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits_cases.check_process_logits(rows, vocab, dtype, GPU)


@pytest.mark.parametrize("vocab", [97, 151_936])
def test_process_logits_as_transformers(vocab: int) -> None:
    logits_cases.check_process_logits_as_transformers(vocab, GPU)
    logits_cases.check_counts(vocab, GPU)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (97, 300), (256, 5003), (9, 151_936)])
def test_token_logprobs(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits_cases.check_token_logprobs(rows, vocab, dtype, GPU)


@pytest.mark.parametrize("vocab", [700, 151_936])
def test_logprobs_rows_are_independent(vocab: int) -> None:
    logits_cases.check_logprobs_rows_are_independent(97, vocab, GPU)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("vocab", [2, 300, 5000, 151_936])
def test_filters(vocab: int, dtype: torch.dtype) -> None:
    cases.check_filters(3 * len(cases.FILTERS), vocab, dtype, GPU)


@pytest.mark.parametrize("sampler", cases.SAMPLERS)
@pytest.mark.parametrize("vocab", [3, 60, 2100])
def test_filters_keep_all_that_they_should(sampler: cases.Sampler, vocab: int) -> None:
    cases.check_filters_keep_all_that_they_should(sampler, vocab, 20_000, GPU)


@pytest.mark.parametrize("vocab", [300, 151_936])
def test_filtered_rows_are_independent(vocab: int) -> None:
    cases.check_sampling_rows_are_independent(256, vocab, GPU, filters=True)


def test_neutral_filters_change_nothing() -> None:
    cases.check_neutral_filters_change_nothing(151_936, GPU)


@pytest.mark.parametrize("sampler", cases.SAMPLERS)
def test_sampling_keys(sampler: cases.Sampler) -> None:
    cases.check_sampling_keys(sampler, GPU)


@pytest.mark.parametrize("sampler", cases.SAMPLERS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_sampling_distribution(sampler: cases.Sampler, blocks: int) -> None:
    cases.check_sampling_distribution(sampler, 200_000, GPU, blocks=blocks)


@pytest.mark.parametrize(("block", "warps", "programs"), READS)
def test_the_read_kernel_reads_every_value_once(block: int, warps: int, programs: int) -> None:
    """tools/measure_device.py uses it to measure memory bandwidth."""
    data = torch.randint(-9, 9, (2**22,), device=GPU).float()
    assert read_triton(data, block, warps, programs * 132).sum() == data.sum()


def test_random_pairs() -> None:
    cases.check_random_pairs(GPU)


def test_a_cuda_graph_replays_decode_and_sampling() -> None:
    """Captured once with an upper bound, replayed after the inputs changed in place."""
    heads = SHAPES[0]
    first, second = [2000, 5, 0, 900], [17, 1500, 513, 0]
    caches = [cases.make_cache(contexts, heads, GPU) for contexts in (first, second)]
    width = max(cache.tables.shape[1] for cache in caches)
    tables = [torch.nn.functional.pad(c.tables, (0, width - c.tables.shape[1]), value=-1) for c in caches]
    blocks = max(len(cache.kv.k) for cache in caches)
    k, v = (
        torch.empty((blocks, *cache.shape[1:]), dtype=BF16, device=GPU)
        for cache in (caches[0].kv.k, caches[0].kv.v)
    )
    table, context = tables[0].clone(), caches[0].contexts.clone()
    q = cases.fused_queries(4, heads, GPU)
    logits = cases.randn(4, 5000, dtype=BF16, device=GPU)
    rows = cases.make_rows(4, GPU, (0.0, 1.0))

    def load(index: int) -> None:
        k[: len(caches[index].kv.k)] = caches[index].kv.k
        v[: len(caches[index].kv.v)] = caches[index].kv.v
        table.copy_(tables[index])
        context.copy_(caches[index].contexts)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return paged_decode_attention_triton(q, KVCache(k, v), table, context, 4096, 0.1), sample(
            logits, *rows.pick(cases.ALL)
        )

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
        cases.assert_near(out, reference)
