"""The layers of a head, with weights of their own, on every rank whole and in float32.

Reads no file and knows no label. A head is small, and its values decide: so no option quantises it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from nanovllm.layers.weights import LinearLayer
from nanovllm.pooling_heads.head import Layers
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource


@dataclass(frozen=True, slots=True)
class _LabelShard(WeightShard):
    """A tensor with one row for each label."""

    def wrong_shape(self, source: WeightSource) -> str | None:
        found = WeightShard.wrong_shape(self, source)
        said = f"for the {self.shape[0]} label(s) of config.json; correct its id2label and num_labels"
        return None if found is None else f"{found} {said}"


class _Linear(LinearLayer):
    """x [n, inputs] -> [n, outputs] float32."""

    def __init__(self, inputs: int, outputs: int, bias: bool, shard: type[WeightShard] = WeightShard) -> None:
        shape = (outputs, inputs)
        biases = [shard.whole("bias", shape[:1])] if bias else None
        super().__init__(shape, [shard.whole("weight", shape)], biases)

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, replace(options, dtype=torch.float32, fuse=False), QuantConfig())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(x.float(), self.bias)


class _Mlp(nn.Module):
    """Two layers with a ReLU between them, under the names of Qwen's reward models."""

    def __init__(self, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        first = _Linear(hidden_size, hidden_size, True)
        last = _Linear(hidden_size, num_labels, True, _LabelShard)
        self._layers = first, last  # in a tuple: the names below are the only ones
        self.add_module("0", first)
        self.add_module("2", last)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first, last = self._layers
        values: torch.Tensor = last(first(hidden).relu())
        return values


def make_score(layers: Layers, hidden_size: int, num_labels: int) -> nn.Module:
    """hidden [n, hidden_size] -> values [n, num_labels] float32, declared. Rows are independent."""
    if layers == "mlp":
        return _Mlp(hidden_size, num_labels)
    return _Linear(hidden_size, num_labels, layers == "biased", _LabelShard)
