"""The products of rows with the weights of their experts. Owns no weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.activation import silu_and_mul_reference
from nanovllm.kernels.routing import Chosen


def experts_reference(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: Chosen
) -> torch.Tensor:
    """The sum over a row's experts of weight * down @ (silu(gate @ x) * (up @ x)), [T, H], in plain torch.

    x: [T, H], gate_up: [E, 2I, H], down: [E, H, I], of one dtype. Computes only experts that have rows.
    """
    ids, weights = chosen
    products = x.new_zeros(ids.numel(), down.shape[1])
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat.clamp(min=-1) + 1, minlength=len(down) + 1).tolist()
    start = counts[0]  # pairs that are routed nowhere
    for expert, count in enumerate(counts[1:]):
        if count:
            pairs = order[start : start + count]
            rows = F.linear(x[pairs // ids.shape[1]], gate_up[expert])
            products[pairs] = F.linear(silu_and_mul_reference(rows), down[expert])
            start += count
    scaled = products.view(*ids.shape, -1).float() * weights[:, :, None]
    return torch.where(ids[:, :, None] >= 0, scaled, 0.0).sum(1).to(x.dtype)
