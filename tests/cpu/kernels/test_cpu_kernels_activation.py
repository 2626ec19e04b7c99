"""The gated activations and the last tokens on a CPU, compared with plain torch."""

from __future__ import annotations

import pytest
import torch
from cpu_kernel_cases import threads
from tensors import F32, randn

from nanovllm.batch import LAST_SAMPLED, NO_SLOT
from nanovllm.cpu import isa
from nanovllm.kernels.activation import Activation, silu_and_mul_reference
from nanovllm.kernels.last_tokens import (
    keep_tokens,
    keep_tokens_reference,
    take_tokens,
    take_tokens_reference,
)

pytestmark = pytest.mark.skipif(not isa.has_kernels(), reason="no kernels for CPUs here")


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 15, 16, 48, 1024, 2500])
def test_gated_activations(activation: Activation, dtype: torch.dtype, columns: int) -> None:
    """Rows are a part of a wider tensor; 7 and -7 are the clamped one's limits, 40 makes a sigmoid 0 or 1."""
    x = (4 * randn(3, 2 * columns + 5)).to(dtype)[:, : 2 * columns]
    x[0] = torch.linspace(-40, 40, 2 * columns).to(dtype)
    found = activation.and_mul(x)
    assert found.shape == (3, columns) and found.dtype == dtype and found.is_contiguous()
    expected = silu_and_mul_reference(x, activation.kind)
    if activation is Activation.SILU and dtype is not F32:
        assert torch.equal(found, expected)  # both roundings are the same
    eps = torch.finfo(dtype).eps
    exact = silu_and_mul_reference(x.double(), activation.kind)
    steps = 6 if dtype is F32 else 2
    bound = steps * eps * exact.abs() + 2e-6 * x.double()[:, columns:].abs() + 1e-6
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_the_activation_depends_neither_on_others_nor_on_threads(dtype: torch.dtype) -> None:
    x = randn(70, 2 * 1100, dtype=dtype)
    for activation in Activation:
        with threads(1):
            whole = activation.and_mul(x)
        for number in (1, 2, 3):
            with threads(number):
                assert torch.equal(activation.and_mul(x), whole)
                assert torch.equal(activation.and_mul(x[2:3].contiguous()), whole[2:3])


def test_no_rows() -> None:
    assert Activation.SILU.and_mul(torch.empty(0, 8)).shape == (0, 4)


def test_nan_stays() -> None:
    x = torch.ones(1, 32)
    x[0, 3] = x[0, 20] = float("nan")
    for activation in Activation:
        assert activation.and_mul(x).isnan()[0].nonzero()[:, 0].tolist() == [3, 4]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 1024, 50_000])
def test_last_tokens(count: int, number: int) -> None:
    """Stored tokens may be out of range; some slots keep nothing. With any number of threads."""
    generator = torch.Generator().manual_seed(count)
    last = torch.randint(-5, 130, (60_000,), generator=generator)
    slots = torch.randperm(60_000, generator=generator)[:count]
    ids = torch.randint(0, 100, (count,), generator=generator)
    ids[::3] = LAST_SAMPLED
    with threads(number):
        taken = take_tokens(ids, slots, last, 100)
    assert torch.equal(taken, take_tokens_reference(ids, slots, last, 100))
    assert count == 0 or 0 <= int(taken.min()) <= int(taken.max()) < 100
    slots[::4] = NO_SLOT
    expected = last.clone()
    keep_tokens_reference(ids, slots, expected)
    with threads(number):
        keep_tokens(ids, slots, last)
    assert torch.equal(last, expected)
