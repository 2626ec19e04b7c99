"""SamplingParams: how one request is sampled. SamplingBatch: the same for one step, as columns.

Checks every value; never touches logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SEED_LIMIT = 2**63


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Raises ValueError or TypeError that names the field and the value.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: keep the k likeliest tokens; 0 or -1 keeps all.
    top_p: keep the fewest likeliest tokens whose probabilities reach top_p, in (0, 1].
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    seed: the request's own random numbers, whatever else is in the batch; None takes the engine's.
    max_tokens: the most tokens to generate.
    ignore_eos: go on after an end-of-sequence token.
    stop_token_ids: further tokens that end the output (and are its last token).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 64
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"{name} must be a number, not {value!r}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}; 1 keeps all tokens")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], not {self.min_p}; 0 keeps all tokens")
        if not _is_int(self.top_k) or self.top_k < -1:
            raise _wrong("top_k", self.top_k, "a positive integer, or 0 or -1 to keep all tokens")
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise _wrong("max_tokens", self.max_tokens, "an integer of at least 1")
        if self.seed is not None and (not _is_int(self.seed) or not -SEED_LIMIT <= self.seed < SEED_LIMIT):
            raise _wrong("seed", self.seed, "None or an integer that fits into 64 bits")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if isinstance(self.stop_token_ids, (str, bytes)) or not isinstance(
            self.stop_token_ids, (Sequence, set, frozenset)
        ):
            raise TypeError(f"stop_token_ids must be a list of token ids, not {self.stop_token_ids!r}")
        ids = tuple(self.stop_token_ids)
        for token_id in ids:
            if not _is_int(token_id) or token_id < 0:
                raise _wrong("stop_token_ids", token_id, "a list of token ids, integers of at least 0")
        object.__setattr__(self, "stop_token_ids", ids)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _wrong(name: str, value: object, expected: str) -> Exception:
    kind = ValueError if _is_int(value) else TypeError
    return kind(f"{name} must be {expected}, not {value!r}")


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The sampling parameters of S sequences as columns; a column that no sequence uses is None."""

    temperature: np.ndarray | None  # [S] float32; None: all greedy
    top_k: np.ndarray | None  # [S] int32; 0 keeps all
    top_p: np.ndarray | None  # [S] float32
    min_p: np.ndarray | None  # [S] float32
    seed: np.ndarray | None  # [S] int64; None: all greedy

    @property
    def has_filters(self) -> bool:
        """Whether any sequence uses top_k, top_p or min_p."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None


ALL_GREEDY = SamplingBatch(None, None, None, None, None)


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
