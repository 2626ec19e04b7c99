"""The gated delta rule: the twins against float64 and transformers, and the Triton kernels, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import state_cases
import torch
from state_cases import assert_close, check_cuts, check_prefill, check_step, make_case, packed_of
from tensors import BF16, F16, F32, randn
from transformers.models.qwen3_next import modeling_qwen3_next as oracle

from nanovllm.batch import PADDING
from nanovllm.kernels.compat import INTERPRET
from nanovllm.states.kernels.delta_heads import DeltaHeads, Gates, gates_reference
from nanovllm.states.kernels.delta_prefill import PrefillTiles, delta_prefill_triton
from nanovllm.states.kernels.delta_prefill_reference import delta_prefill_reference
from nanovllm.states.kernels.delta_step import TokenTile, delta_step_reference, delta_step_triton
from nanovllm.states.kernels.packed import CHUNK, Saves, most_chunks

F64 = torch.float64
HEADS = DeltaHeads(2, 6, 16, 32)  # Hv = 3 Hk, dv != dk
MIXED = ([0, 1, 2, 64, 70, 0, 130, 3], [0, 0, 100, 0, 30, 7, 64, 126])
TWIN = pytest.param(False, id="twin")
KERNEL = pytest.param(
    True, id="kernel", marks=pytest.mark.skipif(not INTERPRET, reason="compiled here; tests/gpu runs these")
)
both = pytest.mark.parametrize("triton", [TWIN, KERNEL])
kernel = pytest.mark.skipif(not INTERPRET, reason="compiled here; tests/gpu runs these")


def prefill(triton: bool) -> Any:
    return delta_prefill_triton if triton else delta_prefill_reference


def step(triton: bool) -> Any:
    return delta_step_triton if triton else delta_step_reference


# ---- chunks ----


@pytest.mark.parametrize("seed", range(5))
def test_chunks_lie_on_a_grid_of_positions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 200, (9,), generator=generator).where(
        torch.rand(9, generator=generator) < 0.7, 0
    )
    positions = torch.randint(0, 300, (9,), generator=generator)
    packed = packed_of(lengths.tolist(), positions.tolist(), list(range(9)))
    expected = []
    for sequence, (length, position) in enumerate(zip(lengths.tolist(), positions.tolist(), strict=True)):
        first, at = int(packed.starts[sequence]), 0
        while at < length:
            count = min(length - at, CHUNK - (position + at) % CHUNK)
            expected.append((sequence, first + at, count))
            at += count
    columns = (packed.chunk_seqs, packed.chunk_tokens, packed.chunk_counts)
    found = [each for each in zip(*(column.tolist() for column in columns), strict=True) if each[2]]
    assert found == expected and int(packed.chunk_starts[-1]) == len(expected)
    assert len(packed.chunk_seqs) == most_chunks(int(lengths.sum()), 9) >= len(expected)


def test_a_save_of_no_sequence_is_refused() -> None:
    with pytest.raises(
        ValueError, match="sequence 2 at position 5 cannot go to row 0: there are sequences 0 to 1"
    ):
        Saves.of([(0, 3, 1), (2, 5, 0)], 2, "cpu")


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        (DeltaHeads(2, 3, 16, 16), "v_heads=3"),
        (DeltaHeads(1, 9, 16, 16), "1 to 8 value heads"),
        (DeltaHeads(1, 1, 24, 16), "k_dim=24"),
        (DeltaHeads(1, 1, 16, 272), "up to 256"),
    ],
)
def test_heads_that_no_kernel_has_are_refused(heads: DeltaHeads, text: str) -> None:
    case = make_case(heads, [1])
    for operation in (delta_prefill_reference, delta_prefill_triton):
        with pytest.raises(ValueError, match=text):
            operation(case.qkv, case.gates, heads, case.pool, case.packed)


def test_sizes_that_do_not_fit_are_refused() -> None:
    case = make_case(HEADS, [3])
    rows = torch.tensor(case.rows)
    with pytest.raises(ValueError, match=r"pool \[rows, 6, 16, 32\]"):
        delta_step_reference(case.qkv, case.gates, HEADS, case.pool.mT.contiguous(), rows)
    with pytest.raises(ValueError, match=r"a and b are \[3, 6\]"):
        delta_step_reference(case.qkv, case.gates._replace(a=case.gates.a[:2]), HEADS, case.pool, rows)


# ---- the rule over prompts ----


@both
def test_prefill_of_packed_sequences(triton: bool) -> None:
    check_prefill(prefill(triton), make_case(HEADS, *MIXED))


@both
def test_prefill_saves_states(triton: bool) -> None:
    """In the middle of a chunk, two in one chunk, at a border, at either end, of a sequence with a past."""
    saves = [
        (3, 0),
        (3, 64),
        (4, 31),
        (4, 50),
        (4, 64),
        (4, 100),
        (6, 64),
        (6, 128),
        (6, 160),
        (6, 194),
        (7, 127),
    ]
    check_prefill(prefill(triton), make_case(HEADS, *MIXED), saves)


@both
def test_a_save_outside_of_its_tokens_writes_nothing(triton: bool) -> None:
    case = make_case(HEADS, [5, 20], [64, 3], spare=4)
    outside = [row for row in range(6) if row not in case.rows]
    wanted = [(0, 63, outside[0]), (0, 70, outside[1]), (1, 24, outside[2]), (1, 10, PADDING)]
    pool = case.pool.clone()
    prefill(triton)(case.qkv, case.gates, HEADS, pool, case.packed, Saves.of(wanted, 2, "cpu"))
    assert pool[outside].isnan().all() and not pool[case.rows].isnan().any()


@both
def test_prefill_reads_a_source_and_may_write_nothing(triton: bool) -> None:
    case = make_case(HEADS, [20, 33], [64, 100])
    packed = packed_of(case.lengths, case.positions, [PADDING, case.rows[1]], sources=case.rows[::-1])
    pool = case.pool.clone()
    out = prefill(triton)(case.qkv, case.gates, HEADS, pool, packed)
    swapped = case._replace(rows=case.rows[::-1])
    expected, finals, _ = state_cases.exact_delta(swapped)
    assert_close(out, expected, 2e-5)
    assert_close(pool[case.rows[1]], finals[1], 2e-5)
    assert torch.equal(pool[case.rows[0]], case.pool[case.rows[0]])


@both
@pytest.mark.parametrize("cuts", [[64], [128, 192]], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_cuts_on_the_grid_change_no_bit(cuts: list[int], dtype: torch.dtype, triton: bool) -> None:
    check_cuts(prefill(triton), make_case(HEADS, [200], dtype=dtype), cuts, equal=True)


@both
@pytest.mark.parametrize("cuts", [[40], [2, 75], [63, 64, 65]], ids=str)
def test_cuts_within_a_chunk_are_noise(cuts: list[int], triton: bool) -> None:
    check_cuts(prefill(triton), make_case(HEADS, [140]), cuts, equal=False)


@both
def test_a_neighbour_changes_no_bit(triton: bool) -> None:
    case = make_case(HEADS, [70, 66, 3])
    pools = case.pool.clone(), case.pool.clone()
    together = prefill(triton)(case.qkv, case.gates, HEADS, pools[0], case.packed)
    gates = Gates(case.gates.a[70:136], case.gates.b[70:136], *case.gates[2:])
    alone = prefill(triton)(case.qkv[70:136], gates, HEADS, pools[1], packed_of([66], [0], case.rows[1:2]))
    assert torch.equal(together[70:136], alone)
    assert torch.equal(pools[0][case.rows[1]], pools[1][case.rows[1]])


@both
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (DeltaHeads(1, 1, 16, 16), BF16),
        (DeltaHeads(1, 2, 48, 80), BF16),
        (DeltaHeads(1, 8, 32, 16), F16),
        (DeltaHeads(2, 6, 16, 32, most_beta=2.0), F32),
        pytest.param(DeltaHeads(1, 2, 128, 128), BF16, marks=pytest.mark.full),
        pytest.param(DeltaHeads(1, 1, 256, 240), F16, marks=pytest.mark.full),
        pytest.param(DeltaHeads(2, 4, 96, 64), F32, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_prefill_of_other_sizes(heads: DeltaHeads, dtype: torch.dtype, triton: bool) -> None:
    check_prefill(prefill(triton), make_case(heads, [3, 65], [0, 10], dtype), [(1, 30)])


@both
def test_a_pool_of_bfloat16(triton: bool) -> None:
    check_prefill(prefill(triton), make_case(HEADS, [5, 70], [0, 9], pool_dtype=BF16), [(1, 30)])
    check_step(step(triton), make_case(HEADS, [1] * 3, [1, 9, 70], pool_dtype=BF16))


@both
def test_keys_that_repeat(triton: bool) -> None:
    """In bfloat16 an inverse that is rounded to it would miss the result by 6 to 23 %."""
    for b, dtype in ((9.0, F32), (0.85, BF16), (9.0, BF16)):
        check_prefill(prefill(triton), state_cases.repeated(HEADS, 128, b, dtype, "cpu"))


@both
def test_a_token_that_forgets_all(triton: bool) -> None:
    """g of -80 among small ones: no difference of sums overflows."""
    case = make_case(HEADS, [128])
    case.gates.a_log[:] = 0.0
    case.gates.dt_bias[:] = 0.0
    case.gates.a[[5, 63, 64, 100]] = 80.0
    check_prefill(prefill(triton), case)


@kernel
def test_tiles_that_compute_wrong_states_are_refused() -> None:
    case = make_case(DeltaHeads(1, 1, 16, 32), [3], dtype=torch.bfloat16)
    arguments = case.qkv, case.gates, case.heads, case.pool, case.packed
    with pytest.raises(ValueError, match="8 warps and fewer than 64 columns"):
        delta_prefill_triton(*arguments, tiles=PrefillTiles(32, 8, 1, 4))


@pytest.mark.parametrize("tiles", [PrefillTiles(16, 4, 1, 4), PrefillTiles(32, 4, 3, 8)], ids=str)
def test_tiles_of_a_prefill(tiles: PrefillTiles) -> None:
    check_prefill(delta_prefill_triton, make_case(HEADS, [70, 1], [3, 0], BF16), [(0, 40)], tiles=tiles)


def test_the_twin_in_float64() -> None:
    check_prefill(delta_prefill_reference, make_case(HEADS, *MIXED, dtype=F64), [(6, 100)])
    check_step(delta_step_reference, make_case(HEADS, [1] * 3, [5, 9, 70], dtype=F64))


def as_transformers(case: state_cases.Case) -> tuple[Any, ...]:
    """q, k, v, g, beta of one sequence, with a first dimension of 1."""
    heads, size = case.heads, case.heads.k_heads * case.heads.k_dim
    q, k, v = case.qkv.split([size, size, heads.v_heads * heads.v_dim], dim=1)
    g, beta = gates_reference(case.gates)
    q, k = (each.reshape(1, -1, heads.k_heads, heads.k_dim) for each in (q, k))
    return q, k, v.reshape(1, -1, heads.v_heads, heads.v_dim), g[None], beta.to(case.qkv.dtype)[None]


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 2e-5), (BF16, 1e-2)], ids=str)
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_twins_are_those_of_transformers(name: str, dtype: torch.dtype, bound: float) -> None:
    case = make_case(HEADS, [75], [10], dtype)
    function = getattr(oracle, name)
    expected, final = function(
        *as_transformers(case),
        initial_state=case.pool[case.rows],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    pool = case.pool.clone()
    out = delta_prefill_reference(case.qkv, case.gates, HEADS, pool, case.packed)
    assert out.dtype == expected.dtype == dtype
    assert_close(out, expected[0], bound)
    assert_close(pool[case.rows], final, 2e-5)
    pool, rows = case.pool.clone(), torch.tensor(case.rows)
    for t in range(75):
        gates = Gates(case.gates.a[t : t + 1], case.gates.b[t : t + 1], *case.gates[2:])
        out = delta_step_reference(case.qkv[t : t + 1], gates, HEADS, pool, rows)
        assert_close(out[0], expected[0, t], max(bound, 1e-4))
    assert_close(pool[case.rows], final, 2e-5)


# ---- one token ----


@both
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (HEADS, F32),
        (HEADS, BF16),
        (DeltaHeads(1, 1, 48, 80), F16),
        (DeltaHeads(1, 8, 16, 16), BF16),
        (DeltaHeads(2, 6, 16, 32, most_beta=2.0), F32),
        pytest.param(DeltaHeads(1, 2, 256, 240), BF16, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_step(heads: DeltaHeads, dtype: torch.dtype, triton: bool) -> None:
    check_step(step(triton), make_case(heads, [1] * 4, [1, 100, 5, 7], dtype))


@kernel
@pytest.mark.parametrize("tile", [TokenTile(16, 1), TokenTile(128, 8)], ids=str)
def test_tiles_of_a_step(tile: TokenTile) -> None:
    check_step(delta_step_triton, make_case(HEADS, [1] * 2, [1, 100], BF16), tile=tile)


@both
def test_steps_of_nothing(triton: bool) -> None:
    case = make_case(HEADS, [])
    assert step(triton)(
        case.qkv, case.gates, HEADS, case.pool, torch.tensor([], dtype=torch.int32)
    ).shape == (
        0,
        6,
        32,
    )
    assert prefill(triton)(case.qkv, case.gates, HEADS, case.pool, case.packed).shape == (0, 6, 32)


def test_gates_are_accurate_for_every_input() -> None:
    """softplus of very negative inputs is not 0, and beta is rounded to the model's dtype."""
    a = torch.tensor([[-60.0], [-17.0], [-5.0], [0.0], [19.9], [20.1], [90.0]])
    gates = Gates(a, randn(7, 1).to(BF16), torch.zeros(1), torch.zeros(1))
    g, beta = gates_reference(gates)
    exact = -torch.log1p(torch.exp(a.double()))
    torch.testing.assert_close(g.double(), exact, rtol=2e-7, atol=0)
    assert torch.equal(beta, beta.to(BF16).float())


@kernel
def test_gates_of_the_kernel_are_accurate() -> None:
    """A state of ones and k = 0 decays to exp(g): a small g must not be lost."""
    heads = DeltaHeads(1, 1, 16, 16)
    case = make_case(heads, [1], [1])
    gates = case.gates._replace(a=torch.full((1, 1), -5.0), dt_bias=torch.zeros(1), a_log=torch.zeros(1))
    pool = torch.ones_like(case.pool)
    delta_step_triton(torch.zeros_like(case.qkv), gates, heads, pool, torch.tensor(case.rows))
    expected = torch.exp(-torch.log1p(torch.exp(torch.tensor(-5.0, dtype=F64))))
    torch.testing.assert_close(pool[case.rows].double(), expected.expand(1, 1, 16, 16), rtol=2e-7, atol=0)
