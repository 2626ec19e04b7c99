"""SamplingTable: the sampling parameters of all running sequences, from which a step's columns are taken.

Checks nothing: `SamplingParams` did.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nanovllm.batch import ALL_GREEDY, SamplingBatch
from nanovllm.sampling_params import SamplingParams


class SamplingTable:
    """The sampling parameters of every slot, so that a step's columns are one NumPy lookup each."""

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.int64)

    def set(self, slot: int, params: SamplingParams, seed: int) -> None:
        """Take `params` for `slot`; `seed` is the request's own or the one that the engine drew for it."""
        self.temperature[slot] = params.temperature
        self.top_k[slot] = min(max(params.top_k, 0), 2**31 - 1)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = seed

    def take(self, slots: np.ndarray) -> SamplingBatch:
        """Return the columns for `slots` [S]; greedy rows do not make a column used."""
        temperature = self.temperature[slots]
        sampled = temperature > 0
        if not sampled.any():
            return ALL_GREEDY

        def used(column: np.ndarray, unused: Any) -> np.ndarray | None:
            values = np.where(sampled, column[slots], column.dtype.type(unused))
            return values if (values != unused).any() else None

        return SamplingBatch(
            temperature=temperature,
            top_k=used(self.top_k, 0),
            top_p=used(self.top_p, 1),
            min_p=used(self.min_p, 0),
            seed=self.seed[slots],
        )
