"""Prefill in two halves: where a batch is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nanovllm.engine.batch import EMPTY_BATCH
from nanovllm.engine.overlap import halves


@pytest.mark.parametrize(
    ("lens", "first", "second"),
    [
        ([4, 4], [4], [4]),
        ([5, 4], [4], [1, 4]),
        ([2], [1], [1]),
        ([1, 1, 9, 1], [1, 1, 4], [5, 1]),
        ([3, 3, 3, 2], [3, 2], [1, 3, 2]),
    ],
)
def test_halves_of_a_batch(lens: list[int], first: list[int], second: list[int]) -> None:
    query_lens = np.array(lens, np.int32)
    batch = replace(EMPTY_BATCH, query_lens=query_lens, context_lens=query_lens + 10)
    parts = halves(batch)
    assert [part.query_lens.tolist() for part in parts] == [first, second]
    rows = np.arange(len(lens))
    assert rows[parts[0].rows].tolist() == list(range(len(first)))
    assert rows[parts[1].rows].tolist() == list(range(len(lens)))[-len(second) :]
    assert parts[1].context_lens.tolist() == [10 + n for n in lens[-len(second) :]]
    last = lens[len(first) - 1]
    assert parts[0].context_lens.tolist() == [10 + n for n in lens[: len(first) - 1]] + [
        10 + last - (last - first[-1])
    ]
    assert batch.query_lens.tolist() == lens
