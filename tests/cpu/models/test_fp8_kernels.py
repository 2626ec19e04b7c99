"""Quantised weights and rows, and the FP8 kernels, interpreted on a CPU."""

from __future__ import annotations

import fp8_cases
import pytest
import torch
from tensors import F32

from nanovllm.formats.fp8.kernels.matmul import fp8_linear
from nanovllm.formats.fp8.kernels.values import GROUP, quantise_rows
from nanovllm.formats.fp8.loading import Stored, quantise_weight
from nanovllm.kernels.compat import INTERPRET

# -- weights and kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", Stored)
def test_quantised_weights(stored: Stored) -> None:
    weight = torch.randn(200, 300)
    weight[5], weight[:, 7] = 0, 1e-6
    codes, scales = quantise_weight(weight, stored)
    again, same = quantise_weight(weight, stored, scales)
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8)) and torch.equal(scales, same)
    shapes = {Stored.BLOCKS: (2, 3), Stored.SCALED_BLOCKS: (2, 3), Stored.TENSOR: (1,)}
    assert scales.shape == shapes.get(stored, (200, 1)) and (scales > 0).all()
    wide = scales.kron(torch.ones(128, 128))[:200, :300] if stored.in_blocks else scales
    error = (codes.float() * wide - weight).abs()
    assert (error <= (weight.abs() / 16).maximum(wide * 2**-10)).all()
    assert codes.float().abs().max() == 448
    zeros, ones = quantise_weight(torch.zeros(4, 16), stored)
    assert not zeros.float().any() and (ones == 1).all()


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_row_that_is_not_finite_stays_alone(value: str) -> None:
    """Its results are NaN: infinity does not become the largest value of FP8."""
    weight = fp8_cases.make_weight(16, 32, None, "cpu")
    x = torch.randn(3, 32)
    x[1, 4] = float(value)
    out = fp8_linear(quantise_rows(x), weight, dtype=F32)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


needs_interpreter = pytest.mark.skipif(not INTERPRET, reason="tests/gpu runs these cases")


@needs_interpreter
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("rows", [0, 1, 3, 5])
def test_rows_in_fp8(rows: int, group: int | None) -> None:
    for columns in (48, 200, 256):
        fp8_cases.check_rows(rows, columns, group, "cpu")


@needs_interpreter
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_kernels_of_products(rows: int, group: int | None) -> None:
    fp8_cases.check_linear(rows, (160, 208), group, "cpu", full=True)
    fp8_cases.check_linear(rows, (72, 64), group, "cpu", group_rows=1)


@needs_interpreter
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("rows", [1, 2])
def test_fused_vector_products(rows: int, group: int | None) -> None:
    fp8_cases.check_gemv(rows, (256, 208), group, "cpu", F32)
