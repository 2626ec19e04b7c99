"""Which experts each row goes to, and the rows of each expert in tiles. Owns no weight.

Rows are grouped on the device; the host knows only upper bounds, so a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_LOWEST = -3.0e38  # NaN and -inf count as this logit, so that every row gets top_k different experts


class Chosen(NamedTuple):
    """The experts of T rows."""

    ids: torch.Tensor  # [T, top_k] int32, the likeliest first; -1 in a row that is routed nowhere
    weights: torch.Tensor  # [T, top_k] float32; 0 there


class Routing:
    """The experts of T rows; computed late, once, by the method that multiplies them."""

    __slots__ = ("_chosen", "logits", "normalised", "slots", "top_k")

    def __init__(
        self, logits: torch.Tensor, top_k: int, normalised: bool, slots: torch.Tensor | None = None
    ) -> None:
        """logits: [T, E]. normalised: the weights of a row add up to 1; else they are its probabilities among
        all experts. slots: [T]; a row with a negative one is padding and is routed nowhere."""
        self.logits, self.slots = logits, slots
        self.top_k, self.normalised = top_k, normalised
        self._chosen: Chosen | None = None

    def chosen(self) -> Chosen:
        """The experts of each row."""
        if self._chosen is None:
            self._chosen = topk_routing_reference(self.logits, self.top_k, self.normalised, self.slots)
        return self._chosen


def topk_routing_reference(
    logits: torch.Tensor, top_k: int, normalised: bool, slots: torch.Tensor | None = None
) -> Chosen:
    """`topk_routing` in plain torch."""
    scores = logits.float()
    order = torch.where(scores > _LOWEST, scores, _LOWEST).sort(dim=-1, descending=True, stable=True)
    ids = order.indices[:, :top_k]
    weights = scores.softmax(-1).gather(1, ids)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if slots is not None:
        padding = (slots < 0)[:, None]
        ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    return Chosen(ids.int(), weights)
