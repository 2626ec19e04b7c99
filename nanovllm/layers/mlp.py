"""GatedMLP: the feed-forward block of a decoder layer."""

from __future__ import annotations

from torch import nn

from nanovllm.distributed.group import TPGroup
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.stream import Step
from nanovllm.quantization.base import Normed, Product


class GatedMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), SwiGLU (Shazeer, 2020), with inner size `size`."""

    def __init__(self, hidden_size: int, size: int, tp: TPGroup, bias: bool = False) -> None:
        super().__init__()
        sizes = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, sizes, tp, bias)
        self.down_proj = RowParallelLinear(size, hidden_size, tp, bias)

    def forward(self, x: Normed, step: Step) -> Product:
        """x [T, hidden_size] -> a term of the stream, of the same shape. Tokens are independent."""
        product: Product = self.down_proj(self.gate_up_proj(x, silu=True))
        return product
