"""Filters of logits for `logprobs_mode` "processed_...".

Plain torch, on every device. Draws nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.sampling import GREEDY_BELOW
from nanovllm.sampling.sampler import SamplingTensors

SORTED_LOGITS = 2**23  # sorted at once, at about 50 bytes each; bounds the memory


def filtered_logits(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """logits [S, V] -> float32: divided by temperature, and -inf where min_p, top_k or top_p drops the token.

    Greedy rows do not change.
    """
    sampled = params.temperature >= GREEDY_BELOW
    x = logits.float() / params.temperature.where(sampled, 1.0)[:, None]
    if params.filters is not None:
        columns = x, sampled, params.filters.top_k, params.filters.top_p, params.filters.min_p
        at_once = max(1, SORTED_LOGITS // x.shape[1])
        for part, drawn, *filters in zip(*(column.split(at_once) for column in columns), strict=True):
            part.masked_fill_(_dropped(part, *filters) & drawn[:, None], float("-inf"))
    return x


def _dropped(x: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The tokens [S, V] that the filters [S] drop. x: [S, V] float32, logits divided by temperature."""
    ordered, order = x.sort(dim=1, descending=True, stable=True)
    top_k, top_p, min_p = (column[:, None] for column in (top_k, top_p, min_p))
    place = torch.arange(x.shape[1], device=x.device)
    kept = (ordered >= ordered[:, :1] + min_p.log()) & ((top_k <= 0) | (place < top_k))
    shares = ordered.double().masked_fill(~kept, float("-inf")).softmax(dim=1)
    before = F.pad(shares.cumsum(dim=1), (1, -1))
    kept &= (before < top_p) | (top_p >= 1)
    kept[:, 0] = True
    return torch.empty_like(kept).scatter_(1, order, ~kept)
