"""The compiled Triton kernels on a CUDA device, apart from attention: the checks of the CPU tests,
products in a CUDA graph, a huge product.
"""

from __future__ import annotations

import math
from contextvars import copy_context

import filter_cases
import layer_cases
import logits_cases
import pytest
import sampling_cases
import torch
from tensors import BF16, F16, F32, randn

from nanovllm.kernels.compat import in_graph
from nanovllm.kernels.gemv import gemv_triton
from nanovllm.kernels.matmul import linear, use_linear
from tools.measure_device import READS, read_triton

pytestmark = pytest.mark.gpu

GPU = "cuda"


@pytest.mark.parametrize("tokens", [0, 1, 97, 256, 1000])
def test_last_tokens(tokens: int) -> None:
    sampling_cases.check_last_tokens(tokens, GPU)


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 97, 130, 1000])
@pytest.mark.parametrize(("n", "k"), [(70, 104), (1024, 2048), (33, 8)])
@pytest.mark.parametrize(("dtype", "bias"), [(F32, False), (BF16, True)], ids=str)
def test_linear(rows: int, n: int, k: int, dtype: torch.dtype, bias: bool) -> None:
    layer_cases.check_linear(rows, n, k, dtype, GPU, bias=bias)


# N, k of the 0.6B model.
QWEN3_PRODUCTS = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]
QWEN3_PRODUCTS += [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]  # of the 8B model


@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [*((n, k, BF16) for n, k in QWEN3_PRODUCTS), (70, 104, BF16), (1024, 3072, F16), (1024, 3072, F32)],
)
def test_rows_of_a_product_are_independent(n: int, k: int, dtype: torch.dtype) -> None:
    counts = [1, 2, 3, 8, 16, 17, 64, 65, 97, 128, 129, 256, 512, 1000, 4096]
    tiles = (None,) if dtype == F32 else layer_cases.TILES
    layer_cases.check_linear_rows_are_independent(n, k, dtype, GPU, counts, tiles)


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
    x = randn(16384, 64, dtype=BF16, device=GPU)
    weight = randn(151936, 64, dtype=BF16, device=GPU, seed=1)
    out = linear(x, weight)
    for rows in (slice(0, 64), slice(-64, None)):
        assert torch.equal(out[rows], linear(x[rows], weight))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("rows", "n"), [(1, 1), (97, 80), (1000, 128), (300, 1000), (256, 1024), (17, 16384)]
)
def test_rms_norm(rows: int, n: int, dtype: torch.dtype) -> None:
    layer_cases.check_rms_norm(rows, n, dtype, GPU)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (97, 80), (300, 1536), (256, 2816), (3, 5376)])
def test_joined_norms(rows: int, n: int, dtype: torch.dtype) -> None:
    layer_cases.check_joined_norms(rows, n, dtype, GPU)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"),
    [(1, (16, 8), 128), (97, (14, 2), 80), (17, (3, 3), 24), (1000, (64, 8), 64), (33, (32, 8), 256)],
)
def test_rope(tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, norm: bool) -> None:
    layer_cases.check_rope(tokens, *heads, head_dim, dtype, GPU, norm=norm)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (97, 1000), (256, 3072), (17, 12289)])
def test_silu_and_mul(rows: int, n: int, dtype: torch.dtype) -> None:
    layer_cases.check_silu(rows, n, dtype, GPU)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 1, 1), (2, 40, 24), (3, 7, 1000), (2, 2048, 1024), (1, 2050, 4096), (2, 500, 9000)],
)
def test_gemv(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    layer_cases.check_gemv(rows, n, k, dtype, GPU)


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
    sampling_cases.check_sample(rows, vocab, dtype, GPU)


@pytest.mark.parametrize("vocab", [50, 151_936])
def test_sampling_rows_are_independent(vocab: int) -> None:
    sampling_cases.check_sampling_rows_are_independent(97, vocab, GPU)


@pytest.mark.parametrize("vocab", [3, 9000, 151_936])
def test_sampling_extremes(vocab: int) -> None:
    sampling_cases.check_sampling_extremes(vocab, GPU)


@pytest.mark.parametrize("rows", [4, 97, 256])
@pytest.mark.parametrize(
    ("size", "vocab", "dtype"),
    [(2, 3001, BF16), (2, 151936, BF16), (4, 10240, F32), (4, 151936, F16), (8, 20000, BF16)],
)
def test_rows_are_exchanged_and_drawn(size: int, vocab: int, dtype: torch.dtype, rows: int) -> None:
    sampling_cases.check_exchanged_rows(vocab, size, rows, dtype, GPU)


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
    filter_cases.check_filters(3 * len(sampling_cases.FILTERS), vocab, dtype, GPU)


@pytest.mark.parametrize("sampler", sampling_cases.SAMPLERS)
@pytest.mark.parametrize("vocab", [3, 60, 2100])
def test_filters_keep_all_that_they_should(sampler: sampling_cases.Sampler, vocab: int) -> None:
    filter_cases.check_filters_keep_all_that_they_should(sampler, vocab, 20_000, GPU)


@pytest.mark.parametrize("vocab", [300, 151_936])
def test_filtered_rows_are_independent(vocab: int) -> None:
    sampling_cases.check_sampling_rows_are_independent(256, vocab, GPU, filters=True)


@pytest.mark.parametrize("sampler", sampling_cases.SAMPLERS)
def test_sampling_keys(sampler: sampling_cases.Sampler) -> None:
    sampling_cases.check_sampling_keys(sampler, GPU)


@pytest.mark.parametrize("sampler", sampling_cases.SAMPLERS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_sampling_distribution(sampler: sampling_cases.Sampler, blocks: int) -> None:
    sampling_cases.check_sampling_distribution(sampler, 200_000, GPU, blocks=blocks)


@pytest.mark.parametrize(("block", "warps", "programs"), READS)
def test_the_read_kernel_reads_every_value_once(block: int, warps: int, programs: int) -> None:
    """tools/measure_device.py uses it to measure memory bandwidth."""
    data = torch.randint(-9, 9, (2**22,), device=GPU).float()
    assert read_triton(data, block, warps, programs * 132).sum() == data.sum()


def test_random_pairs() -> None:
    sampling_cases.check_random_pairs(GPU)
