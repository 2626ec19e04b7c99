"""The products of rows with the weights of their experts in plain torch, one expert after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from nanovllm.formats.int4.kernels.layout import Int4Experts
from nanovllm.kernels.activation import silu_and_mul_reference
from nanovllm.moe.kernels.tiles import PLAIN_MLP, Chosen, ExpertMLP

W = TypeVar("W", covariant=True)


class Weights(Protocol[W]):
    """The weights of E experts, [E, N, K]; an index gives that of one."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, expert: int, /) -> W: ...


def experts_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor | Int4Experts,
    down: torch.Tensor | Int4Experts,
    chosen: Chosen,
    mlp: ExpertMLP = PLAIN_MLP,
) -> torch.Tensor:
    """`experts_triton` in plain torch, which needs no tiles. Computes only experts that have rows."""
    return experts_in_turn(x, gate_up, down, chosen, mlp, F.linear, silu_and_mul_reference)


def experts_in_turn(
    x: torch.Tensor,
    gate_up: Weights[W],
    down: Weights[W],
    chosen: Chosen,
    mlp: ExpertMLP,
    linear: Callable[[torch.Tensor, W], torch.Tensor],
    activation: Callable[[torch.Tensor, str], torch.Tensor],
) -> torch.Tensor:
    """`experts_reference` with a product and an activation of its own. If neither depends on the number of
    rows, no bit of a row depends on other rows.

    linear: the product of rows with the weight of an expert. activation: as `silu_and_mul`.
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
            rows = linear(x[pairs // ids.shape[1]], gate_up[expert])
            if mlp.gate_up_bias is not None:
                halves = rows.view(count, 2, -1)[:, :, : mlp.width]
                halves += mlp.gate_up_bias[expert].view(2, -1)
            rows = linear(activation(rows, mlp.activation.kind), down[expert])
            products[pairs] = rows if mlp.down_bias is None else rows + mlp.down_bias[expert]
            start += count
    scaled = products.view(*ids.shape, -1).float() * weights[:, :, None]
    scaled = torch.where(ids[:, :, None] >= 0, scaled, 0.0)
    total = scaled[:, 0]
    for each in scaled.unbind(1)[1:]:  # `sum` may add in another order for other numbers of rows
        total = total + each
    return total.to(x.dtype)
