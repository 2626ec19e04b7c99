"""A quantisation method is one class that creates, loads and applies a weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_models import PROMPT, forward, load
from tiny_models import write_tiny_model
from torch import nn

from nanovllm.layers.weights import WeightOptions
from nanovllm.quantization.base import LinearMethod
from nanovllm.quantization.shards import WeightShard, WeightSource


class Int8LinearMethod(LinearMethod):
    """Each row of the weight is int8 values and a scale, computed from the checkpoint's floats. Fuses
    nothing.
    """

    def create(
        self, layer: nn.Module, shape: tuple[int, int], shards: list[WeightShard]
    ) -> list[WeightShard]:
        self.codes = nn.Parameter(torch.zeros(shape, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.zeros(shape[0], 1, dtype=torch.float32), requires_grad=False)
        layer.register_parameter("codes", self.codes)
        layer.register_parameter("scales", self.scales)
        return shards

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        rows = self.codes.float() * self.scales
        shard.copy(source, rows)
        self.scales.copy_(rows.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127)
        self.codes.copy_((rows / self.scales).round())

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x @ (self.codes.float() * self.scales).T
        return out if bias is None else out + bias


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_quantisation_is_one_linear_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = write_tiny_model(tmp_path, family)
    exact = forward(load(folder), PROMPT)
    monkeypatch.setattr(WeightOptions, "linear_method", lambda _: Int8LinearMethod())
    model = load(folder)
    kinds = {name.split(".")[-1] for name, _ in model.model.layers.named_parameters() if "proj" in name}
    assert kinds - {"bias"} == {"codes", "scales"}
    logits = forward(model, PROMPT)
    assert 0 < (logits - exact).abs().max() < 0.05 * exact.abs().max()
    assert torch.equal(forward(load(folder), PROMPT), logits)
