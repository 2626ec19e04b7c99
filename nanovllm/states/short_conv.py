"""ShortConv: a layer's block whose state is the last inputs of a convolution; ConvSpec: its sizes.

Owns the layer's part of the pool of states; which rows a step reads and writes is in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.stream import Group, Step
from nanovllm.layers.weights import WeightLayer, split_evenly
from nanovllm.quantization.base import Normed, Product
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions
from nanovllm.states.kernels.causal_conv import causal_conv, causal_conv_step
from nanovllm.states.layers import Convolution, PackedStep
from nanovllm.states.spec import num_rows

PARTS = ("in_proj_before", "in_proj_after", "in_proj_inputs")  # of the first product, as files order them


@dataclass(frozen=True)
class ConvSpec:
    """The channels of a gated short convolution, of all ranks, its taps, and whether it has biases.

    Its states have the model's dtype, whatever `mamba_ssm_cache_dtype` says: they are inputs, and no sums.
    ValueError for sizes that no kernel has.
    """

    channels: int
    kernel: int
    bias: bool

    def __post_init__(self) -> None:
        if self.kernel < 2:
            raise ValueError(f"config.json: conv_L_cache must be at least 2, not {self.kernel}")

    def stored(self, dtype: torch.dtype) -> ConvSpec:
        """The same: no state of this kind is rounded."""
        return self

    def params(self, hidden_size: int) -> int:
        """Elements of the matrices that a token is multiplied with."""
        return 4 * hidden_size * self.channels

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's state in a layer, of inputs of `itemsize`."""
        return itemsize * (self.kernel - 1) * self.channels


class ShortConv(WeightLayer):
    """A gated short convolution with this rank's channels: three products b, c and x of the stream, a causal
    convolution of b * x, and a product of c times its result."""

    def __init__(self, hidden_size: int, spec: ConvSpec, tp: Group, packed: PackedStep) -> None:
        super().__init__()
        self.channels = split_evenly("channels of the convolution", spec.channels, tp.size)
        self._kernel, self._packed = spec.kernel, [packed]  # in a list, so that layers share it
        sizes = dict.fromkeys(PARTS, spec.channels)
        self.in_proj = MergedColumnParallelLinear(hidden_size, sizes, tp, spec.bias)
        self.conv = Convolution({"conv": spec.channels}, spec.kernel, tp, spec.bias)
        self.out_proj = RowParallelLinear(spec.channels, hidden_size, tp, spec.bias)
        self.conv_pool = torch.empty(0)

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, quant)
        self.allocate_states(0)

    def state_bytes(self, num_seqs: int) -> int:
        """The memory of the states for so many running sequences."""
        return num_rows(num_seqs) * (self._kernel - 1) * self.channels * self.options.dtype.itemsize

    def allocate_states(self, num_seqs: int) -> None:
        """Replace the states by new ones, undefined, for so many running sequences; 0 frees them."""
        self.conv_pool = torch.empty(0)
        shape = num_rows(num_seqs), self._kernel - 1, self.channels
        self.conv_pool = torch.empty(shape, dtype=self.options.dtype, device=self.options.device)

    def forward(self, x: Normed, step: Step) -> Product:
        """x [T, hidden_size] -> a term of the stream, of the same shape. Moves the states of the step's
        sequences on by its tokens."""
        conv, bias = self.conv.weight.squeeze(1), self.conv.bias
        projected = self.in_proj(x)
        assert isinstance(projected, torch.Tensor)
        gates, inputs = projected[:, : 2 * self.channels], projected[:, 2 * self.channels :]
        if step.meta.cu_seqlens_q is None:
            assert step.slots is not None
            mixed = causal_conv_step(inputs, conv, bias, self.conv_pool, step.slots, gates)
        else:
            packed, saves = self._packed[0].of(step)
            mixed = causal_conv(inputs, conv, bias, self.conv_pool, packed, saves, gates)
        product: Product = self.out_proj(mixed)
        return product
