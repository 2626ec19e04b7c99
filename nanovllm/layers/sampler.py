"""Sampler: from logits and per-row parameters to token ids. Filters; the sampling kernel draws.

A row's result depends on that row alone, whatever its batch mates ask for. Owns no random state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.kernels.sampling import VocabularyPart, sample

SORT_ELEMENTS = 2**23  # logits sorted at once: bounds the memory of sorting, at about 50 bytes each


@dataclass(frozen=True, slots=True, eq=False)
class SamplingTensors:
    """The parameters of S rows, on the logits' device. None where no row uses a parameter."""

    temperature: torch.Tensor | None  # [S] float32, 0 is greedy; None: all rows are greedy
    top_k: torch.Tensor | None  # [S] int32; 0 or less keeps all
    top_p: torch.Tensor | None  # [S] float32; 1 keeps all
    min_p: torch.Tensor | None  # [S] float32; 0 keeps all
    seeds: torch.Tensor | None  # [S] int64; None: all rows are greedy
    positions: torch.Tensor  # [S] int32: of the token to come; with the seed it picks the random numbers
    filter_rows: torch.Tensor | None  # [R] the rows that use top_k or top_p; None: no row does

    @property
    def filters(self) -> bool:
        """Whether any row uses top_k, top_p or min_p."""
        return self.filter_rows is not None or self.min_p is not None


class Sampler(nn.Module):
    """Temperature, min_p, top_k, then top_p, as vLLM; each renormalises over what the last one kept."""

    def forward(
        self, logits: torch.Tensor, params: SamplingTensors, part: VocabularyPart | None = None
    ) -> torch.Tensor:
        """logits [S, V] of any float dtype, not changed -> token ids [S] int64.

        A greedy row gets its likeliest token, the lowest id of equals. A row that holds NaN or +inf, or
        nothing finite, gets -1. With `part` as in `sample`, and no row may use top_k, top_p or min_p.
        """
        num_rows = logits.shape[0]
        temperature = params.temperature
        if temperature is None:
            temperature = torch.zeros(num_rows, dtype=torch.float32, device=logits.device)
        seeds = params.seeds
        if seeds is None:
            seeds = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
        if params.temperature is not None and params.min_p is not None:
            dropped = _scale(logits, temperature) < params.min_p.log()[:, None]
            logits = logits.masked_fill(dropped, -torch.inf)
        if params.temperature is not None and params.filter_rows is not None:
            logits = logits.clone()
            for rows in torch.split(params.filter_rows, max(1, SORT_ELEMENTS // logits.shape[1])):
                logits[rows] = _keep_top(
                    logits[rows],
                    temperature[rows],
                    None if params.top_k is None else params.top_k[rows],
                    None if params.top_p is None else params.top_p[rows],
                )
        return sample(logits, temperature, seeds, params.positions, part)


def _scale(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return (logits - their maximum) / temperature in float32, [R, V]: log-probabilities but for a constant.

    Subtracting first keeps tiny temperatures finite. Rows without a finite maximum come out as NaN and -inf.
    """
    wide = logits.float()
    divisor = temperature.where(temperature > 0, 1.0)
    return (wide - wide.amax(dim=-1, keepdim=True)) / divisor[:, None]


def _keep_top(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Return `logits` [R, V] with -inf where top_k or top_p drops a token.

    The sort is stable and the sums are in float64, so that neither ties nor rounding can depend on R.
    """
    scaled, order = _scale(logits, temperature).sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(scaled, dtype=torch.bool)
    if top_k is not None:
        ranks = torch.arange(logits.shape[1], device=logits.device)
        keep &= (ranks < top_k[:, None]) | (top_k <= 0)[:, None]
    if top_p is not None:
        probs = scaled.masked_fill(~keep, -torch.inf).double().softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # what the likelier tokens reach without this one
        keep &= before < top_p[:, None]
    keep |= ~logits.amax(dim=-1, keepdim=True).isfinite()  # a broken row must still be seen to be broken
    return logits.masked_fill(~torch.empty_like(keep).scatter_(1, order, keep), -torch.inf)
