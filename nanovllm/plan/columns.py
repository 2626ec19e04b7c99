"""SamplingTable: the sampling parameters of all running sequences; creates a step's sampling columns.

Checks nothing: `SamplingParams` did.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nanovllm.batch import (
    FILTERS,
    NO_LOGPROBS,
    PADDING,
    PENALTIES,
    SAMPLING_PARAMETERS,
    Column,
    Extras,
    FilterColumns,
    LogitBias,
    Penalties,
    SamplingColumns,
)
from nanovllm.params import SamplingParams
from nanovllm.plan.sequence import Sequence

_NO_TOKENS = np.empty(0, np.int64)
_NEVER = 2**62


# One row for each slot, so that one lookup finds all columns of a step.
_ROW = np.dtype(
    [
        ("seeds", np.int64),
        *((name, each.dtype) for name, each in SAMPLING_PARAMETERS.items()),
        *((name, each.dtype) for name, each in PENALTIES.items()),
        ("num_logprobs", np.int32),
        ("wakes", np.int64),  # where a rule that sleeps is asked again
        ("has_rules", np.bool_),
        ("has_extras", np.bool_),
    ],
    align=True,
)
_GREEDY: list[float] = [column.neutral for column in SAMPLING_PARAMETERS.values()]


class _Parameters(NamedTuple):
    """What the table holds of a SamplingParams."""

    values: tuple[float, ...]  # of a row, from the temperature to the number of logprobs
    bias: tuple[np.ndarray, np.ndarray] | None  # token ids and biases
    asked: list[int] | None  # the tokens of `logprob_token_ids`
    has_penalties: bool
    has_extras: bool

    @classmethod
    def of(cls, params: SamplingParams) -> _Parameters:
        own, asked, bias = _GREEDY, None, None
        if params.temperature:
            own = [_fitting(column, getattr(params, name)) for name, column in SAMPLING_PARAMETERS.items()]
        penalties = [getattr(params, name) for name in PENALTIES]
        num_logprobs = NO_LOGPROBS if params.logprobs is None else num_likeliest(params.logprobs)
        if params.logprob_token_ids:
            asked, num_logprobs = list(params.logprob_token_ids), 0
        if params.logit_bias:
            token_ids, values = params.logit_bias.keys(), params.logit_bias.values()
            bias = np.array([*token_ids], np.int64), np.array([*values], np.float32)
        has_penalties = penalties != [column.neutral for column in PENALTIES.values()]
        has_extras = has_penalties or bias is not None or params.num_logprobs is not None
        return cls((*own, *penalties, num_logprobs), bias, asked, has_penalties, has_extras)


class SamplingTable:
    """The sampling parameters of every slot, so that each column of a step is a NumPy lookup."""

    def __init__(self, num_slots: int) -> None:
        self._rows = np.zeros(num_slots, _ROW)
        self._last: tuple[SamplingParams, _Parameters] | None = None  # the next sequence mostly has the same
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by slot: token ids and biases
        self._asked: dict[int, list[int]] = {}  # by slot: the tokens of `logprob_token_ids`

    def set(self, seq: Sequence) -> None:
        """Store the parameters of a sequence in its slot; penalties count its tokens anew."""
        slot, params = seq.slot, seq.params
        if self._last is None or self._last[0] is not params:
            self._last = params, _Parameters.of(params)
        seq.is_asleep = seq.can_sleep
        own, has_rules, wakes = self._last[1], seq.has_rules, seq.num_tokens if seq.can_sleep else _NEVER
        self._rows[slot] = (seq.seed, *own.values, wakes, has_rules, has_rules or own.has_extras)
        seq.is_uncounted = own.has_penalties
        self._asked.pop(slot, None)
        if own.asked is not None:
            self._asked[slot] = own.asked
        self._bias.pop(slot, None)
        if own.bias is not None:
            self._bias[slot] = own.bias

    def take(self, slots: np.ndarray, positions: np.ndarray) -> SamplingColumns[np.ndarray]:
        """The columns of `slots` [S], which draw the tokens at `positions` [S]."""
        rows = self._rows.take(slots)
        filters = FilterColumns(*[rows[name] for name in FILTERS])
        return SamplingColumns(rows["temperature"], rows["seeds"], positions, filters)

    def take_extras(
        self, seqs: list[Sequence], slots: np.ndarray, draws: np.ndarray, positions: np.ndarray
    ) -> Extras | None:
        """Return the extras that the sequences of a step request, if any. slots, draws, positions: [S]."""
        rows = self._rows.take(slots)
        for row in np.flatnonzero(rows["wakes"] <= positions).tolist():
            self._rows["wakes"][slots[row]] = wakes = seqs[row].wakes()
            seqs[row].is_asleep = wakes > positions[row]
            rows["has_rules"][row] |= not seqs[row].is_asleep
            rows["has_extras"][row] |= not seqs[row].is_asleep
        if not rows["has_extras"].any():
            return None
        drawn = draws > 0
        return Extras(
            penalties=self._penalties(seqs, rows, drawn),
            bias=self._biases(slots[drawn], np.flatnonzero(drawn)),
            num_logprobs=int(rows["num_logprobs"][drawn].max(initial=NO_LOGPROBS)),
            asked_ids=self._asked_ids(slots.tolist()),
            has_rules=bool(rows["has_rules"][drawn].any()),
        )

    def _asked_ids(self, slots: list[int]) -> np.ndarray | None:
        """The tokens of `logprob_token_ids` of each sequence."""
        rows = [self._asked.get(slot, []) for slot in slots]
        width = max(map(len, rows))
        padded = [row + [PADDING] * (width - len(row)) for row in rows]
        return np.array(padded, np.int64) if width else None

    def _penalties(self, seqs: list[Sequence], rows: np.ndarray, drawn: np.ndarray) -> Penalties | None:
        # Sequences whose first token since their admission is drawn by this step.
        new = [seq for seq, draws in zip(seqs, drawn, strict=True) if draws and seq.is_uncounted]
        columns = {name: np.ascontiguousarray(rows[name]) for name in PENALTIES}
        if not (new or any((columns[name] != each.neutral).any() for name, each in PENALTIES.items())):
            return None
        for seq in new:
            seq.is_uncounted = False
        ids = [np.array(seq.token_ids, np.int64) for seq in new]
        return Penalties(
            columns["repetition_penalty"],
            columns["frequency_penalty"],
            columns["presence_penalty"],
            np.repeat(np.array([seq.slot for seq in new], np.int64), [len(each) for each in ids]),
            np.concatenate([_NO_TOKENS, *ids]),
            np.concatenate(
                [np.empty(0, bool), *(np.arange(len(seq.token_ids)) < seq.num_prompt_tokens for seq in new)]
            ),
        )

    def _biases(self, slots: np.ndarray, rows: np.ndarray) -> LogitBias | None:
        pairs = zip(rows, slots.tolist(), strict=True)
        found = [(row, *self._bias[slot]) for row, slot in pairs if slot in self._bias]
        if not found:
            return None
        lens = [len(ids) for _, ids, _ in found]
        return LogitBias(
            np.repeat(np.array([row for row, _, _ in found], np.int64), lens),
            np.concatenate([ids for _, ids, _ in found]),
            np.concatenate([values for _, _, values in found]),
        )


def _fitting(column: Column, value: float) -> float:
    """A parameter as its column holds it. Integers below the neutral value are other names of it; those above
    int32 act like its largest."""
    return min(max(value, column.neutral), 2**31 - 1) if column.dtype is np.int32 else value


def num_likeliest(asked: int) -> int:
    """The number of likeliest tokens that `logprobs` requests; for -1 the largest int32."""
    return asked if asked >= 0 else 2**31 - 1
