"""Checks of the filters top_k, top_p and min_p of the sampler for any device.

A check compares the Triton launcher and the torch reference with a computation of its own.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from sampling_cases import ALL, FILTERS, Sampler, filters_of, make_filters, make_rows
from tensors import F32, randn

from nanovllm.kernels.sampling import sample_reference, sample_triton


def kept_by_sorting(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """The tokens that the filters keep of logits [V], by definition: a stable sort, sums in float64."""
    wide = logits.double()
    order = wide.argsort(descending=True, stable=True)
    scaled = (wide[order] - wide.max()) / temperature
    keep = scaled >= (math.log(min_p) if min_p else -math.inf)
    if top_k:
        keep[top_k:] = False
    probs = scaled.masked_fill(~keep, -math.inf).softmax(-1)
    keep &= (probs.cumsum(-1) - probs < float(np.float32(top_p))) | (top_p == 1)
    return set(order[keep & (probs > 0)].tolist())


def adversarial_logits(vocab: int, device: str) -> list[torch.Tensor]:
    """All equal, two values, one finite, few finite, a bf16 grid, rising, falling, peaked, 0 and -0."""
    half = torch.arange(vocab, device=device) % 2
    few = torch.full((vocab,), -math.inf, device=device)
    few[:: max(1, vocab // 7)] = randn(len(few[:: max(1, vocab // 7)]), dtype=F32, device=device)
    one = torch.full((vocab,), -math.inf, device=device)
    one[vocab // 3] = -5.0
    rising = torch.linspace(-8, 8, vocab, device=device)
    coarse = (3 * randn(vocab, dtype=F32, device=device)).round()
    grid = randn(vocab, dtype=F32, device=device).bfloat16().float()
    equal, zeros = torch.zeros(vocab, device=device), torch.where(half > 0, 0.0, -0.0)
    return [equal, 2.0 * half, one, few, rising, rising.flip(0), coarse, grid, 8 * grid, zeros]


def check_filters(count: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Kernel and reference draw the same token for each filter; sorting the vocabulary keeps it."""
    filters = make_filters(count, device)
    rows = make_rows(count, device, (0.6, 1.0, 0.0, 3.0, 0.05))
    for base in adversarial_logits(vocab, device):
        logits = base.to(dtype).expand(count, -1).contiguous()
        ids = sample_triton(logits, *rows.pick(ALL, filters))
        assert torch.equal(ids, sample_reference(logits, *rows.pick(ALL, filters))), base
        for row, token in enumerate(ids.tolist()):
            temperature = float(rows.temperature[row])
            if temperature == 0:
                assert token == int(base.to(dtype).argmax())
                continue
            kept = kept_by_sorting(logits[row], temperature, *FILTERS[row % len(FILTERS)])
            assert token in kept, (row, FILTERS[row % len(FILTERS)])


def check_filters_keep_all_that_they_should(sampler: Sampler, vocab: int, draws: int, device: str) -> None:
    """Many draws give exactly the tokens that sorting keeps, each with its probability: chi-square.

    Rows differ in their position, and neighbouring rows in their filters.
    """
    for base in (
        *adversarial_logits(vocab, device)[:4],
        0.7 * randn(vocab, dtype=F32, device=device).bfloat16(),
    ):
        for index, case in enumerate(FILTERS):
            top_k, top_p, min_p = case
            temperature = (0.7, 1.0, 2.0)[index % 3]
            every = slice(index, len(FILTERS) * draws, len(FILTERS))
            count = len(FILTERS) * draws
            positions = torch.arange(count, device=device, dtype=torch.int32)[every]
            size = len(positions)
            columns = {"top_k": [top_k] * size, "top_p": [top_p] * size, "min_p": [min_p] * size}
            own = filters_of(size, device, **columns)
            seeds = torch.full((size,), 77, device=device)
            column = torch.full((size,), temperature, device=device)
            ids = sampler(base.float().expand(size, -1).contiguous(), column, seeds, positions, *own)
            kept = sorted(kept_by_sorting(base, temperature, *case))
            observed = torch.bincount(ids, minlength=vocab).double()
            assert not observed.index_fill(0, torch.tensor(kept, device=device), 0).any(), case
            expected = size * (base.double()[kept] / temperature).softmax(-1)
            likely = expected >= 5
            if likely.sum() > 1:
                error = ((observed[kept] - expected).square() / expected)[likely].sum()
                freedom = float(likely.sum()) - 1
                assert error < freedom + 5 * (2 * freedom) ** 0.5 + 10, (case, float(error), freedom)
