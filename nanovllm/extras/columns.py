"""BatchExtras, TokenMasks and ExtraOutput: what rows of a step ask for besides tokens, and what they get.

Values that pass between the plan and the device, beside those of `batch.py`. Immutable; need no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np

from nanovllm.batch import FILTERS, A, B, Extras, SamplingColumns

# Poolings of a `Request` that keep each token's row; those that apply the model's head to rows.
EACH_TOKEN, WITH_HEAD = ("token_embed", "token_classify"), ("classify", "token_classify")
NO_LOGPROBS = -1  # as a number of likeliest tokens: no logprobs, not even the token's own


@dataclass(frozen=True, slots=True, eq=False)
class CountedTokens:
    """Output tokens that a step counts before it draws: slot `slots[i]` gets the counts of `sources[i]`, then
    counts `token_ids[i]`. All [N] int64; the slots are all different, and none is the source of another."""

    sources: np.ndarray
    slots: np.ndarray
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """The repetition penalties of S sequences, and the tokens with which counting restarts.

    Every rank counts the tokens of each slot with penalties: first the history, then the drawn tokens.
    """

    repetition: np.ndarray  # [S] float32; 1: none
    frequency: np.ndarray  # [S] float32; 0: none
    presence: np.ndarray  # [S] float32; 0: none
    history_slots: np.ndarray  # [N] int64, the slot of each token; counts of these slots restart from zero
    history_ids: np.ndarray  # [N] int64
    history_is_prompt: np.ndarray  # [N] bool
    counted: tuple[CountedTokens, ...] = ()  # after the history, in this order


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """The biases of logits, N values."""

    rows: np.ndarray  # [N] int64, of the step's sequences
    token_ids: np.ndarray  # [N] int64
    values: np.ndarray  # [N] float32


@dataclass(frozen=True, slots=True, eq=False)
class WantedTokens:
    """Tokens of a prefill step whose hidden states are needed, besides the last of each sequence."""

    places: np.ndarray  # [N] int32, ascending indices into the step's flat tokens
    rows: np.ndarray  # [N] int64, of the step's sequences


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """Prompt tokens whose logprobs are requested: the logits of the previous token score each of them."""

    wanted: WantedTokens  # the previous tokens
    token_ids: np.ndarray  # [N] int64
    num_logprobs: int  # likeliest tokens to return for each


@dataclass(frozen=True, eq=False)
class BatchExtras(Extras):
    """What the sequences of a step ask for."""

    needs_logits: bool = False
    has_rules: bool = False
    places: tuple[np.ndarray, ...] = ()
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    num_logprobs: int = NO_LOGPROBS  # the maximum over the rows, for drawn tokens
    asked_ids: np.ndarray | None = None  # [S, M] int64, tokens that a row asks the logprobs of, then PADDING
    scored: ScoredTokens | None = None
    pooled: WantedTokens | None = None  # tokens whose hidden states are needed, and not for scores
    pooling: str | None = None  # of these, as in `Request`

    def __bool__(self) -> bool:
        return True


LogitsProcessor = Callable[..., Any]  # as in SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The allowed tokens of the M sequences of a step that have rules; made once previous tokens are known.
    Sequences with equal rules and outputs share a mask.

    processors: (row of the step, function, prompt ids, output ids) for each logits processor.
    """

    rows: np.ndarray  # [M] int64, of the step's sequences
    mask_of: np.ndarray  # [M] int64, the row of `bits` of each
    bits: np.ndarray  # [U, ceil(vocabulary / 32)] int32; bit i % 32 of word i // 32: token i is allowed
    processors: tuple[tuple[int, LogitsProcessor, list[int], list[int]], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns(Generic[A]):
    """The logprobs of N tokens, each with the k likeliest tokens at its position, likeliest first; in a step,
    with those of `BatchExtras.asked_ids` after them."""

    values: A  # [N, 1 + k] float32, the token's own first
    token_ids: A  # [N, 1 + k] int64
    ranks: A  # [N] int64, of the token itself, 1 for the likeliest
    are_likeliest: bool = field(default=True, kw_only=True)  # False: k tokens that were asked for

    @property
    def columns(self) -> tuple[A, A, A]:
        return self.values, self.token_ids, self.ranks

    def take(self: TokenLogprobs, rows: np.ndarray, k: int) -> TokenLogprobs:
        """A copy of the logprobs of some of the tokens, with at most k likeliest tokens."""
        return LogprobColumns(self.values[rows, : 1 + k], self.token_ids[rows, : 1 + k], self.ranks[rows])

    def take_asked(self: TokenLogprobs, rows: np.ndarray, asked: np.ndarray, k: int) -> TokenLogprobs:
        """A copy of those of some of the tokens, with the first k tokens of `BatchExtras.asked_ids`."""
        first = self.values.shape[1] - asked.shape[1]
        places = np.array([0, *range(first, first + k)])
        own = np.ix_(rows, places)
        return LogprobColumns(self.values[own], self.token_ids[own], self.ranks[rows], are_likeliest=False)


TokenLogprobs = LogprobColumns[np.ndarray]  # on the host


@dataclass(frozen=True, slots=True, eq=False)
class ExtraOutput(Generic[A]):
    """Logprobs that a step of S sequences gives besides tokens."""

    logprobs: LogprobColumns[A] | None = None  # of the S drawn tokens
    scores: LogprobColumns[A] | None = None  # of `BatchExtras.scored`

    def map(self, convert: Callable[[A], B]) -> ExtraOutput[B]:
        """The same with `convert` applied to each column."""
        logprobs, scores = (
            None if each is None else LogprobColumns(*map(convert, each.columns))
            for each in (self.logprobs, self.scores)
        )
        return ExtraOutput(logprobs, scores)


def has_filters(sampling: SamplingColumns[np.ndarray]) -> bool:
    """Whether any row uses a filter."""
    return any((getattr(sampling, name) != column.neutral).any() for name, column in FILTERS.items())
