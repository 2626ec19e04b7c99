"""SiluAndMul: the gate of a SwiGLU MLP. Owns no state."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.activation import silu_and_mul


class SiluAndMul(nn.Module):
    """x [T, 2 * size] -> silu(first half) * second half, [T, size]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)
