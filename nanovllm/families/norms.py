"""Norms that few families have: none before a block, and one over the heads of all ranks.

Owns the weights of the second one.
"""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.stream import Group, Stream
from nanovllm.layers.weights import WeightLayer
from nanovllm.quantization.base import Normed
from nanovllm.quantization.shards import WeightShard


class NoNorm(nn.Module):
    """In place of the norm before a block (OLMo 2): only sums a stream's term over the ranks of `tp`."""

    def __init__(self, tp: Group) -> None:
        super().__init__()
        self.tp = tp

    def forward(self, x: Stream) -> Normed:
        term = x.term if x.summed else self.tp.all_reduce(x.term)
        total = term if x.residual is None else term + x.residual
        return Normed.computed(total, total)


class HeadsNorm(WeightLayer):
    """One norm over the query or key heads of all ranks (OLMo 2): x [T, this rank's heads, head_dim], divided
    by the root mean square over all heads of the model. Never part of a product.

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
