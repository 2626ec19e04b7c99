"""Random tensors, and a comparison with exact values within the accuracy of a dtype."""

from __future__ import annotations

import torch

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = {F32: 1e-5, F16: 4e-3, BF16: 3e-2}  # a few roundings; the interpreter truncates to bfloat16


def assert_near(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1) -> None:
    """Check each element against the exact `expected`, within `factor` times the accuracy of its dtype for
    the values of its row.
    """
    expected = expected.double()
    size = expected.abs() + expected.square().mean(dim=-1, keepdim=True).sqrt()
    bound = factor * TOLERANCE[actual.dtype] * size + torch.finfo(actual.dtype).tiny
    excess = (actual.double() - expected).abs() - bound
    assert (excess <= 0).all(), excess.max()  # also fails for NaN


def randn(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
