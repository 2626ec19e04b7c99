"""The sampler's random numbers are independent: for seeds and positions that differ in one bit or are close,
and for attempts.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from nanovllm.kernels.random_bits import pick_reference, random_pair_reference

DRAWS = 2**20  # a bias of 2 % between cells (root mean square) exceeds the limit
CELLS = 64  # for each of the two numbers
LIMIT = 5.0  # in standard deviations; about 300 tests, each exceeds it by chance once in two million runs


def excess(first: torch.Tensor, second: torch.Tensor) -> float:
    """Chi-square of CELLS x CELLS cells, in standard deviations from its mean, for numbers below 2**32."""
    cells = (first >> 26).mul_(CELLS).add_(second >> 26)
    expected = len(cells) / CELLS**2
    observed = torch.bincount(cells, minlength=CELLS**2).double()
    freedom = CELLS**2 - 1
    return (float((observed - expected).square().sum()) / expected - freedom) / (2 * freedom) ** 0.5


def assert_independent(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for first, second in zip(one, other, strict=True):
        assert abs(excess(first, second)) < LIMIT


def draws(seed: int, positions: torch.Tensor, attempt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return random_pair_reference(torch.full_like(positions, seed), positions, attempt)


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


@pytest.mark.parametrize("bits", [range(0, 32), range(32, 64)], ids=["low", "high"])
def test_every_bit_of_the_seed_counts(bits: range) -> None:
    positions = torch.arange(DRAWS)
    base = draws(1, positions)
    for bit in bits:
        assert_independent(base, draws(signed(1 ^ (1 << bit)), positions))


def test_every_bit_of_the_position_counts() -> None:
    counter = torch.arange(DRAWS)
    for bit in range(31):
        low = counter & ((1 << bit) - 1)
        positions = ((counter - low) << 1 | low) & (2**31 - 1)  # positions with 0 in this bit
        assert_independent(draws(1, positions), draws(1, positions | (1 << bit)))


def test_low_seeds_and_their_two_numbers_are_independent() -> None:
    positions = torch.arange(DRAWS)
    streams = [draws(seed, positions) for seed in range(8)]
    for one, other in itertools.combinations(streams, 2):
        assert_independent(one, other)
    for first, second in streams:
        assert abs(excess(first, second)) < LIMIT
        assert abs(excess(first[:-1], first[1:])) < LIMIT


def test_seeds_at_one_position_and_attempts_are_independent() -> None:
    seeds = torch.arange(DRAWS)
    base = random_pair_reference(seeds, torch.full_like(seeds, 7))
    assert_independent(base, random_pair_reference(seeds, torch.full_like(seeds, 8)))
    assert_independent(base, random_pair_reference(seeds + 1, torch.full_like(seeds, 7)))
    assert_independent(base, random_pair_reference(seeds, torch.full_like(seeds, 7), 1))


def test_an_entry_of_weight_zero_is_never_picked() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 1e-30, 0.0]])
    for bits in (0, 1, 2**31, 2**32 - 1):
        assert pick_reference(weights, torch.tensor([bits])).item() == 1
