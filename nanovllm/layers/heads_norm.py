"""HeadsNorm: one RMSNorm over the query or key heads of all ranks (OLMo 2). Never part of a product."""

from __future__ import annotations

import torch

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.stream import Group
from nanovllm.layers.weights import WeightLayer
from nanovllm.quantization.base import WeightShard


class HeadsNorm(WeightLayer):
    """x [T, this rank's heads, head_dim], divided by the root mean square over all heads of the model.

    The ranks sum their squares, one number for each token. Heads that several ranks hold count once.
    """

    weight: torch.Tensor  # [this rank's heads * head_dim]

    def __init__(self, heads: int, head_dim: int, eps: float, tp: Group) -> None:
        super().__init__()
        self.eps, self.tp = eps, tp
        self._size, self._copies = heads * head_dim, max(1, tp.size // heads)
        own, first = max(1, heads // tp.size) * head_dim, tp.rank * heads // tp.size * head_dim
        self.declare((own,), [WeightShard("weight", None, (self._size,), 0, first, own, 0, dummy=1.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        if self.tp.size == 1:
            return rms_norm(flat, self.weight, self.eps).view(x.shape)
        wide = flat.float()
        squares = self.tp.all_reduce(wide.square().sum(1, keepdim=True) / self._copies)
        scaled = wide * (squares / self._size + self.eps).rsqrt()
        return (scaled * self.weight).to(x.dtype).view(x.shape)
