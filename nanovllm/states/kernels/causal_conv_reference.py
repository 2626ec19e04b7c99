"""Twins of the causal convolution in plain torch, and the check of its arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.batch import PADDING
from nanovllm.kernels.compat import wide
from nanovllm.states.kernels.packed import Packed, Saves, places


def check_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    gates: torch.Tensor | None,
) -> None:
    """ValueError for sizes that do not fit each other."""
    channels, k = weight.shape
    if k < 2 or x.shape[1:] != weight.shape[:1] or pool.shape[1:] != (k - 1, channels):
        raise ValueError(
            f"x is [T, C], weight [C, K] with K from 2 on and pool [rows, K - 1, C], but they have "
            f"{[*x.shape]}, {[*weight.shape]} and {[*pool.shape]}"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias is [{channels}], but it has {[*bias.shape]}")
    if gates is not None:
        if gates.shape != (len(x), 2 * channels) or gates.dtype != x.dtype:
            raise ValueError(
                f"gates are [{len(x)}, {2 * channels}] in {x.dtype}, but they have {[*gates.shape]} in "
                f"{gates.dtype}"
            )
        assert gates.stride(1) == 1
    assert x.stride(1) == 1 and weight.is_contiguous() and pool.stride()[1:] == (channels, 1)


def _convolved(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """inputs: [n, K - 1 + L, C] to [n, L, C], before SiLU; wide in and out. Taps are added in their order."""
    k = weight.shape[1]
    length = inputs.shape[1] - (k - 1)
    total = inputs.new_zeros(()) if bias is None else bias.to(inputs.dtype)
    for tap in range(k):
        total = total + weight[:, tap].to(inputs.dtype) * inputs[:, tap : tap + length]
    return total


def _finished(total: torch.Tensor, after: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[..., C], wide, to the result: behind SiLU, or times a gate `after`."""
    return F.silu(total).to(dtype) if after is None else total.to(dtype) * after


def _halves(x: torch.Tensor, gates: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The inputs of the convolution, and the gate of its results."""
    if gates is None:
        return x, None
    before, after = gates.chunk(2, dim=1)
    return x * before, after


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    packed: Packed,
    saves: Saves | None = None,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """`causal_conv` in plain torch; float64 stays float64."""
    check_conv(x, weight, bias, pool, gates)
    (x, after), before = _halves(x, gates), weight.shape[1] - 1
    out = torch.zeros_like(x)
    for each in places(packed, saves):
        old = x.new_zeros(before, x.shape[1])
        if each.source != PADDING:
            old = pool[each.source].to(x.dtype)
        inputs = torch.cat([old, x[each.start : each.end]])
        mine = slice(each.start, each.end)
        total = _convolved(wide(inputs)[None], weight, bias)[0]
        out[mine] = _finished(total, None if after is None else after[mine], x.dtype)
        ends = [*each.saves, (each.end - each.start, each.row)]
        for at, row in ends:
            if row != PADDING:
                pool[row] = inputs[at : at + before].to(pool.dtype)
    return out


def causal_conv_step_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """`causal_conv_step` in plain torch; float64 stays float64."""
    check_conv(x, weight, bias, pool, gates)
    (x, after), live = _halves(x, gates), (rows != PADDING).nonzero()[:, 0]
    out = torch.zeros_like(x)
    mine = rows[live].long()
    inputs = torch.cat([pool[mine].to(x.dtype), x[live, None]], dim=1)
    total = _convolved(wide(inputs), weight, bias)[:, 0]
    out[live] = _finished(total, None if after is None else after[live], x.dtype)
    pool[mine] = inputs[:, 1:].to(pool.dtype)
    return out
