"""Conversions between dtypes in vectors: the bits of torch's, for all values in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.launch import DTYPES, Address, Kernel

SHORT = [torch.float16, torch.bfloat16]


def _make(source_dtype: str, target_dtype: str) -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    (load, _), (_, store) = v.WHOLE[source_dtype], v.WHOLE[target_dtype]
    read, written = 16 * v.SIZES[source_dtype], 16 * v.SIZES[target_dtype]

    def convert(source: Address, target: Address, program: int, thread: int) -> None:
        for i in range(64 * program, 64 * program + 64):
            store(target + written * i, load(source + read * i))

    return convert


_CONVERT = Kernel(_make)


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _CONVERT.launch((DTYPES[x.dtype], DTYPES[dtype]), len(x) // 1024, x, out)
    return out


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    nan = expected.isnan()
    if found.dtype == torch.bfloat16 and isa.has_bf16():  # its instruction takes subnormal numbers as 0
        flushed = (found == 0) & (expected.abs() <= torch.finfo(torch.bfloat16).tiny)
        expected = torch.where(flushed, torch.zeros_like(expected).copysign(expected), expected)
    assert torch.equal(found.isnan(), nan)
    words = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(found.view(words)[~nan], expected.view(words)[~nan])


@pytest.mark.parametrize("dtype", SHORT)
def test_all_values_in_16_bits(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    assert_same(converted(every, torch.float32), every.float())
    assert_same(converted(every.float(), dtype), every)


@pytest.mark.parametrize("dtype", SHORT)
def test_rounding(dtype: torch.dtype) -> None:
    """The middle between two neighbours, and what is next to it; all sizes from subnormal to infinite."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    next_one = torch.arange(-(2**15) + 1, 2**15 + 1).to(torch.int16).view(dtype).float()
    middle = (every / 2 + next_one / 2).view(torch.int32)
    for step in (-1, 0, 1):
        x = (middle + step).view(torch.float32)
        assert_same(converted(x, dtype), x.to(dtype))
    large = torch.tensor([65504.0, 65519.0, 65520.0, 65536.0, 3e38, float("inf"), float("nan"), 1e-45] * 256)
    for x in (large, -large):
        assert_same(converted(x[: 1024 * (len(x) // 1024)], dtype), x.to(dtype)[: 1024 * (len(x) // 1024)])
