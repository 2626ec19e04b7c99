"""Every Triton kernel, interpreted on CPU tensors, and its torch reference against exact computations."""

from __future__ import annotations

from dataclasses import replace

import attention_cases
import filter_cases
import inside
import layer_cases
import numpy as np
import pytest
import sampling_cases
import torch
from attention_cases import Heads
from tensors import BF16, F16, F32, FP8

from nanovllm.batch import PADDING, greedy, map_columns
from nanovllm.cuda_graphs.capture import EMPTY_BATCH
from nanovllm.kernels import decode_attention, matmul, paged, sampling
from nanovllm.kernels.compat import INTERPRET
from nanovllm.kernels.copy_cells import copy_cells_reference, copy_cells_triton
from nanovllm.kernels.decode_attention import CHUNK, SHARED_CHUNK, SharedUnit
from nanovllm.kernels.prefill_attention import SHORT, WIDE, Tiles
from nanovllm.kernels.sampling import sample, sample_reference
from nanovllm.shared_prefixes.finder import SharedPrefixFinder, find_shared_prefixes

pytestmark = [
    pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # NumPy's
]

CPU = "cpu"
SHAPES = [
    Heads(2, 1, 64, 16),
    Heads(2, 2, 24, 16),
    Heads(8, 2, 80, 48),
    Heads(20, 1, 8, 256, F16),  # more query heads per KV head than a tile holds
    Heads(4, 2, 128, 32, BF16),
    Heads(2, 2, 256, 16, F16),
]
FP8_SHAPES = [
    Heads(4, 2, 32, 64, BF16, FP8),
    Heads(7, 1, 80, 48, F16, FP8),
    Heads(2, 2, 8, 16, BF16, FP8),
]


@pytest.mark.parametrize("heads", SHAPES + FP8_SHAPES, ids=str)
def test_decode_around_block_boundaries(heads: Heads) -> None:
    page = heads.page
    attention_cases.check_decode([1, page - 1, page, page + 1, 0, 2 * page, 3 * page + 1], heads, CPU)


@pytest.mark.parametrize("contexts", [[511], [512, 513, 1], [1024, 0, 1030]], ids=str)
def test_decode_around_chunk_boundaries(contexts: list[int]) -> None:
    attention_cases.check_decode(contexts, Heads(2, 1, 64, 16), CPU)


def test_decode_merges_more_chunks_than_one_merge_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some heads have their highest score in the second merge tile, some in the first.
    monkeypatch.setattr("nanovllm.kernels.decode_attention.CHUNK", 128)
    attention_cases.check_decode([20, 1500], Heads(16, 1, 16, 16), CPU)


@pytest.mark.parametrize("sequences", [1, 3, 17, 97])
def test_decode_batches(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large batch exceeds what the reference gathers at once."""
    monkeypatch.setattr("nanovllm.kernels.attention_reference.GATHERED_CELLS", 100)
    attention_cases.check_decode(
        [(7 * row) % 40 for row in range(1, sequences + 1)], Heads(2, 1, 16, 16), CPU
    )


def test_decode_of_more_chunks_than_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CHUNK": 128, "_LANES": 2, "_PROGRAMS": 1}.items():
        monkeypatch.setattr(f"nanovllm.kernels.decode_attention.{name}", value)
    attention_cases.check_decode([1, 256, 0, 257, 700, 128], Heads(2, 1, 16, 16), CPU)


@pytest.mark.parametrize(("tile", "at_a_time"), [(16, 16), (16, 1), (64, 16)])
@pytest.mark.parametrize("heads", [Heads(2, 1, 16, 16), Heads(5, 1, 16, 784)], ids=str)
def test_decode_of_shared_prefixes(
    heads: Heads, tile: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.kernels.decode_attention._UNITS", at_a_time)
    contexts = [1100, 1030, 513, 0, 1025, 40, 600, 1100, 512]
    attention_cases.check_shared_prefixes(contexts, {1: 0, 4: 0, 6: 2, 5: 2, 8: 0}, heads, CPU, tile)


def test_nothing_is_shared() -> None:
    tables = np.arange(12, dtype=np.int32).reshape(3, 4)
    contexts = np.full(3, 2000, np.int32)
    unit = SharedUnit(8, 512)
    assert find_shared_prefixes(tables, contexts, 512, unit) is None
    same = np.broadcast_to(tables[:1], tables.shape)
    assert find_shared_prefixes(same, contexts, 512, SharedUnit(1, 512)) is None
    assert find_shared_prefixes(same, np.full(3, 512, np.int32), 512, unit) is None
    found = find_shared_prefixes(same, contexts, 512, unit)
    assert (found.members.tolist(), found.lens.tolist()) == ([[0, 1, 2] + [PADDING] * 5], [1536])
    assert (found.skips.tolist(), found.units.tolist()) == ([1536] * 3, [1])


@pytest.mark.parametrize(
    ("shared", "lens", "chunk", "least"),
    [(2304, 2048, 512, 1), (1792, 1792, 256, 256), (2304, 2048, 1024, 1024), (2304, 2048, 2048, 2048)],
)
def test_prefixes_are_shared_in_whole_chunks(shared: int, lens: int, chunk: int, least: int) -> None:
    tables = np.arange(160, dtype=np.int32).reshape(16, 10)
    tables[:, : shared // 256] = tables[0, : shared // 256]
    batch = replace(
        EMPTY_BATCH,
        seq_ids=tuple(range(16)),
        context_lens=np.full(16, shared + 5, np.int32),
        tables=(tables,),
    )
    finder = SharedPrefixFinder(256, SharedUnit(8, 256), 32, lambda sequences: least * sequences // 16)
    assert finder.nothing.keys() == {256, 512} | {1024, 2048, 4096} & set(range(2 * least + 1))
    for _ in range(2):  # found, then reused
        found = finder.find(batch)
        assert found is not None and found.chunk == chunk and found.chunk in finder.nothing
        assert found.units.tolist() == [2] and found.lens[:2].tolist() == [lens] * 2
        assert set(found.skips.tolist()) == {lens}


def test_a_prefix_shorter_than_a_chunk_is_not_shared() -> None:
    tables = np.zeros((64, 10), np.int32)
    contexts = np.full(64, 1800, np.int32)
    batch = replace(EMPTY_BATCH, seq_ids=tuple(range(64)), context_lens=contexts, tables=(tables,))
    for least, is_shared in ((1024, True), (2048, False)):
        finder = SharedPrefixFinder(256, SharedUnit(8, 256), 64, lambda sequences, least=least: least)
        assert (finder.find(batch) is not None) == is_shared


@pytest.mark.parametrize("longest", [4096, 40_960, 131_072, 1_048_576])
@pytest.mark.parametrize(("q_heads", "head_dim"), [(16, 128), (32, 128), (64, 128), (8, 256)])
def test_partial_results_of_decode_stay_small(longest: int, q_heads: int, head_dim: int) -> None:
    heads = paged.Heads(q_heads, 8, head_dim, head_dim, page=256, step=1)
    for sequences in (1, 2, 3, 8, 16, 17, 97, 256, 819, 1024):
        chunk = inside.decode_chunk(sequences, heads, False, longest)
        least = decode_attention.least_chunk(q_heads, head_dim, longest, sequences)
        usual = 128 if sequences <= 2 else 256 if sequences <= 16 else CHUNK
        assert chunk == max(usual, least)
        assert sequences * q_heads * -(-longest // least) * head_dim * 4 <= 3 * 2**29, "bytes"
        assert longest > 40_960 or q_heads > 16 or least <= SHARED_CHUNK


@pytest.mark.parametrize(("q_heads", "kv_heads", "most"), [(8, 4, 32), (32, 8, 16), (64, 2, 32), (8, 1, 128)])
def test_small_batches_have_short_chunks(q_heads: int, kv_heads: int, most: int) -> None:
    """Up to 128 programs: sequences times key heads, of which one has a program for every 16 query heads."""
    heads = paged.Heads(q_heads, kv_heads, 128, 128, page=256, step=1)
    chunks = [inside.decode_chunk(sequences, heads, False, 4096) for sequences in (most, most + 1)]
    assert chunks == [256, CHUNK]


def test_decode_in_chunks_of_the_least_size(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.limit_partial_results(monkeypatch, 1)
    attention_cases.check_decode([1, 256, 0, 257, 2100, 128], Heads(2, 1, 16, 16), CPU)


def test_decode_of_padding_alone_is_zero() -> None:
    attention_cases.check_decode([0, 0, 0], Heads(2, 1, 16, 16), CPU)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(2, 1, 64, 16),
        Heads(3, 3, 24, 16),
        Heads(2, 1, 80, 48, F16),
        Heads(3, 1, 8, 256, F16),
        Heads(4, 2, 128, 32, BF16),
        Heads(2, 2, 256, 16, F16),
        *FP8_SHAPES,
    ],
    ids=str,
)
def test_prefill(heads: Heads) -> None:
    page = heads.page
    lengths = [
        (page - 1, page - 1),
        (1, 1),
        (page + 1, page + 1),
        (5, 2 * page),
        (1, page + 1),
        (3, 0),
        (2, 3),
    ]
    attention_cases.check_prefill(lengths, heads, CPU)


@pytest.mark.parametrize("lengths", [[(1, 200)], [(140, 140)], [(131, 259), (0, 5), (130, 131)]], ids=str)
def test_prefill_over_several_tiles(lengths: list[tuple[int, int]]) -> None:
    attention_cases.check_prefill(lengths, Heads(2, 1, 64, 16), CPU)
    attention_cases.check_prefill(lengths, Heads(1, 1, 64, 16, BF16), CPU)


@pytest.mark.parametrize("tiles", [SHORT, WIDE], ids=str)
def test_prefill_by_the_tiles_of_wide_heads(tiles: Tiles) -> None:
    attention_cases.check_prefill(
        [(70, 200), (0, 5), (65, 65), (1, 130), (3, 0)], Heads(2, 1, 96, 16, BF16), CPU, tiles
    )


@pytest.mark.parametrize(("heads", "page"), [(6, 32), (2, 64), (4, 96)])
def test_prefill_by_tensor_descriptors(heads: int, page: int) -> None:
    """The kernel loads cells past a context, some of them NaN, and ignores them."""
    tiles = Tiles(32, 32, 4, 1, described=True)
    lengths = [(131, 259), (0, 5), (31, 31), (64, 64), (1, 100), (3, 0)]
    attention_cases.check_prefill(lengths, Heads(heads, 2, 32, page, BF16), CPU, tiles)


@pytest.mark.parametrize("chunks", [[1], [7], [15, 16, 17], [100, 20]], ids=str)
def test_prefill_bits_do_not_depend_on_chunks(chunks: list[int]) -> None:
    length = 30 if chunks == [1] else 150
    attention_cases.check_chunked_prefill(length, chunks, Heads(2, 1, 32, 16), CPU)


def test_keys_that_are_not_finite() -> None:
    attention_cases.check_keys_that_are_not_finite(CPU)


def test_fp8_pairs() -> None:
    attention_cases.check_fp8_pairs(CPU)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_store(tokens: int, heads: Heads) -> None:
    layer_cases.check_store(tokens, heads, CPU)
    layer_cases.check_store(tokens, heads, CPU, fp8=True)


@pytest.mark.parametrize("heads", SHAPES + FP8_SHAPES, ids=str)
def test_copies_of_cells(heads: Heads) -> None:
    for copy_cells in (copy_cells_triton, copy_cells_reference):
        attention_cases.check_copy_cells(copy_cells, heads, CPU)


@pytest.mark.parametrize("tokens", [0, 1, 97, 256, 1000])
def test_last_tokens(tokens: int) -> None:
    sampling_cases.check_last_tokens(tokens, CPU)


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 97, 130])
@pytest.mark.parametrize(("n", "k"), [(70, 104), (16, 64), (33, 8)])
@pytest.mark.parametrize(("dtype", "bias"), [(F32, False), (BF16, True), (F16, False)], ids=str)
def test_linear(rows: int, n: int, k: int, dtype: torch.dtype, bias: bool) -> None:
    layer_cases.check_linear(rows, n, k, dtype, CPU, bias=bias)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_of_a_product_are_independent(dtype: torch.dtype) -> None:
    layer_cases.check_linear_rows_are_independent(
        70, 104, dtype, CPU, [0, 1, 3, 16, 17, 97, 128, 130], [None]
    )


@pytest.mark.parametrize("memory", [232_448, 166_912, 101_376])  # an H200, an A100, an RTX 4090
def test_tiles_of_products_fit_a_device(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "INTERPRET", False)
    monkeypatch.setattr(matmul, "shared_memory", lambda device: memory)
    monkeypatch.setattr(matmul, "multiprocessors", lambda device: 132)
    chosen = set()
    for rows in [*range(1, 300), 1000, 16384]:
        for n in (1024, 4096, 6144, 24576, 151936):
            tile = matmul.choose_tile.__wrapped__(rows, n, BF16, torch.device("cuda"))
            staged = tile.rows * tile.columns if tile.persistent else 0
            assert 2 * (tile.rows + tile.columns) * tile.k * tile.stages + staged <= memory
            assert tile.stages >= 2 and tile.rows < 2 * max(rows, 16)
            chosen.add(tile[:3])
    tiles = {tile[:3] for tile in inside.matmul_tiles()}
    assert tiles - chosen == (set() if memory == 232_448 else {(128, 256, 64)})


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 24), (17, 80), (33, 128), (5, 1000)])
def test_rms_norm(rows: int, n: int, dtype: torch.dtype) -> None:
    layer_cases.check_rms_norm(rows, n, dtype, CPU)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"), [(1, (1, 1), 8), (3, (14, 2), 80), (17, (3, 3), 24)]
)
def test_rope(tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, norm: bool) -> None:
    layer_cases.check_rope(tokens, *heads, head_dim, dtype, CPU, norm=norm)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 24), (17, 1000), (2, 1025)])
def test_silu_and_mul(rows: int, n: int, dtype: torch.dtype) -> None:
    layer_cases.check_silu(rows, n, dtype, CPU)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (2, 40, 24), (3, 7, 1000), (2, 5, 4100)])
def test_gemv(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    layer_cases.check_gemv(rows, n, k, dtype, CPU)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 2), (17, 1000), (97, 257), (14, 4096), (7, 8193)])
def test_sample(rows: int, vocab: int, dtype: torch.dtype) -> None:
    sampling_cases.check_sample(rows, vocab, dtype, CPU)


@pytest.mark.parametrize("vocab", [50, 5000])
def test_sampling_rows_are_independent(vocab: int) -> None:
    sampling_cases.check_sampling_rows_are_independent(17, vocab, CPU)


@pytest.mark.parametrize("vocab", [3, 1000, 9000])
def test_sampling_extremes(vocab: int) -> None:
    sampling_cases.check_sampling_extremes(vocab, CPU)


@pytest.mark.parametrize("kept", sampling_cases.FILTERS, ids=str)
def test_extremes_with_filters(kept: tuple[int, float, float]) -> None:
    sampling_cases.check_sampling_extremes(300, CPU, kept)


@pytest.mark.parametrize(
    ("size", "vocab", "rows", "dtype"),
    [(2, 3001, 9, BF16), (4, 1000, 7, F32), (4, 5, 4, F16), (2, 4096, 5, BF16)],
)
def test_rows_are_exchanged_and_drawn(size: int, vocab: int, rows: int, dtype: torch.dtype) -> None:
    sampling_cases.check_exchanged_rows(vocab, size, rows, dtype, CPU)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(2, F32), (300, F32), (300, BF16), (300, F16), (2500, BF16)], ids=str
)
def test_filters(vocab: int, dtype: torch.dtype) -> None:
    filter_cases.check_filters(len(sampling_cases.FILTERS), vocab, dtype, CPU)


@pytest.mark.parametrize(("vocab", "draws"), [(3, 4000), (60, 4000), (2100, 400)])
def test_filters_keep_all_that_they_should(vocab: int, draws: int) -> None:
    filter_cases.check_filters_keep_all_that_they_should(sample_reference, vocab, draws, CPU)


def test_filtered_rows_are_independent() -> None:
    sampling_cases.check_sampling_rows_are_independent(
        3 * len(sampling_cases.FILTERS), 300, CPU, filters=True
    )


def test_neutral_filters_sort_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "draw_filtered_reference", None)
    sampling_cases.check_sample(40, 2500, F32, CPU)


@pytest.mark.parametrize("sampler", sampling_cases.SAMPLERS)
def test_sampling_keys(sampler: sampling_cases.Sampler) -> None:
    sampling_cases.check_sampling_keys(sampler, CPU)


@pytest.mark.parametrize(("draws", "blocks"), [(20_000, 1), (4_000, 3)])
def test_sampling_distribution(draws: int, blocks: int) -> None:
    sampling_cases.check_sampling_distribution(sample_reference, draws, CPU, blocks=blocks)


def test_random_pairs() -> None:
    sampling_cases.check_random_pairs(CPU)


def test_dispatch_takes_the_reference_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a CPU tensor reached Triton")

    monkeypatch.setattr("nanovllm.kernels.sampling.sample_triton", refuse)
    params = map_columns(greedy(3), lambda _, column: torch.from_numpy(column))
    assert sample(torch.eye(3), params).tolist() == [0, 1, 2]


def test_empty_batches() -> None:
    """Nothing is launched: CUDA refuses a grid of size zero."""
    heads = Heads(2, 1, 16, 16)
    layer_cases.check_store(0, heads, CPU)
    cache = attention_cases.make_cache([3], heads, CPU)
    q = torch.zeros(0, 2, 16)
    for attend in attention_cases.DECODE:
        assert attend(q, cache.kv, cache.tables[:0], cache.contexts[:0], 0, 1.0).shape == q.shape
    bounds = torch.zeros(1, dtype=torch.int32)
    for attend in attention_cases.PREFILL:
        assert attend(q, cache.kv, cache.tables[:0], bounds, cache.contexts[:0], 0, 1.0).shape == q.shape
    rows = sampling_cases.make_rows(0, CPU)
    for sampler in sampling_cases.SAMPLERS:
        assert sampler(torch.zeros(0, 9), *rows.pick(sampling_cases.ALL)).shape == (0,)
