"""Sampler: from logits and per-row parameters to token ids. The kernels filter and draw.

A row's result depends on that row alone, whatever its batch mates ask for. Owns no random state.
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
    positions: Annotated[A, Column(np.int32, lambda n: (n.seqs,))]  # of the token to come
    filters: FilterColumns[A] | None  # None: no row uses any


SamplingTensors = SamplingColumns[torch.Tensor]


class Sampler(nn.Module):
    """Temperature, min_p, top_k, then top_p, as vLLM; each renormalises over what the last one kept."""

    def forward(self, logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
        """logits [S, V] of any float dtype of 16 or 32 bits, not changed -> token ids [S] int64.

        A greedy row gets its likeliest token, the lowest id of equals. A row that holds NaN or +inf, or
        nothing finite, gets NOT_FINITE.
        """
        return sample(logits, params.temperature, params.seeds, params.positions, params.filters)
