"""Sampler: from logits and per-row parameters to token ids. The kernels filter and draw.

A row's result depends on that row alone. Owns no random state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Generic

import numpy as np
import torch
from torch import nn

from nanovllm.columns import A, Column
from nanovllm.kernels.filters import FilterColumns
from nanovllm.kernels.sampling import sample


@dataclass(frozen=True, eq=False)
class SamplingColumns(Generic[A]):
    """The parameters of S rows."""

    temperature: Annotated[A, Column(np.float32, lambda n: (n.seqs,))]  # 0 is greedy
    seeds: Annotated[A, Column(np.int64, lambda n: (n.seqs,))]
    positions: Annotated[A, Column(np.int32, lambda n: (n.seqs,))]  # of the token to draw
    filters: FilterColumns[A] | None  # None: no row uses filters


SamplingTensors = SamplingColumns[torch.Tensor]


class Sampler(nn.Module):
    """Applies temperature, min_p, top_k, then top_p, as in vLLM; each renormalises over the kept tokens."""

    def forward(self, logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
        """logits [S, V], float16, bfloat16 or float32, not modified -> token ids [S] int64.

        A greedy row gets its likeliest token, the lowest id on ties. A row with NaN or +inf, or without
        finite values, gets NOT_FINITE.
        """
        return sample(logits, params.temperature, params.seeds, params.positions, params.filters)
