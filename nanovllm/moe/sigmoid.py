"""A router that scores experts by a sigmoid, and chooses by score and a learned correction (DeepSeek-V3).

The weights of the chosen experts are their scores, which then add up to 1. So they are the softmax of the
logarithms of these scores alone, and all kernels of softmax routing serve.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.weights import WeightLayer
from nanovllm.moe.layers import MoESpec
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions, WeightShard

_NOT_CHOSEN = -1e30  # as a logit: its exponential is 0, and its differences are finite


@dataclass(frozen=True)
class SigmoidSpec(MoESpec):
    """Experts that a `SigmoidRouter` chooses, in groups of equal size; with more than one group only the
    `top_groups` whose best two scores have the greatest sum are eligible."""

    groups: int = 1
    top_groups: int = 1
    softcap: float = 0.0  # logits become softcap * tanh(logit / softcap) first; 0: they do not

    def __post_init__(self) -> None:
        super().__post_init__()
        size, rest = divmod(self.num_experts, self.groups)
        if rest or not 1 <= self.top_groups <= self.groups or self.top_k > self.top_groups * size:
            raise ValueError(
                f"config.json: n_group {self.groups} and topk_group {self.top_groups} do not fit "
                f"{self.num_experts} experts, of which {self.top_k} are chosen"
            )
        if not self.normalised:
            raise ValueError("config.json: norm_topk_prob false is not supported with scores by a sigmoid")

    def router_of(self, hidden_size: int) -> nn.Module:
        return SigmoidRouter(hidden_size, self)


class SigmoidRouter(WeightLayer):
    """Its weights and its product are float32, whatever the model's dtype."""

    weight: torch.Tensor  # [experts, hidden_size]
    e_score_correction_bias: torch.Tensor  # [experts]

    def __init__(self, hidden_size: int, spec: SigmoidSpec) -> None:
        super().__init__()
        self._spec, shape = spec, (spec.num_experts, hidden_size)
        self.declare(shape, [WeightShard.whole("weight", shape)], "linear")
        self.declare(shape[:1], [WeightShard.whole("e_score_correction_bias", shape[:1])])

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, replace(options, dtype=torch.float32), quant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, experts] float32: the logarithms of the chosen experts' scores; of the
        others a number far below all."""
        logits, spec = self.method.apply(x.float()), self._spec
        if spec.softcap:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        choice = logits.sigmoid() + self.e_score_correction_bias
        if spec.groups > 1:
            grouped = choice.unflatten(1, (spec.groups, -1))
            best = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
            outside = torch.ones_like(best, dtype=torch.bool)
            outside.scatter_(1, best.topk(spec.top_groups, dim=1).indices, False)
            choice = grouped.masked_fill(outside[:, :, None], float("-inf")).flatten(1)
        ids = choice.topk(spec.top_k, dim=1).indices
        scores = F.logsigmoid(logits).gather(1, ids)
        return torch.full_like(logits, _NOT_CHOSEN).scatter_(1, ids, scores)
