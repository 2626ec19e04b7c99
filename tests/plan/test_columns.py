"""The columns of sampling parameters: a row holds those of the sequence that has its slot."""

from __future__ import annotations

import numpy as np
import pytest

from nanovllm.batch import NO_EXTRAS, SAMPLING_PARAMETERS
from nanovllm.plan.columns import SamplingTable
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def test_sampling_columns_of_greedy_rows_are_neutral() -> None:
    table = SamplingTable(6)
    params = [
        SamplingParams(temperature=0, top_k=7, top_p=0.5, min_p=0.1),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.9, min_p=0.2),
    ]
    for slot, (param, seed) in enumerate(zip(params, (1, 2, 3, -4), strict=True)):
        seq = Sequence(slot, [5], param, seed)
        seq.slot = slot
        table.set(seq)
    positions = np.array([7, 8, 9])
    plain = table.take(np.array([1, 0]), positions[:2])
    assert plain.temperature.tolist() == [0.5, 0] and plain.seeds.tolist() == [2, 1]
    assert plain.positions.tolist() == [7, 8] and not plain.has_filters
    assert plain.filters.top_k.tolist() == plain.filters.min_p.tolist() == [0, 0]
    assert plain.filters.top_p.tolist() == [1, 1]
    mixed = table.take(np.array([3, 2, 0]), positions)
    assert mixed.filters.top_k.tolist() == [0, 3, 0] and mixed.seeds.tolist() == [-4, 3, 1]
    assert np.allclose(mixed.filters.top_p, [0.9, 1, 1]) and np.allclose(mixed.filters.min_p, [0.2, 0, 0])
    assert mixed.has_filters and table.take(np.array([2]), positions[:1]).has_filters
    for name, column in SAMPLING_PARAMETERS.items():
        assert name == "temperature" or getattr(SamplingParams(), name) == column.neutral


def test_a_slot_has_the_parameters_of_its_last_sequence() -> None:
    plain = SamplingParams(temperature=0.5)
    biased = SamplingParams(logit_bias={3: 2.0}, logprob_token_ids=[4, 5], presence_penalty=1.0)
    table, found = SamplingTable(2), []
    for seed, params in enumerate((plain, plain, biased, biased, plain, biased, plain, plain)):
        seq = Sequence(seed, [5, 6], params, seed)
        seq.slot = seed % 2
        table.set(seq)
        slots = np.array([seq.slot])
        columns, extras = table.take(slots, np.array([2])), table.take_extras([seq], slots, np.array([1]))
        assert columns.seeds.tolist() == [seed] and columns.temperature.tolist() == [params.temperature]
        assert (extras is NO_EXTRAS) == (params is plain)
        found.append(extras)
    for extras in (found[2], found[3], found[5]):
        assert extras.bias.token_ids.tolist() == [3] and extras.bias.values.tolist() == [2.0]
        assert extras.asked_ids.tolist() == [[4, 5]] and extras.num_logprobs == 0
        assert extras.penalties.presence.tolist() == [1.0] and extras.penalties.history_ids.tolist() == [5, 6]


@pytest.mark.parametrize("top_k", [-1, 0, 5, 2**31, 10**400])
def test_a_top_k_of_any_size_fits_its_column(top_k: int) -> None:
    table, seq = SamplingTable(1), Sequence(0, [5], SamplingParams(temperature=1, top_k=top_k), 1)
    seq.slot = 0
    table.set(seq)
    columns = table.take(np.array([0]), np.array([3]))
    assert columns.filters.top_k.tolist() == [min(max(top_k, 0), 2**31 - 1)]
    assert columns.has_filters == (top_k > 0)
