"""SamplingTable: the sampling parameters of all running sequences; creates a step's sampling columns.

Checks nothing: `SamplingParams` did.
"""

from __future__ import annotations

import numpy as np

from nanovllm.batch import (
    FILTERS,
    NO_EXTRAS,
    NO_LOGPROBS,
    PADDING,
    SAMPLING_PARAMETERS,
    Batch,
    Column,
    Extras,
    FilterColumns,
    LogitBias,
    Penalties,
    SamplingColumns,
    ScoredTokens,
    TokenLogprobs,
    WantedTokens,
)
from nanovllm.plan.sequence import Sequence

_NO_TOKENS = np.empty(0, np.int64)


# One row for each slot, so that one lookup finds all columns of a step.
_ROW = np.dtype(
    [("seeds", np.int64), *((name, each.dtype) for name, each in SAMPLING_PARAMETERS.items())], align=True
)
_GREEDY: list[float] = [column.neutral for column in SAMPLING_PARAMETERS.values()]


class SamplingTable:
    """The sampling parameters of every slot, so that each column of a step is a NumPy lookup."""

    def __init__(self, num_slots: int) -> None:
        self._rows = np.zeros(num_slots, _ROW)
        self.repetition = np.ones(num_slots, np.float32)
        self.frequency = np.zeros(num_slots, np.float32)
        self.presence = np.zeros(num_slots, np.float32)
        self.num_logprobs = np.full(num_slots, NO_LOGPROBS, np.int32)
        self.has_rules = np.zeros(num_slots, bool)
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by slot: token ids and biases
        self._asked: dict[int, list[int]] = {}  # by slot: the tokens of `logprob_token_ids`
        self._has_extras = np.zeros(num_slots, bool)

    def set(self, seq: Sequence) -> None:
        """Store the parameters of a sequence in its slot."""
        slot, params = seq.slot, seq.params
        own = _GREEDY
        if params.temperature:
            own = [_fitting(column, getattr(params, name)) for name, column in SAMPLING_PARAMETERS.items()]
        self._rows[slot] = (seq.seed, *own)
        self.repetition[slot] = params.repetition_penalty
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        self._asked.pop(slot, None)
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else num_likeliest(params.logprobs)
        if params.logprob_token_ids:
            self._asked[slot], self.num_logprobs[slot] = list(params.logprob_token_ids), 0
        self.has_rules[slot] = seq.has_rules
        self._bias.pop(slot, None)
        if params.logit_bias:
            token_ids, values = params.logit_bias.keys(), params.logit_bias.values()
            self._bias[slot] = np.array([*token_ids], np.int64), np.array([*values], np.float32)
        asks = seq.has_penalties or seq.has_rules or slot in self._bias
        self._has_extras[slot] = asks or params.num_logprobs is not None

    def take(self, slots: np.ndarray, positions: np.ndarray) -> SamplingColumns[np.ndarray]:
        """The columns of `slots` [S], which draw the tokens at `positions` [S]."""
        rows = self._rows.take(slots)
        filters = FilterColumns(*[rows[name] for name in FILTERS])
        return SamplingColumns(rows["temperature"], rows["seeds"], positions, filters)

    def take_extras(self, seqs: list[Sequence], slots: np.ndarray, draws: np.ndarray) -> Extras:
        """Return the extras that the sequences of a step request. slots, draws: [S]."""
        if not self._has_extras[slots].any():
            return NO_EXTRAS
        drawn = draws > 0
        return Extras(
            penalties=self._penalties(seqs, slots, drawn),
            bias=self._biases(slots[drawn], np.flatnonzero(drawn)),
            num_logprobs=int(self.num_logprobs[slots[drawn]].max(initial=NO_LOGPROBS)),
            asked_ids=self._asked_ids(slots.tolist()),
            has_rules=bool(self.has_rules[slots[drawn]].any()),
        )

    def _asked_ids(self, slots: list[int]) -> np.ndarray | None:
        """The tokens of `logprob_token_ids` of each sequence."""
        rows = [self._asked.get(slot, []) for slot in slots]
        width = max(map(len, rows))
        padded = [row + [PADDING] * (width - len(row)) for row in rows]
        return np.array(padded, np.int64) if width else None

    def _penalties(self, seqs: list[Sequence], slots: np.ndarray, drawn: np.ndarray) -> Penalties | None:
        # Sequences whose first token since their admission is drawn by this step.
        new = [seq for seq, draws in zip(seqs, drawn, strict=True) if draws and seq.is_uncounted]
        columns = self.repetition[slots], self.frequency[slots], self.presence[slots]
        if not (new or (columns[0] != 1).any() or columns[1].any() or columns[2].any()):
            return None
        for seq in new:
            seq.is_uncounted = False
        ids = [np.array(seq.token_ids, np.int64) for seq in new]
        return Penalties(
            *columns,
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


def take_prompt_tokens(
    seqs: list[Sequence], query_lens: list[int]
) -> tuple[ScoredTokens | None, WantedTokens | None]:
    """Return the prompt tokens of a prefill step to score, and those to pool.

    Each token is returned once, even if its sequence is preempted and computed again.
    """
    start, num_logprobs = 0, 0
    scored: list[tuple[int, int, int, int]] = []  # (first place, count, row, first position)
    pooled: list[tuple[int, int, int, int]] = []
    for row, (seq, query_len) in enumerate(zip(seqs, query_lens, strict=True)):
        end = seq.num_computed_tokens
        if seq.next_wanted is not None:
            is_scored = seq.pooling is None
            first = max(seq.next_wanted, end - query_len)
            last = len(seq.prompt_bytes) // 4 - is_scored
            count = min(end, last) - first
            if count > 0:
                (scored if is_scored else pooled).append((start + first - end + query_len, count, row, first))
            seq.next_wanted = None if end >= last else max(seq.next_wanted, end)
            if is_scored:
                num_logprobs = max(num_logprobs, num_likeliest(seq.params.prompt_logprobs or 0))
        start += query_len
    targets = [
        np.frombuffer(seqs[row].prompt_bytes, np.int32)[first + 1 : first + 1 + count]
        for _, count, row, first in scored
    ]
    scores = None
    if scored:
        scores = ScoredTokens(_wanted(scored), np.concatenate(targets).astype(np.int64), num_logprobs)
    return scores, _wanted(pooled) if pooled else None


def _fitting(column: Column, value: float) -> float:
    """A parameter as its column holds it. Integers below the neutral value are other names of it; those above
    int32 act like its largest."""
    return min(max(value, column.neutral), 2**31 - 1) if column.dtype is np.int32 else value


def keep_logprobs(batch: Batch, logprobs: TokenLogprobs, seqs: dict[int, Sequence]) -> None:
    """Give the sequences, by row, the logprobs of a step's drawn tokens. A sequence keeps no more than it
    asked for: a step's columns are as wide as its widest row."""
    asked: dict[tuple[int, bool], list[int]] = {}
    for row, seq in seqs.items():
        if batch.draws[row] and (number := seq.params.num_logprobs) is not None:
            asked.setdefault((num_likeliest(number), bool(seq.params.logprob_token_ids)), []).append(row)
    ids = batch.extras.asked_ids
    for (k, by_id), rows in asked.items():
        if by_id and ids is not None:
            columns = logprobs.take_asked(np.array(rows), ids, k)
        else:
            width = 0 if ids is None else ids.shape[1]
            columns = logprobs.take(np.array(rows), min(k, logprobs.values.shape[1] - 1 - width))
        for place, row in enumerate(rows):
            seqs[row].logprobs.append((columns, place))


def num_likeliest(asked: int) -> int:
    """The number of likeliest tokens that `logprobs` requests; for -1 the largest int32."""
    return asked if asked >= 0 else 2**31 - 1


def _wanted(ranges: list[tuple[int, int, int, int]]) -> WantedTokens:
    places = [np.arange(place, place + count, dtype=np.int32) for place, count, _, _ in ranges]
    rows = np.array([row for _, _, row, _ in ranges], np.int64)
    return WantedTokens(np.concatenate(places), np.repeat(rows, [count for _, count, _, _ in ranges]))
