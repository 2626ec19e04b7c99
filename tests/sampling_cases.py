"""Checks of drawing tokens for any device, and of keeping the tokens drawn last.

A check compares the Triton launcher and the torch reference with a computation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensors import BF16, F32, randn

from nanovllm.batch import FILTERS as FILTER_COLUMNS
from nanovllm.batch import LAST_SAMPLED, NO_SLOT, NOT_FINITE
from nanovllm.kernels import sampling
from nanovllm.kernels.compat import jit, tl
from nanovllm.kernels.last_tokens import (
    keep_tokens_reference,
    keep_tokens_triton,
    take_tokens_reference,
    take_tokens_triton,
)
from nanovllm.kernels.random_bits import random_pair, random_pair_reference
from nanovllm.kernels.sampling import sample_reference, sample_triton
from nanovllm.parallel.peer_memory import ExchangedRows

SAMPLERS = (sample_triton, sample_reference)
SAMPLE_BLOCK = sampling.BLOCK  # of the vocabulary
TEMPERATURES = (0.0, 1e-8, 1e-4, 0.01, 0.6, 1.0, 5.0)
Sampler = Callable[..., torch.Tensor]
ALL = slice(None)
# (top_k, top_p, min_p); 0, 1 and 0 keep all
FILTERS = (
    (0, 0.95, 0.0),
    (20, 0.95, 0.0),
    (20, 1.0, 0.0),
    (1, 1.0, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (5, 0.5, 0.02),
    (0, 0.3, 0.3),
    (0, 1e-30, 0.0),
    (0, 0.05, 0.0),
    (300, 0.9999, 1e-6),
    (2**31 - 1, 1.0, 0.0),
    (0, 1.0, 0.0),
    (700, 0.2, 0.0),
)


Filters = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # top_k, top_p and min_p


def filters_at(filters: Filters, rows: Any) -> Filters:
    """Some rows of the filters."""
    top_k, top_p, min_p = filters
    return top_k[rows], top_p[rows], min_p[rows]


@dataclass(frozen=True)
class Rows:
    """The columns of a sampling call in addition to its logits."""

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def pick(self, index: torch.Tensor | slice, filters: Filters | None = None) -> tuple[Any, ...]:
        """Some rows as a sampler takes them, with filters of these rows; None: neutral ones."""
        own = self.temperature[index], self.seeds[index], self.positions[index]
        return *own, *(filters or filters_of(len(own[0]), str(own[0].device)))


def make_rows(count: int, device: str, temperatures: Sequence[float] = TEMPERATURES) -> Rows:
    generator = torch.Generator().manual_seed(count)
    temperature = torch.tensor([temperatures[i % len(temperatures)] for i in range(count)], dtype=F32)
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    positions = torch.randint(0, 2**31 - 1, (count,), generator=generator, dtype=torch.int32)
    return Rows(temperature.to(device), seeds.to(device), positions.to(device))


def make_filters(count: int, device: str) -> Filters:
    rows = [FILTERS[i % len(FILTERS)] for i in range(count)]
    top_k, top_p, min_p = zip(*rows, strict=True)
    return filters_of(count, device, top_k=top_k, top_p=top_p, min_p=min_p)


def filters_of(count: int, device: str, **given: Sequence[float]) -> Filters:
    """The filters of `count` rows; those that are not given are neutral."""

    def column(name: str) -> torch.Tensor:
        neutral, dtype = FILTER_COLUMNS[name].neutral, FILTER_COLUMNS[name].dtype
        values = np.array(given.get(name, [neutral] * count), dtype)
        return torch.from_numpy(values).to(device)

    top_k, top_p, min_p = map(column, FILTER_COLUMNS)
    return top_k, top_p, min_p


def assert_drawn(part: torch.Tensor, sums: torch.Tensor, ids: torch.Tensor, bits: torch.Tensor) -> None:
    """Check that bits / 2**32, within rounding, is in the share of `sums` [S] that ids [S] of part [S, n]
    have.
    """
    after = part.cumsum(-1).gather(-1, ids[:, None])[:, 0]
    before = after - part.gather(-1, ids[:, None])[:, 0]
    target = bits.double() * 2.0**-32 * sums
    assert ((before <= target + 2e-5 * sums) & (target <= after + 2e-5 * sums)).all()


def check_sample(count: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Each id matches its row's two random numbers and has a positive probability; a greedy row has the first
    of the largest logits.
    """
    rows = make_rows(count, device)
    block_bits, token_bits = random_pair_reference(rows.seeds, rows.positions)
    drawn = rows.temperature >= 1e-5
    divisor = rows.temperature.double().where(drawn, 1.0)[:, None]
    blocks = -(-vocab // SAMPLE_BLOCK)
    for spread in (3.0, 0.0):  # at temperature 0 each block of the vocabulary wins somewhere
        logits = (spread * randn(count, vocab + 5, dtype=F32, device=device)).to(dtype)
        logits[:, vocab:] = 1e4  # would win if it were read
        logits = logits[:, :vocab]
        wide = logits.double()
        weights = ((wide - wide.amax(-1, keepdim=True)) / divisor).exp()
        weights = torch.nn.functional.pad(weights, (0, blocks * SAMPLE_BLOCK - vocab))
        by_block = weights.view(count, blocks, SAMPLE_BLOCK)
        shares = by_block.sum(-1)
        for sampler in SAMPLERS:
            ids = sampler(logits, *rows.pick(ALL))
            assert ids.dtype == torch.int64
            assert torch.equal(ids[~drawn], logits[~drawn].argmax(-1))
            block, token = ids // SAMPLE_BLOCK, ids % SAMPLE_BLOCK
            inside = by_block[torch.arange(count, device=device), block]
            assert_drawn(shares[drawn], shares[drawn].sum(-1), block[drawn], block_bits[drawn])
            assert_drawn(inside[drawn], inside[drawn].sum(-1), token[drawn], token_bits[drawn])


def check_sampling_rows_are_independent(count: int, vocab: int, device: str, filters: bool = False) -> None:
    """A row gives the same id alone, among 2 and 17, in another order, and beside rows with NaN."""
    logits = randn(count, vocab, dtype=F32, device=device).to(BF16 if filters else F32)
    rows, of_all = make_rows(count, device, (0.0, 0.7, 1.3)), make_filters(count, device)
    bad = torch.arange(count, device=device) % 4 == 1
    spoilt = logits.clone()
    spoilt[bad, vocab // 2] = math.nan

    def draw(sampler: Sampler, logits: torch.Tensor, index: torch.Tensor | slice) -> torch.Tensor:
        own = filters_at(of_all, index) if filters else None
        return sampler(logits[index], *rows.pick(index, own))

    for sampler in SAMPLERS:
        ids = draw(sampler, logits, ALL)
        for size in (1, 2, 17, count):
            some = torch.randperm(count, generator=torch.Generator().manual_seed(size))[:size].to(device)
            assert torch.equal(draw(sampler, logits, some), ids[some])
        assert torch.equal(draw(sampler, spoilt, ALL), ids.masked_fill(bad, -1))


def check_sampling_extremes(vocab: int, device: str, kept: tuple[int, float, float] | None = None) -> None:
    """Rows that are not finite give -1, ties the lowest index, masked tokens never win, and no finite logit
    is too large.

    kept: top_k, top_p and min_p of all rows.
    """
    inf, nan, last = math.inf, math.nan, vocab - 1
    # changed logits, the base of all others, the expected id
    cases: list[tuple[dict[int, float], float, int]] = [
        ({0: nan}, 0.0, -1),
        ({last: nan}, 0.0, -1),
        ({last: inf}, 0.0, -1),
        ({0: nan, last: inf}, -inf, -1),
        ({}, -inf, -1),
        ({last: -1e30}, -inf, last),
        ({last: 3.4e38}, -3.4e38, last),
        ({last // 2: 3.4e38, last: 3.4e38}, 0.0, last // 2),
        ({last: 1e3}, -inf, last),
    ]
    logits = torch.full((len(cases), vocab), 0.0, device=device)
    for row, (cells, base, _) in enumerate(cases):
        logits[row] = base
        for column, value in cells.items():
            logits[row, column] = value
    expected = torch.tensor([case[2] for case in cases], device=device)
    filters = None
    if kept is not None:
        top_k, top_p, min_p = ([each] * len(cases) for each in kept)
        filters = filters_of(len(cases), device, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.0, 1e-8, 1e-4, 1.0):
        rows = make_rows(len(cases), device, (temperature,))
        for sampler in SAMPLERS:
            ids = sampler(logits, *rows.pick(ALL, filters))
            # Two equal logits: a tie for a greedy row, equal chances for any other row.
            tie = (ids == last) & (logits[:, last // 2] == logits[:, last]) & (temperature >= 1e-5)
            assert torch.equal(ids.masked_fill(tie, last // 2), expected), temperature


def check_exchanged_rows(vocab: int, size: int, count: int, dtype: torch.dtype, device: str) -> None:
    """Ranks with some columns each draw what one rank with all columns draws, for filters and rows that are
    not finite.
    """
    logits = randn(count, vocab, dtype=F32, device=device).round(decimals=1).to(dtype)
    logits[1::7, vocab // 2] = math.nan
    logits[2::7, vocab - 1] = math.inf
    logits[3::7] = -math.inf
    rows, filters = make_rows(count, device), make_filters(count, device)
    part = -(-vocab // size)
    columns = torch.nn.functional.pad(logits, (0, size * part - vocab), value=1e4).split(part, dim=1)
    max_rows = count + 3
    buffers = logits.new_full((size, ExchangedRows.numel(max_rows, vocab, size)), math.nan)
    places = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
    ranks = [
        ExchangedRows(rank, places, buffers[rank], max_rows, vocab, lambda x: x) for rank in range(size)
    ]  # these ranks do not wait for each other
    assert ranks[0].fits(max_rows, dtype) and not ranks[0].fits(max_rows + 1, dtype)
    for rows_now in (count, 1):
        whole = [
            rank.whole_rows(own[:rows_now].contiguous()) for rank, own in zip(ranks, columns, strict=True)
        ]
        assert torch.equal(
            torch.cat([part for _, part in whole]).nan_to_num(), logits[:rows_now].nan_to_num()
        )
        ids = torch.zeros(rows_now, dtype=torch.int64, device=device)
        for rank, (mine, part) in zip(ranks, whole, strict=True):
            drawn = sample_triton(part, *rows.pick(mine, filters_at(filters, mine)))
            ids += rank.join(drawn, mine, rows_now) + 1
        first = slice(rows_now)
        expected = sample_triton(logits[first], *rows.pick(first, filters_at(filters, first)))
        assert torch.equal(ids - 1, expected)
    assert rows_now == 1 or (expected[1:4] == -1).all()


def check_sampling_keys(sampler: Sampler, device: str) -> None:
    """Each word of the seed and the position changes the draw; equal keys repeat it."""
    count, vocab = 8, 4000
    logits = torch.zeros(count, vocab, device=device)
    temperature = torch.ones(count, device=device)
    seeds = torch.tensor([0, 0, 1, 1 << 32, -1, 0, 7 << 40, 0], device=device)
    positions = torch.tensor([0, 1, 0, 0, 0, 2**31 - 1, 0, 0], dtype=torch.int32, device=device)
    ids = sampler(logits, *Rows(temperature, seeds, positions).pick(ALL)).tolist()
    assert ids[0] == ids[7]
    assert len(set(ids[:7])) == 7


def check_sampling_distribution(sampler: Sampler, draws: int, device: str, *, blocks: int = 1) -> None:
    """Chi-square against softmax, for draws that differ in their position and in each word of their seed.

    32 tokens have a positive probability, spread over as many blocks of the vocabulary.
    """
    finite = torch.linspace(-3, 3, 32, device=device)
    logits = torch.full((32, 1 if blocks == 1 else blocks * SAMPLE_BLOCK // 32), -math.inf, device=device)
    logits[:, -1] = finite[torch.randperm(32, generator=torch.Generator().manual_seed(5)).to(device)]
    logits = logits.flatten()
    counter = torch.arange(draws, device=device)
    fixed = torch.full_like(counter, 1234)
    for temperature in (0.5, 1.0, 2.0):
        expected = draws * (logits.double() / temperature).softmax(-1)
        for seeds, positions in ((fixed, counter), (counter, fixed), (counter * 2**32, fixed)):
            rows = Rows(torch.full((draws,), temperature, device=device), seeds, positions.int())
            parts = [
                sampler(logits.expand(len(part), -1), *rows.pick(part))
                for part in counter.split(4096 if blocks > 1 else draws)
            ]
            observed = torch.bincount(torch.cat(parts), minlength=len(logits)).double()
            assert observed.sum() == draws
            assert not observed[expected == 0].any()
            error = ((observed - expected).square() / expected)[expected > 0]
            assert error.sum() < 70, (temperature, error.sum())  # 31 degrees of freedom: p = 8e-5


@jit()
def _pair_kernel(
    seeds_ptr: tl.tensor, positions_ptr: tl.tensor, out_ptr: tl.tensor, count: int, BLOCK: tl.constexpr
) -> None:
    row = tl.arange(0, BLOCK)
    live = row < count
    first, second = random_pair(
        tl.load(seeds_ptr + row, mask=live, other=0),
        tl.load(positions_ptr + row, mask=live, other=0),
        row % 2,
    )
    tl.store(out_ptr + row, first.to(tl.int64), mask=live)
    tl.store(out_ptr + count + row, second.to(tl.int64), mask=live)


def check_random_pairs(device: str) -> None:
    """Kernel and reference draw the same bits. For random and consecutive keys, each bit is set about half
    the time, and any two bits agree about half the time.
    """
    count = 8192
    rows = make_rows(count, device)
    seeds = rows.seeds.clone()
    positions = rows.positions.clone()
    seeds[: count // 2] = torch.arange(count // 2, device=device) // 64
    positions[: count // 2] = torch.arange(count // 2, device=device, dtype=torch.int32) % 64
    out = torch.empty((2, count), dtype=torch.int64, device=device)
    _pair_kernel[(1,)](seeds, positions, out, count, BLOCK=count)
    pair = random_pair_reference(seeds, positions)
    again = random_pair_reference(seeds, positions, 1)
    odd = torch.arange(count, device=device) % 2 > 0
    assert torch.equal(out, torch.stack(again).where(odd, torch.stack(pair)))
    for half in (slice(None, count // 2), slice(count // 2, None)):
        bits = torch.cat([x[half, None] >> torch.arange(32, device=device) & 1 for x in pair], dim=1).double()
        signs = 2 * bits - 1  # [rows, 64]
        noise = (count // 2) ** -0.5
        assert signs.mean(0).abs().max() < 4.5 * noise
        agreement = signs.T @ signs / len(signs) - torch.eye(64, device=device)
        assert agreement.abs().max() < 5 * noise


# ---- the tokens drawn last ----


def check_last_tokens(tokens: int, device: str) -> None:
    """Tokens are stored by slot and read from there, also if they are no tokens."""
    vocab, slots = 100, torch.randperm(tokens + 3, generator=torch.Generator().manual_seed(1)).to(device)
    drawn = torch.arange(tokens, device=device) % vocab
    drawn[::5] = NOT_FINITE
    drawn[1::5] = 2**40
    ids = torch.where(torch.arange(tokens, device=device) % 3 == 0, 7, LAST_SAMPLED)
    kept = torch.arange(tokens, device=device) % 7 != 6
    lasts = torch.where(kept, drawn, 50).clamp(0, vocab - 1)
    expected = torch.where(ids == LAST_SAMPLED, lasts, ids)
    if device != "cpu":
        torch.cuda.synchronize()  # slots are also an input of the step
    for keep, take in (
        (keep_tokens_triton, take_tokens_triton),
        (keep_tokens_reference, take_tokens_reference),
    ):
        last = torch.full((tokens + 3,), 50, device=device)
        keep(drawn, torch.where(kept, slots[:tokens], NO_SLOT), last)
        assert torch.equal(last[slots[:tokens]], torch.where(kept, drawn, 50))
        assert (last[slots[tokens:]] == 50).all()
        asking = torch.where(ids == LAST_SAMPLED, slots[:tokens], NO_SLOT)
        assert torch.equal(take(ids, asking, last, vocab), expected)
