"""The sampler row by row: filters, ties, probabilities and rows that are not finite."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import filters_of
from tensors import randn

from nanovllm.batch import FILTERS
from nanovllm.kernels.sampling import SamplingTensors, sample


def sampling(rows: list[dict[str, float]], positions: list[int] | None = None) -> SamplingTensors:
    """The sampling columns of `rows`; each row may set temperature, seed and filters."""

    def column(name: str, unused: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, unused) for row in rows], dtype=dtype)

    filters = {name: [row.get(name, each.neutral) for row in rows] for name, each in FILTERS.items()}
    return SamplingTensors(
        temperature=column("temperature", 0.0, torch.float32),
        seeds=column("seed", 0, torch.int64),
        positions=torch.tensor(positions or [0] * len(rows), dtype=torch.int32),
        **dict(zip(FILTERS, filters_of(len(rows), "cpu", **filters), strict=True)),
    )


def drawn(logits: torch.Tensor, draws: int = 300, **row: float) -> set[int]:
    """The distinct tokens that one row's parameters draw over many seeds."""
    rows = [{"temperature": 1.0} | row | {"seed": seed} for seed in range(draws)]
    return set(sample(logits.repeat(draws, 1), sampling(rows)).tolist())


def log_probs(*probs: float) -> torch.Tensor:
    return torch.tensor(probs).log()


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 5.0, 5.0]])
    assert sample(logits, sampling([{}, {}])).tolist() == [1, 0]


def test_each_filter_keeps_exactly_its_tokens() -> None:
    logits = log_probs(0.1, 0.4, 0.05, 0.3, 0.15) + 7
    assert drawn(logits) == {0, 1, 2, 3, 4}
    assert drawn(logits, top_k=2) == {1, 3}
    assert drawn(logits, top_k=99) == {0, 1, 2, 3, 4}
    assert drawn(logits, top_p=0.65) == {1, 3}
    assert drawn(logits, top_p=0.75) == {1, 3, 4}
    assert drawn(logits, top_p=0.01) == {1}
    assert drawn(logits, min_p=0.3) == {1, 3, 4}
    assert drawn(logits, min_p=1.0) == {1}
    # top_p applies after top_k: 0.4 / 0.85 + 0.3 / 0.85 = 0.82
    assert drawn(logits, top_k=3, top_p=0.8) == {1, 3}
    assert drawn(logits, top_p=0.8) == {1, 3, 4}
    # min_p comes first and leaves 0.4 and 0.3; 0.4 is 0.57 of their sum
    assert drawn(logits, min_p=0.6, top_p=0.55) == {1}
    assert drawn(logits, top_p=0.55) == {1, 3}


def test_filters_see_the_scaled_logits() -> None:
    logits = log_probs(0.5, 0.3, 0.2)
    assert drawn(logits, temperature=0.25, top_p=0.85) == {0}  # 0.5**4 is 0.87 of the sum
    assert drawn(logits, temperature=4.0, top_p=0.85) == {0, 1, 2}
    assert drawn(logits, temperature=0.25, min_p=0.2) == {0}
    assert drawn(logits, temperature=4.0, min_p=0.5) == {0, 1, 2}


def test_top_k_cuts_ties_at_the_lowest_ids() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 2.0])
    assert drawn(logits, top_k=1) == {1}
    assert drawn(logits, top_k=2) == {1, 3}
    assert drawn(torch.zeros(5), top_p=0.5) == {0, 1, 2}


def test_tiny_temperature_is_greedy() -> None:
    logits = randn(1, 50, seed=51)[0]
    for temperature in (1e-8, 1e-38):
        for filters in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
            assert drawn(logits, 20, temperature=temperature, **filters) == {int(logits.argmax())}


def test_frequencies_are_the_probabilities() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = [{"temperature": 2.0, "seed": seed} for seed in range(20000)]
    ids = sample((probs.log() * 2).repeat(len(rows), 1), sampling(rows))
    torch.testing.assert_close(ids.bincount(minlength=4) / len(rows), probs, atol=0.015, rtol=0)


KINDS: list[dict[str, float]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": -5, "top_k": 3},
    {"temperature": 1.5, "seed": 2**62, "top_p": 0.8},
    {"temperature": 1.2, "seed": 9, "min_p": 0.1},
    {"temperature": 1.0, "seed": 11, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.9, "seed": 3, "top_k": 1},
    {"temperature": 0.0, "top_k": 4, "top_p": 0.3},
]


def test_a_row_alone_is_the_row_in_any_batch() -> None:
    rows = [KINDS[i % len(KINDS)] for i in range(64)]
    positions = list(range(100, 164))
    # Coarse logits with many ties.
    logits = torch.randn(64, 211, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = [int(sample(logits[i : i + 1], sampling([rows[i]], [positions[i]]))) for i in range(len(rows))]
    assert len(set(alone)) > 10
    for seed in range(5):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[: 64 - 9 * seed].tolist()
        before = logits.clone()
        params = sampling([rows[i] for i in order], [positions[i] for i in order])
        assert sample(logits[order], params).tolist() == [alone[i] for i in order]
        assert torch.equal(logits, before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_gives_minus_one_and_changes_no_other(value: float) -> None:
    rows = KINDS * 3
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(2))
    params = sampling(rows)
    expected = sample(logits, params)
    logits[8:16, 31] = value  # one bad row of each kind
    logits[3] = -torch.inf
    expected[8:16] = -1
    expected[3] = -1
    assert sample(logits, params).tolist() == expected.tolist()


def test_rows_are_sorted_in_chunks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = KINDS * 5
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(4))
    expected = sample(logits, sampling(rows))
    monkeypatch.setattr("nanovllm.kernels.sampling.SORT_ELEMENTS", 150)
    assert sample(logits, sampling(rows)).tolist() == expected.tolist()
