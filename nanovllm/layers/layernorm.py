"""RMSNorm, alone or fused with the residual addition before it. Owns only the weight."""

from __future__ import annotations

import torch

from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.layers.weights import WeightLayer, WeightShard


class RMSNorm(WeightLayer):
    """Normalise the last dimension, of `size`, by its root mean square and scale it by a weight."""

    weight: torch.Tensor  # [size]

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.eps = eps
        self._allocate("weight", (size,), [WeightShard.whole("weight", (size,))])

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual), both [T, size]; without a residual, (norm(x), x)."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)
