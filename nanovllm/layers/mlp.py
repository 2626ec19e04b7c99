"""GatedMLP: the feed-forward block of a decoder layer."""

from __future__ import annotations

from torch import nn

from nanovllm.distributed.group import TPGroup
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.stream import Step
from nanovllm.layers.weights import WeightOptions
from nanovllm.quantization.base import Normed, Product


class GatedMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), SwiGLU (Shazeer, 2020), with inner size `size`."""

    def __init__(
        self, hidden_size: int, size: int, tp: TPGroup, options: WeightOptions, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [size, size], tp, options, bias)
        self.down_proj = RowParallelLinear(size, hidden_size, tp, options, bias)

    def forward(self, x: Normed, step: Step) -> Product:
        """x [T, hidden_size] -> a term of the stream, of the same shape. Tokens are independent."""
        product: Product = self.down_proj(self.gate_up_proj(x, silu=True))
        return product
