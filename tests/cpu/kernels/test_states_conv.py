"""The convolution and the gated norm beside states: twins and Triton kernels, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import state_cases
import torch
import torch.nn.functional as F
from state_cases import packed_of
from tensors import BF16, F16, F32, randn
from test_states import MIXED, both
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next as oracle

from nanovllm.states.kernels.causal_conv import (
    causal_conv_step_triton,
    causal_conv_triton,
)
from nanovllm.states.kernels.causal_conv_reference import (
    causal_conv_reference,
    causal_conv_step_reference,
)
from nanovllm.states.kernels.gated_norm import gated_norm_reference, gated_norm_triton


def test_sizes_that_do_not_fit_are_refused() -> None:
    rows = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"pool \[rows, K - 1, C\]"):
        causal_conv_step_reference(randn(1, 8), randn(8, 4), None, torch.zeros(2, 4, 8), rows)
    for gates in (randn(1, 8), randn(1, 16, dtype=BF16), randn(2, 16)):
        with pytest.raises(ValueError, match=r"gates are \[1, 16\] in torch.float32"):
            causal_conv_step_reference(randn(1, 8), randn(8, 4), None, torch.zeros(2, 3, 8), rows, gates)
    with pytest.raises(ValueError, match="use one"):
        gated_norm_reference(randn(1, 2, 8), randn(1, 2, 8), randn(8, dtype=BF16), 1e-6)


# ---- the convolution ----

KINDS = [  # channels, taps, whether there is a bias, and whether there are gates
    *((24, 4, False, False), (136, 3, True, False), (16, 2, False, False)),
    *((24, 3, False, True), (136, 3, True, True), (530, 2, False, True)),
]


def conv(triton: bool) -> Any:
    return causal_conv_triton if triton else causal_conv_reference


@both
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("channels", "k", "bias", "gated"), KINDS)
def test_convolution(
    channels: int, k: int, bias: bool, gated: bool, dtype: torch.dtype, triton: bool
) -> None:
    """Sequences shorter than the window, with and without a past shorter than it."""
    case = state_cases.make_conv_case(channels, k, *MIXED, dtype=dtype, bias=bias, gated=gated)
    saves = [(2, 101), (3, 0), (3, 1), (4, 64), (6, 64), (6, 66), (6, 194), (7, 127)]
    state_cases.check_conv(conv(triton), case, saves)


@both
def test_a_convolution_in_pieces(triton: bool) -> None:
    case = state_cases.make_conv_case(24, 4, [75], [0])
    expected = conv(triton)(case.x, case.weight, None, case.pool.clone(), packed_of([75], [0], case.rows))
    for sizes in ([40, 35], [2, 73], [1, 1, 1, 72], [64, 11]):
        pool, found, at = case.pool.clone(), [], 0
        for size in sizes:
            packed = packed_of([size], [at], case.rows)
            found.append(conv(triton)(case.x[at : at + size], case.weight, None, pool, packed))
            at += size
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-6)
        assert torch.equal(pool[case.rows[0]], case.x[-3:])


@both
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("channels", "k", "bias", "gated"), [*KINDS, (530, 3, True, False)])
def test_convolution_of_one_token(
    channels: int, k: int, bias: bool, gated: bool, dtype: torch.dtype, triton: bool
) -> None:
    lengths = [1] * 5, [1, 2, 9, 70, 5]
    case = state_cases.make_conv_case(channels, k, *lengths, dtype=dtype, bias=bias, gated=gated)
    state_cases.check_conv_step(causal_conv_step_triton if triton else causal_conv_step_reference, case)


@both
def test_a_second_chunk_begins_within_the_window_of_the_first(triton: bool) -> None:
    """Its first token still needs what the sequence's row kept, which must not be overwritten before."""
    case = state_cases.make_conv_case(24, 4, [3, 70, 2], [126, 63, 127])
    state_cases.check_conv(conv(triton), case)


@both
def test_a_convolution_of_nothing(triton: bool) -> None:
    empty = packed_of([0, 0], [0, 5], [0, 1])
    assert conv(triton)(randn(0, 8), randn(8, 4), None, torch.zeros(2, 3, 8), empty).shape == (0, 8)


def test_the_convolution_is_that_of_transformers() -> None:
    x, weight = randn(1, 24, 9), randn(24, 4, seed=1)
    expected = oracle.causal_conv1d_fn(x, weight, None, "silu")
    pool = torch.zeros(1, 3, 24)
    out = causal_conv_reference(x[0].T.contiguous(), weight, None, pool, packed_of([9], [0], [0]))
    torch.testing.assert_close(out, expected[0].T)
    state, new = F.pad(x, (0, 0))[:, :, -4:].clone(), randn(1, 24, 1, seed=2)
    expected = oracle.causal_conv1d_update(new, state, weight, None, "silu")
    out = causal_conv_step_reference(new[:, :, 0], weight, None, pool, torch.tensor([0]))
    torch.testing.assert_close(out, expected[:, :, 0])
    assert torch.equal(pool[0], state[0, :, 1:].T)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_gated_convolution_is_that_of_transformers(dtype: torch.dtype) -> None:
    """The same bits in float32 would need the same order of sums; roundings are the same."""
    gates, x, weight = randn(9, 48, dtype=dtype), randn(9, 24, dtype=dtype, seed=1), randn(24, 3, seed=2)
    weight, bias = weight.to(dtype), randn(24, dtype=dtype, seed=3)
    b, c = gates.T[None].chunk(2, dim=1)
    inputs = b * x.T[None]
    expected = (c * modeling_lfm2.causal_conv1d_fn(inputs, weight, bias))[0].T
    pool = torch.zeros(1, 2, 24, dtype=dtype)
    out = causal_conv_reference(x, weight, bias, pool, packed_of([9], [0], [0]), gates=gates)
    bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype == F32 else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(out, expected, **bounds)
    assert torch.equal(pool[0], inputs[0, :, -2:].T)
    state, new = inputs[:, :, -2:].clone(), randn(1, 24, 1, dtype=dtype, seed=4)
    expected = c[:, :, :1] * modeling_lfm2.causal_conv1d_update(b[:, :, :1] * new, state, weight, bias)
    first = gates[:1]
    out = causal_conv_step_reference(new[:, :, 0], weight, bias, pool, torch.tensor([0]), first)
    torch.testing.assert_close(out, expected[:, :, 0], **bounds)
    assert torch.equal(pool[0], state[0].T)


# ---- the gated norm ----


@both
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", [(3, 6, 32), (1, 1, 80), (5, 3, 128), (0, 2, 16)], ids=str)
def test_gated_norm(shape: tuple[int, int, int], dtype: torch.dtype, triton: bool) -> None:
    operation = gated_norm_triton if triton else gated_norm_reference
    state_cases.check_gated_norm(operation, shape, dtype, "cpu")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_gated_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    x, z = (randn(7, 6, 32, dtype=dtype, seed=seed) for seed in (0, 1))
    norm = oracle.Qwen3NextRMSNormGated(32, eps=1e-5).to(dtype)
    norm.weight.data = 1 + randn(32, dtype=dtype, seed=2)
    expected = norm(x.view(-1, 32), z.view(-1, 32)).view(x.shape)
    assert torch.equal(gated_norm_reference(x, z, norm.weight.data, 1e-5), expected)
