"""GatedMLP: the feed-forward part of a decoder layer, up to the input of down_proj."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.distributed.group import TPGroup
from nanovllm.layers.layernorm import ResidualStream, RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.weights import WeightOptions


class GatedMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), SwiGLU (Shazeer, 2020), with inner size `size`."""

    def __init__(
        self, hidden_size: int, size: int, tp: TPGroup, options: WeightOptions, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [size, size], tp, options, bias)
        self.down_proj = RowParallelLinear(size, hidden_size, tp, options, bias)

    def forward(
        self, norm: RMSNorm, stream: ResidualStream, places: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the input of down_proj, [T, own size]; the stream's sum). Tokens are independent."""
        return self.gate_up_proj.after_norm(norm, stream, silu=True)
