"""Sampler: from logits and per-row parameters to token ids. The kernels filter and draw.

A row's result depends on that row alone, whatever its batch mates ask for. Owns no random state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.kernels.filters import Filters
from nanovllm.kernels.sampling import sample


@dataclass(frozen=True, slots=True, eq=False)
class SamplingTensors:
    """The parameters of S rows, on the logits' device."""

    temperature: torch.Tensor  # [S] float32, 0 is greedy
    seeds: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int32: of the token to come; with the seed it picks the random numbers
    filters: Filters | None  # None: no row uses any


class Sampler(nn.Module):
    """Temperature, min_p, top_k, then top_p, as vLLM; each renormalises over what the last one kept."""

    def forward(self, logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
        """logits [S, V] of any float dtype of 16 or 32 bits, not changed -> token ids [S] int64.

        A greedy row gets its likeliest token, the lowest id of equals. A row that holds NaN or +inf, or
        nothing finite, gets -1.
        """
        return sample(logits, params.temperature, params.seeds, params.positions, params.filters)
