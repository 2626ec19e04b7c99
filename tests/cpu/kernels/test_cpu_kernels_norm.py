"""RMSNorm on a CPU: as the twin, for odd widths, strides and dtypes; the same bits for any team and batch."""

from __future__ import annotations

import pytest
import torch
from cpu_kernel_cases import threads

from nanovllm.cpu.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # of values below 5: some ulps


def rows(number: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 48, 576, 1000])
def test_as_the_twin(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = rows(5, width, dtype), rows(5, width, dtype, 1), rows(1, width, dtype, 2)[0]
    bounds = {"rtol": BOUNDS[dtype], "atol": BOUNDS[dtype]}
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), **bounds)
    for found, expected in zip(
        add_rms_norm(x, residual, weight, 1e-5),
        add_rms_norm_reference(x, residual, weight, 1e-5),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **bounds)
    unchanged = add_rms_norm(x, None, weight, 1e-5)[1]
    assert unchanged is x


def test_a_weight_in_float32_and_rows_with_strides() -> None:
    x, weight = rows(4, 200, torch.bfloat16), rows(1, 72, torch.float32, 2)[0]
    part = x[:, 64:136]
    found = add_rms_norm(part, part, weight, 1e-5)
    assert torch.equal(found[0], add_rms_norm(part.clone(), part.clone(), weight, 1e-5)[0])
    expected = add_rms_norm_reference(part, part, weight, 1e-5)
    torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=2e-2, atol=2e-2)


def test_shapes() -> None:
    weight = torch.ones(24)
    assert rms_norm(torch.zeros(0, 24), weight, 1e-5).shape == (0, 24)
    x = torch.randn(2, 3, 24)
    assert torch.equal(rms_norm(x, weight, 1e-5)[1, 2], rms_norm(x[1, 2:3], weight, 1e-5)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_for_any_team_and_batch(dtype: torch.dtype) -> None:
    x, residual, weight = rows(9, 100, dtype), rows(9, 100, dtype, 1), rows(1, 100, dtype, 2)[0]
    with threads(1):
        expected = add_rms_norm(x, residual, weight, 1e-5)
    for number in (2, 3):
        with threads(number):
            for first, last in ((0, 9), (3, 4), (2, 7)):
                found = add_rms_norm(x[first:last], residual[first:last], weight, 1e-5)
                for each, whole in zip(found, expected, strict=True):
                    assert torch.equal(each, whole[first:last])


def test_nan_stays_in_its_row() -> None:
    x = rows(3, 40, torch.bfloat16)
    x[1, 7] = float("nan")
    found = rms_norm(x, torch.ones(40, dtype=torch.bfloat16), 1e-5)
    assert found[1].isnan().all() and not found[[0, 2]].isnan().any()
