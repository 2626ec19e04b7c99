"""Batch, TokenMasks and StepOutput: the values that plan and compute exchange.

Immutable NumPy values. Positions and cache slots are derived from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

LAST_SAMPLED = -1  # as an input token: the last token sampled in this slot, which only the device knows
NOT_FINITE = -1  # as a sampled token: the row's logits have NaN or infinity
NOT_DRAWN = -2  # as a sampled token: the step drew fewer tokens for this row than `draws`
NO_SLOT = -1  # as a slot: the row's token is not kept, or the token's K/V not stored
PADDING = -1  # in a table: no block, or no row
NO_LOGPROBS = -1  # as a number of likeliest tokens: no logprobs, not even the token's own


class StepKind(Enum):
    """Which kernels a step runs; the planner decides. A prompt of one token is also PREFILL."""

    PREFILL = auto()  # each sequence has any number of known tokens
    DECODE = auto()  # each sequence has one token, its newest


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
        """Whether any sequence uses top-k, top-p or min-p."""
        return any(column is not None for column in (self.top_k, self.top_p, self.min_p))


ALL_GREEDY = SamplingBatch(None, None, None, None, None)


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


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """What the sequences of a step request besides `SamplingBatch`; None if no sequence requests it."""

    penalties: Penalties | None = None
    bias: LogitBias | None = None
    num_logprobs: int = NO_LOGPROBS  # the maximum over the rows, for drawn tokens
    has_rules: bool = False  # TokenMasks follow, and tokens are drawn after that
    scored: ScoredTokens | None = None
    pooled: WantedTokens | None = None  # tokens whose hidden states are summed for each sequence

    @property
    def needs_logits(self) -> bool:
        """Whether drawing needs more than logits and `SamplingBatch`."""
        asks = self.penalties is not None or self.bias is not None or self.has_rules
        return asks or self.num_logprobs != NO_LOGPROBS


NO_EXTRAS = Extras()
LogitsProcessor = Callable[..., Any]  # as in SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The allowed tokens of the M sequences of a step that have rules; made once previous tokens are known.

    processors: (row of the step, function, prompt ids, output ids) for each logits processor.
    """

    rows: np.ndarray  # [M] int64, of the step's sequences
    bits: np.ndarray  # [M, ceil(vocabulary / 32)] int32; bit i % 32 of word i // 32: token i is allowed
    processors: tuple[tuple[int, LogitsProcessor, list[int], list[int]], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of S sequences and T tokens: all that a rank needs. Read-only."""

    kind: StepKind
    seq_ids: tuple[int, ...]
    slots: np.ndarray  # [S] int32, a stable row for each running sequence
    token_ids: np.ndarray  # [T] int32, flat; LAST_SAMPLED where only the device knows the token
    query_lens: np.ndarray  # [S] int32, number of new tokens of each sequence; they sum to T
    context_lens: np.ndarray  # [S] int32, cached + new tokens
    block_tables: np.ndarray  # [S, W] int32, padded with PADDING
    draws: np.ndarray  # [S] int32, number of tokens to draw: 0 while the prompt is unfinished, else 1
    sampling: SamplingBatch
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """The logprobs of N tokens, each with the k likeliest tokens at its position, likeliest first."""

    values: np.ndarray  # [N, 1 + k] float32, the token's own first
    token_ids: np.ndarray  # [N, 1 + k] int64
    ranks: np.ndarray  # [N] int64, of the token itself, 1 for the likeliest

    def take(self, rows: np.ndarray, k: int) -> TokenLogprobs:
        """A copy of the logprobs of some of the tokens, with at most k likeliest tokens."""
        return TokenLogprobs(self.values[rows, : 1 + k], self.token_ids[rows, : 1 + k], self.ranks[rows])


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The tokens that a step of S sequences drew, and its other requested outputs."""

    # [S, maximum draws of a row] int64; may be NOT_FINITE or NOT_DRAWN. Undefined from column `draws` on.
    token_ids: np.ndarray
    logprobs: TokenLogprobs | None = None  # of the S drawn tokens
    scores: TokenLogprobs | None = None  # of `Extras.scored`
    pooled: np.ndarray | None = None  # [S, hidden_size] float32, the sums of `Extras.pooled`


_NOTHING = np.empty(0, np.int32)
EMPTY_BATCH = Batch(
    kind=StepKind.DECODE,
    seq_ids=(),
    slots=_NOTHING,
    token_ids=_NOTHING,
    query_lens=_NOTHING,
    context_lens=_NOTHING,
    block_tables=_NOTHING.reshape(0, 1),
    draws=_NOTHING,
    sampling=ALL_GREEDY,
)


def prefix_sum(lens: np.ndarray) -> np.ndarray:
    """Return [0, lens[0], lens[0] + lens[1], ...] as int32."""
    sums = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, dtype=np.int32, out=sums[1:])
    return sums
