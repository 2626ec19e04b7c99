"""The compiled kernels of states on a CUDA device, against their twins and in a CUDA graph."""

from __future__ import annotations

import pytest
import state_cases
import torch
from state_cases import check_cuts, check_prefill, check_step, make_case
from tensors import BF16, F16, F32, randn

from nanovllm.batch import PADDING
from nanovllm.states.kernels.causal_conv import causal_conv_step_triton, causal_conv_triton
from nanovllm.states.kernels.delta_heads import DeltaHeads, Gates
from nanovllm.states.kernels.delta_prefill import PrefillTiles, delta_prefill_triton
from nanovllm.states.kernels.delta_step import TokenTile, delta_step_reference, delta_step_triton
from nanovllm.states.kernels.gated_norm import gated_norm_triton

pytestmark = pytest.mark.gpu

GPU = "cuda"
A3B = DeltaHeads(16, 32, 128, 128)
ODD = [
    (DeltaHeads(2, 6, 16, 32), BF16),
    (DeltaHeads(1, 1, 48, 80), F16),
    (DeltaHeads(1, 8, 96, 112), BF16),
    (DeltaHeads(1, 2, 256, 240), BF16),
    (DeltaHeads(1, 2, 256, 256), F32),
    (DeltaHeads(2, 6, 128, 128), F32),
]
odd = pytest.mark.parametrize(("heads", "dtype"), ODD, ids=str)
PROMPTS = [
    [1],
    [63],
    [64],
    [16384],
    [3, 0, 1, 130, 65],
    [5] * 97,
    [256] * 64,
    [4096, *[20] * 100],
]


@pytest.mark.parametrize("rows", [1, 3, 97, 256])
@pytest.mark.parametrize("pool_dtype", [F32, BF16], ids=str)
def test_step(rows: int, pool_dtype: torch.dtype) -> None:
    case = make_case(A3B, [1] * rows, [5] * rows, BF16, GPU, spare=20, pool_dtype=pool_dtype)
    state_cases.check_step_of_many(case)


@odd
def test_step_of_odd_sizes(heads: DeltaHeads, dtype: torch.dtype) -> None:
    check_step(delta_step_triton, make_case(heads, [1] * 5, [1, 100, 5, 7, 9], dtype, GPU))


@pytest.mark.parametrize(
    "tile", [TokenTile(16, 1), TokenTile(32, 1), TokenTile(64, 4), TokenTile(128, 8)], ids=str
)
def test_tiles_of_a_step(tile: TokenTile) -> None:
    state_cases.check_step_of_many(make_case(A3B, [1] * 30, [5] * 30, BF16, GPU), tile=tile)


def test_rows_of_a_step_are_independent() -> None:
    case = make_case(A3B, [1] * 97, [5] * 97, BF16, GPU)
    rows = torch.tensor(case.rows, device=GPU)
    pool, other = case.pool.clone(), case.pool.clone()
    out = delta_step_triton(case.qkv, case.gates, A3B, pool, rows, invariant=True)
    for row in (0, 50, 96):
        mine = slice(row, row + 1)
        gates = Gates(case.gates.a[mine], case.gates.b[mine], *case.gates[2:])
        alone = delta_step_triton(case.qkv[mine], gates, A3B, other, rows[mine], invariant=True)
        assert torch.equal(alone[0], out[row]) and torch.equal(other[rows[row]], pool[rows[row]])


def test_steps_in_a_graph() -> None:
    """The graph reads rows and inputs anew, and goes on from the states that it left."""
    case = make_case(A3B, [1] * 16, [5] * 16, BF16, GPU)
    conv = state_cases.make_conv_case(A3B.channels, 4, [1] * 16, [5] * 16, BF16, GPU)
    rows = torch.full((16,), PADDING, dtype=torch.int32, device=GPU)
    x, z = conv.x.clone(), randn(16, 32, 128, dtype=BF16, device=GPU, seed=5)
    weight = randn(128, dtype=BF16, device=GPU, seed=6)
    pool, conv_pool = case.pool.clone(), conv.pool[: len(case.pool)].clone()

    def layer() -> torch.Tensor:
        mixed = causal_conv_step_triton(x, conv.weight, None, conv_pool, rows)
        return gated_norm_triton(delta_step_triton(mixed, case.gates, A3B, pool, rows), z, weight, 1e-6)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    assert torch.equal(pool.isnan(), case.pool.isnan()), "padding alone writes nothing"
    conv_pool[:] = randn(*conv_pool.shape, dtype=BF16, device=GPU, seed=7)
    twin, conv_twin = pool.clone(), conv_pool.clone()
    for step, live in enumerate((16, 5, 12)):
        rows.fill_(PADDING)
        rows[:live] = torch.tensor(case.rows[:live], device=GPU)
        x.copy_(randn(*x.shape, dtype=BF16, device=GPU, seed=30 + step))
        graph.replay()
        mixed = causal_conv_step_triton(x, conv.weight, None, conv_twin, rows)
        found = delta_step_reference(mixed, case.gates, A3B, twin, rows)
        state_cases.assert_close(out, gated_norm_triton(found, z, weight, 1e-6), 3e-2)
        assert torch.equal(conv_pool, conv_twin)
    mine = case.rows[:16]
    state_cases.assert_close(pool[mine], twin[mine], 3e-2)


@pytest.mark.parametrize("lengths", PROMPTS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
def test_prefill(lengths: list[int]) -> None:
    """Every second sequence goes on; the rows of no sequence are NaN."""
    positions = [index % 2 * (index + 60) for index in range(len(lengths))]
    state_cases.check_prefill_of_many(make_case(A3B, lengths, positions, BF16, GPU, spare=20))


@odd
def test_prefill_of_odd_sizes(heads: DeltaHeads, dtype: torch.dtype) -> None:
    check_prefill(
        delta_prefill_triton, make_case(heads, [3, 130, 0, 64], [0, 10, 5, 64], dtype, GPU), [(1, 75)]
    )


def test_prefill_saves_states() -> None:
    case = make_case(A3B, [370, 64, 20], [0, 64, 30], BF16, GPU)
    places = [(0, 0), (0, 64), (0, 100), (0, 101), (0, 369), (0, 370), (1, 128), (1, 127), (2, 31), (2, 50)]
    state_cases.check_prefill_of_many(case, places)


def test_prefill_with_a_pool_of_bfloat16() -> None:
    state_cases.check_prefill_of_many(
        make_case(A3B, [130, 64], [9, 0], BF16, GPU, pool_dtype=BF16), [(0, 100)]
    )


@pytest.mark.parametrize(
    "tiles",
    [
        *(PrefillTiles(16, 4, 2, 4), PrefillTiles(32, 4, 2, 4), PrefillTiles(64, 8, 2, 8)),
        *(PrefillTiles(128, 8, 2, 4), PrefillTiles(64, 4, 1, 4), PrefillTiles(32, 4, 3, 8)),
    ],
    ids=str,
)
def test_tiles_of_a_prefill(tiles: PrefillTiles) -> None:
    case = make_case(A3B, [300, 1, 64], [0, 70, 0], BF16, GPU)
    state_cases.check_prefill_of_many(case, [(0, 100)], tiles=tiles)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_cuts_on_the_grid_change_no_bit(dtype: torch.dtype) -> None:
    check_cuts(
        delta_prefill_triton, make_case(A3B, [1000], dtype=dtype, device=GPU), [64, 320, 960], equal=True
    )


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_cuts_within_a_chunk_are_noise(dtype: torch.dtype) -> None:
    check_cuts(
        delta_prefill_triton, make_case(A3B, [300], dtype=dtype, device=GPU), [1, 40, 200], equal=False
    )


@pytest.mark.parametrize(("b", "dtype"), [(9.0, F32), (0.85, BF16), (9.0, BF16), (2.2, F16)], ids=str)
def test_keys_that_repeat(b: float, dtype: torch.dtype) -> None:
    state_cases.check_prefill_of_many(state_cases.repeated(A3B, 256, b, dtype, GPU))


@pytest.mark.parametrize(
    ("channels", "k", "gated"), [(A3B.channels, 4, False), (2048, 3, True), (530, 3, True)]
)
@pytest.mark.parametrize("lengths", PROMPTS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
def test_convolution(lengths: list[int], channels: int, k: int, gated: bool) -> None:
    positions = [index % 3 * (index + 1) for index in range(len(lengths))]
    case = state_cases.make_conv_case(channels, k, lengths, positions, BF16, GPU, bias=gated, gated=gated)
    saves = [(0, positions[0] + at) for at in {0, 1, lengths[0]}]
    state_cases.check_conv(causal_conv_triton, case, sorted(saves))


@pytest.mark.parametrize(
    ("channels", "k", "gated"), [(A3B.channels, 4, False), (2048, 3, True), (530, 3, True)]
)
@pytest.mark.parametrize("rows", [1, 3, 97, 256])
def test_convolution_of_one_token(rows: int, channels: int, k: int, gated: bool) -> None:
    lengths = [1] * rows, [1 + row for row in range(rows)]
    case = state_cases.make_conv_case(channels, k, *lengths, BF16, GPU, bias=gated, gated=gated)
    state_cases.check_conv_step(causal_conv_step_triton, case)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", [(1, 32, 128), (97, 32, 128), (5, 3, 80), (4096, 48, 128)], ids=str)
def test_gated_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    state_cases.check_gated_norm(gated_norm_triton, shape, dtype, GPU)
