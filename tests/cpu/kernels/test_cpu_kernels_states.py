"""The CPU's kernels of layers with states: against float64, their twins, and themselves after cuts."""

from __future__ import annotations

import pytest
import state_cases
import torch
from state_cases import assert_close, check_cuts, check_prefill, check_step, make_case, packed_of
from tensors import BF16, F16, F32, randn

from nanovllm.batch import PADDING
from nanovllm.cpu.kernels.causal_conv import causal_conv, causal_conv_step
from nanovllm.cpu.kernels.delta_rule import delta_prefill, delta_step
from nanovllm.cpu.kernels.gated_norm import gated_norm
from nanovllm.states.kernels.delta_heads import DeltaHeads
from nanovllm.states.kernels.delta_prefill_reference import delta_prefill_reference
from nanovllm.states.kernels.delta_step import delta_step_reference
from nanovllm.states.kernels.packed import Saves
from nanovllm.states.kernels.sigmoid_gate import sigmoid_gate, sigmoid_gate_reference

HEADS = DeltaHeads(2, 6, 16, 32)  # Hv = 3 Hk, dv != dk
WIDE = DeltaHeads(1, 1, 128, 48)  # columns that no two vectors divide
LONG = ([0, 1, 2, 64, 70, 0, 130, 3], [0, 0, 100, 0, 30, 7, 64, 126])
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)


@DTYPES
@pytest.mark.parametrize("heads", [HEADS, WIDE], ids=str)
def test_prefill_of_packed_sequences(heads: DeltaHeads, dtype: torch.dtype) -> None:
    saves = [(3, 0), (3, 64), (4, 31), (4, 50), (4, 100), (6, 64), (6, 128), (6, 194), (7, 127)]
    check_prefill(delta_prefill, make_case(heads, *LONG, dtype=dtype), saves)
    check_prefill(delta_prefill, make_case(heads, *LONG, dtype=dtype))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("cuts", [[64], [1, 2, 40], [127]], ids=str)
def test_no_cut_changes_a_bit(cuts: list[int], dtype: torch.dtype) -> None:
    """Also those within a chunk: tokens are computed one after the other."""
    check_cuts(delta_prefill, make_case(HEADS, [130], dtype=dtype), cuts, equal=True)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_step_has_the_bits_of_a_prompt(dtype: torch.dtype) -> None:
    """A token of a prompt, and the same one drawn."""
    case = make_case(HEADS, [9], [5], dtype=dtype)
    pools = case.pool.clone(), case.pool.clone()
    expected = delta_prefill(case.qkv, case.gates, HEADS, pools[0], case.packed)
    rows, found = torch.tensor(case.rows), []
    for at in range(9):
        one = case.gates._replace(a=case.gates.a[at : at + 1], b=case.gates.b[at : at + 1])
        found.append(delta_step(case.qkv[at : at + 1], one, HEADS, pools[1], rows))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


@DTYPES
@pytest.mark.parametrize("heads", [HEADS, WIDE], ids=str)
def test_one_token_of_each(heads: DeltaHeads, dtype: torch.dtype) -> None:
    check_step(delta_step, make_case(heads, [1] * 5, [3, 64, 1, 99, 7], dtype=dtype))


def test_a_beta_up_to_2() -> None:
    """Of models that allow negative eigenvalues: prompts and steps as their twins."""
    case = make_case(HEADS._replace(most_beta=2.0), [20, 33], [64, 0])
    pools = case.pool.clone(), case.pool.clone()
    found, twin = (
        run(case.qkv, case.gates, case.heads, pool, case.packed)
        for run, pool in zip((delta_prefill, delta_prefill_reference), pools, strict=True)
    )
    assert_close(found, twin, 5e-5)
    assert_close(pools[0].nan_to_num(), pools[1].nan_to_num(), 5e-5)
    rows, few = torch.tensor(case.rows), case.gates._replace(a=case.gates.a[:2], b=case.gates.b[:2])
    found, twin = (
        run(case.qkv[:2], few, case.heads, pool, rows)
        for run, pool in zip((delta_step, delta_step_reference), pools, strict=True)
    )
    assert_close(found, twin, 5e-5)


def test_other_pools_and_gates() -> None:
    """States in bfloat16, A_log in float32, rows in int64."""
    case = make_case(HEADS, [20, 33], [64, 0], dtype=BF16, pool_dtype=BF16)
    gates = case.gates._replace(a_log=case.gates.a_log.float())
    check_prefill(delta_prefill, case._replace(gates=gates))
    step = make_case(HEADS, [1, 1], [4, 5], dtype=BF16, pool_dtype=BF16)
    check_step(lambda *a: delta_step(*a[:4], a[4].long()), step)


def test_a_save_outside_of_its_tokens_writes_nothing() -> None:
    case = make_case(HEADS, [5, 20], [64, 3], spare=4)
    outside = [row for row in range(6) if row not in case.rows]
    wanted = [(0, 63, outside[0]), (0, 70, outside[1]), (1, 24, outside[2]), (1, 10, PADDING)]
    pool = case.pool.clone()
    delta_prefill(case.qkv, case.gates, HEADS, pool, case.packed, Saves.of(wanted, 2, "cpu"))
    assert pool[outside].isnan().all() and not pool[case.rows].isnan().any()


def test_a_source_and_no_target() -> None:
    case = make_case(HEADS, [20], [64])
    packed = packed_of(case.lengths, case.positions, [PADDING], sources=case.rows)
    pool = case.pool.clone()
    out = delta_prefill(case.qkv, case.gates, HEADS, pool, packed)
    assert_close(out, state_cases.exact_delta(case)[0], 2e-5)
    assert torch.equal(pool[case.rows[0]], case.pool[case.rows[0]])


@pytest.mark.parametrize("b", [-1.0, 20.0])
def test_one_token_again_and_again(b: float) -> None:
    case = state_cases.repeated(HEADS, 200, b, F32, "cpu")
    check_prefill(delta_prefill, case)


def test_gates_far_from_0() -> None:
    """softplus of large and small numbers; a decay to 0."""
    case = make_case(HEADS, [1] * 5, [3, 64, 1, 99, 7])
    case.gates.a[:] = torch.tensor([-90.0, -20.0, 0.0, 20.0, 90.0])[:, None]
    check_step(delta_step, case)


# ---- the convolution ----


@DTYPES
@pytest.mark.parametrize(
    ("channels", "k", "bias", "gated"),
    [
        *((24, 4, False, False), (136, 3, True, False), (16, 2, False, False)),
        *((24, 3, False, True), (80, 3, True, True), (144, 2, False, True), (208, 3, True, False)),
    ],
)
def test_convolution(channels: int, k: int, bias: bool, gated: bool, dtype: torch.dtype) -> None:
    case = state_cases.make_conv_case(channels, k, *LONG, dtype=dtype, bias=bias, gated=gated)
    saves = [(2, 101), (3, 0), (3, 1), (4, 64), (6, 64), (6, 66), (6, 194), (7, 127)]
    state_cases.check_conv(causal_conv, case, saves)
    lengths = [1] * 5, [1, 2, 9, 70, 5]
    step = state_cases.make_conv_case(channels, k, *lengths, dtype=dtype, bias=bias, gated=gated)
    state_cases.check_conv_step(causal_conv_step, step)


def test_a_convolution_in_pieces() -> None:
    case = state_cases.make_conv_case(80, 4, [75], [0])
    run = causal_conv
    expected = run(case.x, case.weight, None, case.pool.clone(), packed_of([75], [0], case.rows))
    for sizes in ([40, 35], [2, 73], [1, 1, 1, 72]):
        pool, found, at = case.pool.clone(), [], 0
        for size in sizes:
            packed = packed_of([size], [at], case.rows)
            found.append(run(case.x[at : at + size], case.weight, None, pool, packed))
            at += size
        assert torch.equal(torch.cat(found), expected)
        assert torch.equal(pool[case.rows[0]], case.x[-3:])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_step_of_a_gated_convolution_has_the_bits_of_a_prompt(dtype: torch.dtype) -> None:
    case = state_cases.make_conv_case(80, 3, [9], [5], dtype=dtype, bias=True, gated=True)
    assert case.gates is not None
    pools = case.pool.clone(), case.pool.clone()
    packed, rows = packed_of([9], [5], case.rows), torch.tensor(case.rows)
    whole = causal_conv(case.x, case.weight, case.bias, pools[0], packed, None, case.gates)
    for at in range(9):
        one = case.x[at : at + 1], case.weight, case.bias, pools[1], rows, case.gates[at : at + 1]
        assert torch.equal(causal_conv_step(*one), whole[at : at + 1])
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


# ---- gates ----


@DTYPES
@pytest.mark.parametrize("shape", [(3, 6, 32), (1, 1, 80), (2, 3, 24), (0, 2, 16)], ids=str)
def test_gated_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    state_cases.check_gated_norm(gated_norm, shape, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("n", [32, 23])
def test_gate_of_what_attended(n: int, dtype: torch.dtype) -> None:
    x, gate = randn(5, n + 3, dtype=dtype)[:, 3:], 3 * randn(5, n, dtype=dtype, seed=1)
    expected = sigmoid_gate_reference(x.double(), gate.double())
    assert_close(sigmoid_gate(x, gate), expected, {F32: 1e-6, F16: 2e-3}.get(dtype, 1e-2))


def test_sizes_that_do_not_fit_are_refused() -> None:
    rows, case = torch.zeros(1, dtype=torch.int32), make_case(HEADS, [3])
    with pytest.raises(ValueError, match=r"pool \[rows, K - 1, C\]"):
        causal_conv_step(randn(1, 8), randn(8, 4), None, torch.zeros(2, 4, 8), rows)
    with pytest.raises(ValueError, match=r"pool \[rows, 6, 16, 32\]"):
        delta_step(case.qkv, case.gates, HEADS, case.pool.mT.contiguous(), rows)
