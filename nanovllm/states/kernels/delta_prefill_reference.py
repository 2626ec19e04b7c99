"""The twin of `delta_prefill`: the gated delta rule over chunks, in plain torch."""

from __future__ import annotations

import torch

from nanovllm.batch import PADDING
from nanovllm.states.kernels.delta_heads import (
    DeltaHeads,
    Gates,
    check_delta,
    gates_reference,
    heads_reference,
)
from nanovllm.states.kernels.packed import CHUNK, Packed, Place, Saves, places


def delta_prefill_reference(
    qkv: torch.Tensor,
    gates: Gates,
    heads: DeltaHeads,
    pool: torch.Tensor,
    packed: Packed,
    saves: Saves | None = None,
) -> torch.Tensor:
    """`delta_prefill` in plain torch, in float32; float64 stays float64.

    Each chunk is computed by itself, with shapes of its own, so its bits depend on no other one.
    """
    check_delta(qkv, gates, heads, pool)
    out = qkv.new_zeros(len(qkv), heads.v_heads, heads.v_dim)
    for each in places(packed, saves):
        mine = slice(each.start, each.end)
        part = Gates(gates.a[mine], gates.b[mine], gates.a_log, gates.dt_bias)
        out[mine] = _sequence(qkv[mine], part, heads, pool, each)
    return out


def _sequence(
    qkv: torch.Tensor, gates: Gates, heads: DeltaHeads, pool: torch.Tensor, place: Place
) -> torch.Tensor:
    length, at = place.end - place.start, 0
    g, beta = (each.T.contiguous() for each in gates_reference(gates, heads.most_beta))
    state = g.new_zeros(heads.state)
    if place.source != PADDING:
        state = pool[place.source].to(g.dtype)
    out, saved = qkv.new_empty(length, heads.v_heads, heads.v_dim), []
    while at < length:
        end = min(length, at + CHUNK - (place.position + at) % CHUNK)
        rows = [(before - at, row) for before, row in place.saves if at <= before < end]
        q, k, v = heads_reference(qkv[at:end], heads)
        chunk = (q, k, v, g[:, at:end], beta[:, at:end])
        result, after = chunk_reference(state, *chunk, [before for before, _ in rows])
        saved += [(row, kept) for (_, row), kept in zip(rows, after, strict=False)]
        out[at:end] = result.transpose(0, 1).to(out.dtype)
        state, at = after[-1], end
    saved += [(row, state) for before, row in place.saves if before == length]
    for row, kept in [*saved, (place.row, state)]:
        if row != PADDING:
            pool[row] = kept.to(pool.dtype)
    return out


def chunk_reference(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    saves: list[int],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The results [H, C, dv] of a chunk, and the states after the first tokens that `saves` counts and after
    all, by the WY representation (Yang et al., Parallelizing linear transformers with the delta rule, 2024).

    state: [H, dk, dv]. q, k: [H, C, dk], with norms. v: [H, C, dv]. g, beta: [H, C].
    """
    total = g.cumsum(1)
    index = torch.arange(g.shape[1], device=g.device)
    is_earlier = index[:, None] >= index[None, :]
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(~is_earlier, -torch.inf).exp()
    lower = (beta[:, :, None] * (k @ k.mT) * decay).tril(-1)
    carried = total.exp()[:, :, None]
    rest = beta[:, :, None] * (v - carried * (k @ state))
    new = torch.linalg.solve_triangular(lower, rest, upper=False, unitriangular=True)
    out = carried * (q @ state) + ((q @ k.mT) * decay) @ new
    states = []
    for count in [*saves, g.shape[1]]:
        if count == 0:
            states.append(state)
            continue
        last = total[:, count - 1 : count]
        kept = (last - total[:, :count]).exp()[:, :, None] * new[:, :count]
        states.append(last.exp()[:, :, None] * state + k[:, :count].mT @ kept)
    return out, states
