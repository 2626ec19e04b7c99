"""Products with a packed weight on a CPU: against exact sums, and the same bits for any team and batch."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_kernel_cases import threads
from tensors import BF16, F16, F32, randn

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.activation import silu_and_mul
from nanovllm.cpu.kernels.gated_matmul import FEW_ROWS, gated_matmul
from nanovllm.cpu.kernels.matmul import copy_rows, embed, matmul, packed_shape, unpacked, widened

pytestmark = pytest.mark.skipif(not isa.has_kernels(), reason="needs the CPU's kernels")

SIZES = [(40, 48), (200, 576), (130, 1000)]  # n, k: a part of a block of 64 columns, then blocks and a part
ROWS = [1, 2, 5, 6, 7, 8, 97]  # tiles have up to 6 rows, programs up to 96
DTYPES = [F32, BF16, F16]
# An engine in float32 stores weights in 16 bits if they are exact; no engine has the other mixtures.
OF_ENGINES = [*((each, each) for each in DTYPES), (F32, BF16), (F32, F16)]
MIXED = [(x, weight) for x in (BF16, F16) for weight in DTYPES if x is not weight]
PAIRS = [*OF_ENGINES, *(pytest.param(*each, marks=pytest.mark.full) for each in MIXED)]


def part(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random rows in a wider tensor, which is NaN elsewhere."""
    wide = torch.full((rows, columns + 5), math.nan, dtype=dtype)
    wide[:, :columns] = randn(rows, columns, dtype=dtype, seed=seed)
    return wide[:, :columns]


def pack(weight: torch.Tensor) -> torch.Tensor:
    packed = torch.zeros(packed_shape(tuple(weight.shape), weight.dtype), dtype=weight.dtype)
    copy_rows(packed, weight, 0, 0)
    return packed


def assert_product(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *extra: torch.Tensor) -> None:
    """The sums have float32's error, which grows as the root of their length; the result is rounded once."""
    x, weight = x.double(), weight.double()
    exact, size = x @ weight.T, x.abs() @ weight.abs().T
    for each in extra:
        exact, size = exact + each.double(), size + each.double().abs()
    error = math.sqrt(x.shape[1]) * 2.0**-23 * size
    rounding = torch.finfo(found.dtype).eps / 2 * (exact.abs() + error)
    assert ((found.double() - exact).abs() <= error + rounding).all()


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_products_are_near_the_exact_ones(
    n: int, k: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    weight, bias = randn(n, k, dtype=weight_dtype), randn(n, dtype=dtype, seed=1)
    packed = pack(weight)
    for rows in ROWS:
        x, residual = part(rows, k, dtype, 2), part(rows, n, dtype, 3)
        for extra in ({}, {"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
            found = matmul(x, packed, n, **extra)
            assert found.dtype == dtype and found.shape == (rows, n)
            assert_product(found, x, weight, *extra.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_odd_number_of_steps(dtype: torch.dtype) -> None:
    """`test_cpu_levels.py` runs this one for each level."""
    k = 50 if dtype == BF16 else 33  # pairs of bfloat16
    weight, bias = randn(70, k, dtype=dtype), randn(70, dtype=dtype, seed=1)
    packed = pack(weight)
    for rows in (1, 2, 3, 11):
        x, residual = part(rows, k, dtype, 2), part(rows, 70, dtype, 3)
        assert_product(matmul(x, packed, 70, bias, residual), x, weight, bias, residual)


@pytest.mark.parametrize(("dtype", "weight_dtype"), OF_ENGINES)
def test_gated_products_have_the_bits_of_two_kernels(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """`test_cpu_levels.py` runs this one for each level."""
    for n, k in ((256, 64), (384, 50)):
        packed = pack(randn(n, k, dtype=weight_dtype))
        for rows in (17, 32, 97, 300):
            x = part(rows, k, dtype, 2)
            for kind in ("", "erf", "tanh", "clamped"):
                found = gated_matmul(x, packed, n, kind)
                assert found is not None and torch.equal(found, silu_and_mul(matmul(x, packed, n), kind))
                for number in (1, 3):
                    with threads(number):
                        assert torch.equal(gated_matmul(x, packed, n, kind), found)
        assert gated_matmul(x[:FEW_ROWS], packed, n, "") is None


def test_halves_without_whole_blocks_are_not_gated() -> None:
    assert gated_matmul(randn(40, 64), pack(randn(320, 64)), 320, "") is None


def test_fewer_columns_than_the_weight_has_and_no_rows() -> None:
    weight, x = randn(130, 48), randn(3, 48, seed=1)
    packed = pack(weight)
    whole = matmul(x, packed, 130)
    for n in (5, 64, 100):
        assert torch.equal(matmul(x, packed, n), whole[:, :n])
    assert matmul(torch.empty(0, 48), packed, 130).shape == (0, 130)


@pytest.mark.parametrize(("dtype", "weight_dtype"), OF_ENGINES)
@pytest.mark.parametrize(("n", "k"), [(200, 576), (450, 48)])
def test_the_same_bits_for_any_team_and_batch(
    n: int, k: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    packed, bias = pack(randn(n, k, dtype=weight_dtype)), randn(n, dtype=dtype, seed=1)
    x, residual = part(97, k, dtype, 2), part(97, n, dtype, 3)
    with threads(1):
        expected = matmul(x, packed, n, bias, residual)
    for number in (1, 2, 3):
        with threads(number):
            assert torch.equal(matmul(x, packed, n, bias, residual), expected)
            for first, last in ((0, 1), (5, 6), (96, 97), (3, 11), (40, 97)):
                own = slice(first, last)
                assert torch.equal(matmul(x[own], packed, n, bias, residual[own]), expected[own])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_stay_in_their_row_and_column(dtype: torch.dtype) -> None:
    x, weight = randn(9, 48, dtype=dtype), randn(70, 48, dtype=dtype, seed=1)
    x[4, 7], weight[66, 47] = math.nan, math.inf
    spoilt = matmul(x, pack(weight), 70).isfinite().logical_not()
    assert spoilt[4].all() and spoilt[:, 66].all() and spoilt.sum() == 70 + 9 - 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_copied_to_any_place(dtype: torch.dtype) -> None:
    """Parts of blocks, whole blocks, and in bfloat16 columns that cut pairs."""
    packed = torch.zeros(packed_shape((300, 50), dtype), dtype=dtype)
    expected = torch.zeros(320, 50, dtype=dtype)
    places = [(0, 0, 300, 50), (60, 4, 200, 10), (64, 0, 128, 6), (70, 3, 90, 8), (299, 6, 1, 5)]
    for number, (row, column, rows, columns) in enumerate(places):
        source = part(rows, columns, F32, number)
        copy_rows(packed, source, row, column)
        expected[row : row + rows, column : column + columns] = source
        assert torch.equal(unpacked(packed), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_rows_of_a_weight(weight_dtype: torch.dtype, dtype: torch.dtype) -> None:
    weight = randn(130, 50, dtype=weight_dtype)
    ids = torch.tensor([0, 129, 63, 64, 7, 7, 128])
    expected = weight[ids].to(dtype)
    for number in (1, 2, 3):
        with threads(number):
            assert torch.equal(embed(ids, pack(weight), dtype), expected)
    assert embed(ids[:0], pack(weight), dtype).shape == (0, 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 48, 1000])
def test_rows_in_float32(columns: int, dtype: torch.dtype) -> None:
    x = part(7, columns, dtype, 0)
    for number in (1, 2, 3):
        with threads(number):
            assert torch.equal(widened(x), x.float())
