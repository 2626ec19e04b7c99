"""RMSNorm, which also does the sum over ranks and the residual addition before it. Owns only the weight."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from nanovllm.distributed.copied_rows import PendingSum
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.layers.weights import WeightLayer, WeightOptions
from nanovllm.quantization.shards import WeightShard


class ResidualStream(NamedTuple):
    """The residual stream between blocks, [T, hidden_size]: the sum of x over the ranks, plus residual.

    The next norm does both additions. A PendingSum contains its residual.
    """

    x: torch.Tensor | PendingSum
    residual: torch.Tensor | None = None

    def advance(self) -> None:
        """Advance x by half, if it is a PendingSum."""
        if isinstance(self.x, PendingSum):
            self.x.advance()


class RMSNorm(WeightLayer):
    """Normalise the last dimension, of `size`, by its root mean square and scale it by a weight.

    With a group `tp` of several ranks, x is this rank's part of a sum over them, or a result of `start`.
    """

    weight: torch.Tensor  # [size]

    def __init__(self, size: int, eps: float, options: WeightOptions, tp: TPGroup | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.tp = tp or TPGroup()
        shard = replace(WeightShard.whole("weight", (size,)), dummy=1.0)
        self._allocate("weight", (size,), [shard], options)

    def forward(
        self, x: torch.Tensor | PendingSum, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual), both [T, size]; without a residual, (norm(x), x).

        x may be a result of `start`, which contains its residual. Then the second result may have only this
        rank's rows.
        """
        if isinstance(x, PendingSum):
            assert residual is None
            return x.finish()
        peer_memory = None if residual is None else self.tp.peer_memory_for(x)
        if residual is not None and peer_memory is not None:
            return peer_memory.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)
        return add_rms_norm(self.tp.all_reduce(x), residual, self.weight, self.eps)

    def start(self, x: torch.Tensor, residual: torch.Tensor, whole: bool = False) -> ResidualStream:
        """Start `forward`. At most two may be in progress; see `TPGroup.start_sum`."""
        return ResidualStream(self.tp.start_sum(x, residual, self.weight, self.eps, whole))
