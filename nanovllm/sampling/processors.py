"""What else happens to logits: functions of the caller's own, and what filters leave of them, for
`logprobs_mode` "processed_...", which tells the distribution drawn from.

Plain torch, on every device. Draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.sampling import GREEDY_BELOW
from nanovllm.sampling.sampler import SamplingTensors
from nanovllm.sampling_params import takes_prompt


def filtered_logits(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """logits [S, V] -> float32: over the temperature, and -inf where min_p, top_k or top_p drops the token.

    A greedy row stays as it is.
    """
    greedy = params.temperature < GREEDY_BELOW
    x = logits.float() / params.temperature.where(~greedy, 1.0)[:, None]
    if params.filters is None:
        return x
    ordered, order = x.sort(dim=1, descending=True, stable=True)
    filters = params.filters
    top_k, top_p, min_p = (column[:, None] for column in (filters.top_k, filters.top_p, filters.min_p))
    place = torch.arange(x.shape[1], device=x.device)
    kept = (ordered >= ordered[:, :1] + min_p.log()) & ((top_k <= 0) | (place < top_k))
    shares = ordered.double().masked_fill(~kept, float("-inf")).softmax(dim=1)
    before = F.pad(shares.cumsum(dim=1), (1, -1))
    kept &= (before < top_p) | (top_p >= 1)
    kept[:, 0] = True
    dropped = torch.empty_like(kept).scatter_(1, order, ~kept)
    return x.masked_fill_(dropped & ~greedy[:, None], float("-inf"))


def call_processor(
    function: Callable[..., Any], prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
) -> torch.Tensor:
    """What a function of the caller's makes of one row of logits [V] float32.

    It takes (output ids, logits), or (prompt ids, output ids, logits) if it has three parameters, as in vLLM.
    Raises TypeError or ValueError when it returns anything but a tensor of this shape.
    """
    ids = [prompt_ids, output_ids] if takes_prompt(function) else [output_ids]
    made = function(*ids, logits)
    if not isinstance(made, torch.Tensor):
        raise TypeError(f"the logits processor {function!r} must return a tensor, not {made!r}")
    if made.shape != logits.shape:
        shapes = f"{tuple(logits.shape)}, not {tuple(made.shape)}"
        raise ValueError(f"the logits processor {function!r} must return logits of shape {shapes}")
    return made
