"""Which method multiplies a weight in floats on a CPU: packed for our kernels, or one of oneDNN's products.

The core's `UnquantizedLinearMethod` takes what none of these suits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.cpu import isa
from nanovllm.cpu.packed import PackedLinearMethod, can_pack
from nanovllm.quantization.base import Kind, LinearMethod
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource
from nanovllm.quantization.unquantized import UnquantizedLinearMethod

# oneDNN's product, a private operator of torch, which calls it for other dtypes and in compiled code. For
# float32 `F.linear` calls MKL, which took up to 2.4 times as long on an AMD CPU. None: this torch has no
# oneDNN.
_onednn_linear = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
)
ONEDNN_NUMEL = 2**19  # minimum elements of a weight: oneDNN starts all threads even for a small product


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear`; on a CPU oneDNN multiplies large float32 weights."""
    large = weight.device.type == "cpu" and weight.numel() >= ONEDNN_NUMEL
    if _onednn_linear is None or not large or weight.dtype != torch.float32:
        return F.linear(x, weight, bias)
    product: torch.Tensor = _onednn_linear(x, weight, bias, "none", [], "")
    return product


class OneDNNLinearMethod(UnquantizedLinearMethod):
    """A large float32 weight on a CPU, where oneDNN takes the place of MKL."""

    def by_torch(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch_linear(x, self.weight, bias)


class ReorderedLinearMethod(UnquantizedLinearMethod):
    """A weight on a CPU without kernels of ours: oneDNN reorders it once, and then reads it faster.

    The reordered tensor takes the place of the parameter's memory.
    """

    _reordered: torch.Tensor | None = None  # opaque; None while tensors are loaded

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        self.unpack()
        super().load(shard, source)

    def finish_loading(self) -> None:
        self.pack()

    def unpack(self) -> None:
        if self._reordered is not None:
            self.weight.data, self._reordered = self._reordered.to_dense(), None

    def pack(self) -> None:
        if self._reordered is None:
            self._reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, None)
            self.weight.data = self.weight.new_empty(0)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert _onednn_linear is not None
        product: torch.Tensor = _onednn_linear(x, self._reordered, bias, "none", [], "")
        return product

    def apply_and_add(
        self, x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.apply(x, bias), residual

    def dense(self) -> torch.Tensor:
        return self.weight if self._reordered is None else self._reordered.to_dense()


def can_reorder(shape: tuple[int, ...], options: WeightOptions) -> bool:
    """Whether oneDNN multiplies such a weight faster once it is reordered."""
    if options.device.type != "cpu" or options.deterministic or isa.has_kernels() or _onednn_linear is None:
        return False
    elements = shape[0] * shape[1]
    if options.dtype == torch.float32:
        fast = elements >= ONEDNN_NUMEL
    else:
        bf16 = options.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        fast = bf16 and elements >= ONEDNN_NUMEL // 2
    return fast and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def linear_method(shape: tuple[int, ...], options: WeightOptions, kind: Kind | None) -> LinearMethod | None:
    """A new method for a weight of this shape on a CPU; None for the core's. kind: as of `dense_method`."""
    if can_pack(shape, options):
        return PackedLinearMethod()
    if kind in ("linear", "lm_head") and can_reorder(shape, options):  # embeddings are read by rows
        return ReorderedLinearMethod()
    large = _onednn_linear is not None and shape[0] * shape[1] >= ONEDNN_NUMEL
    return OneDNNLinearMethod() if large and options.dtype == torch.float32 else None
