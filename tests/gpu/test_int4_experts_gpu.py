"""Experts in 4 bits on a GPU: the compiled kernels at real shapes, and the bits of rows."""

from __future__ import annotations

import int4_expert_cases
import pytest
import torch
from moe_cases import Sizes
from tensors import BF16, F16

from nanovllm.formats.int4.kernels.experts import choose_int4_experts
from nanovllm.formats.int4.kernels.layout import MXFP4, NVFP4
from nanovllm.moe.kernels.grouped_matmul import ExpertChoice

pytestmark = pytest.mark.gpu

GPU = "cuda"
CASES = [
    (Sizes(10, 3, 160, 96), (32, 32), F16),
    (Sizes(8, 2, 384, 192), (128, 64), BF16),
    (Sizes(16, 8, 2048, 768), (128, 128), BF16),
    (Sizes(10, 3, 160, 96), (MXFP4, MXFP4), BF16),
    (Sizes(6, 4, 2880, 2880), (MXFP4, MXFP4), BF16),
]
NVFP4_CASES = [
    (Sizes(10, 3, 176, 80), (NVFP4, NVFP4), F16),
    (Sizes(6, 4, 2048, 768), (NVFP4, NVFP4), BF16),
]


def choices() -> list[ExpertChoice]:
    """Every choice."""
    return [choose_int4_experts(pairs, 1, torch.device(GPU, 0)) for pairs in (1, 20, 50, 10_000)]


@pytest.mark.parametrize("rows", [1, 2, 3, 97])
@pytest.mark.parametrize(("sizes", "groups", "dtype"), CASES + NVFP4_CASES)
def test_kernels(rows: int, sizes: Sizes, groups: tuple[int, int], dtype: torch.dtype) -> None:
    for choice in choices():
        int4_expert_cases.check_experts(rows, sizes, groups, dtype, GPU, choice)


def test_all_rows_to_few_experts() -> None:
    for choice in choices():
        int4_expert_cases.check_experts(97, *CASES[0], GPU, choice, only=(2, 3, 4))


@pytest.mark.parametrize(("sizes", "groups", "dtype"), CASES)
def test_bits(sizes: Sizes, groups: tuple[int, int], dtype: torch.dtype) -> None:
    """Of a row in every batch and with every tile, and of a product with the dequantised weights."""
    counts = [1, 2, 16, 97, 256]
    int4_expert_cases.check_rows_are_independent(counts, sizes, groups, dtype, GPU, choices())
    for choice in choices():
        int4_expert_cases.check_dequantised(sizes, groups[0], dtype, GPU, choice)


@pytest.mark.parametrize(("sizes", "groups", "dtype"), NVFP4_CASES)
def test_bits_of_nvfp4(sizes: Sizes, groups: tuple[int, int], dtype: torch.dtype) -> None:
    """Of a row in every batch and with every tile that does not dequantise first."""
    counts = [1, 2, 16, 97, 256]
    int4_expert_cases.check_rows_are_independent(counts, sizes, groups, dtype, GPU, choices()[:3])
