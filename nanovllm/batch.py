"""Batch, TokenMasks and StepOutput: all that crosses between the plan tower and the compute tower, both ways.

Plain NumPy values that nobody changes once they are made; positions and slots are derived from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

LAST_SAMPLED = -1  # as an input token: the one last sampled in this sequence's slot, known to the device only
NOT_FINITE = -1  # as a sampled token: the row's logits held NaN or infinity
NO_SLOT = -1  # as a slot: nothing is kept of this row, or stored of this token
PADDING = -1  # in a table: no block, or no row
NO_LOGPROBS = -1  # as a number of likeliest tokens: not even the token's own logprob is asked for


class StepKind(Enum):
    """Which kernels a step runs; the planner says it. A prompt of one token is PREFILL all the same."""

    PREFILL = auto()  # sequences bring any number of known tokens
    DECODE = auto()  # each sequence brings its newest token alone


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
        """Whether a sequence draws from some of the tokens only."""
        return any(column is not None for column in (self.top_k, self.top_p, self.min_p))


ALL_GREEDY = SamplingBatch(None, None, None, None, None)


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """How S sequences are kept from repeating themselves, and tokens from which counting begins anew.

    Every rank counts the tokens of each slot that has penalties: `histories`, then what is drawn.
    """

    repetition: np.ndarray  # [S] float32; 1: none
    frequency: np.ndarray  # [S] float32; 0: none
    presence: np.ndarray  # [S] float32; 0: none
    history_slots: np.ndarray  # [N] int64, whose token each is; a slot that is named here forgets all others
    history_ids: np.ndarray  # [N] int64
    history_is_prompt: np.ndarray  # [N] bool


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """What is added to logits, a row for each number."""

    rows: np.ndarray  # [N] int64, of the step's sequences
    token_ids: np.ndarray  # [N] int64
    values: np.ndarray  # [N] float32


@dataclass(frozen=True, slots=True, eq=False)
class WantedTokens:
    """Tokens of a prefill step whose hidden states are wanted besides the last ones."""

    places: np.ndarray  # [N] int32, in the step's flat tokens, rising
    rows: np.ndarray  # [N] int64, of the step's sequences


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """Prompt tokens whose logprobs are asked for: each is scored by the logits of the token before it."""

    wanted: WantedTokens  # the tokens before
    token_ids: np.ndarray  # [N] int64
    num_logprobs: int  # of the likeliest tokens beside each


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """What the sequences of a step ask for besides `SamplingBatch`; what nobody asks for is None."""

    penalties: Penalties | None = None
    bias: LogitBias | None = None
    num_logprobs: int = NO_LOGPROBS  # the most that a row asks for of its drawn token
    has_rules: bool = False  # TokenMasks follow, and no token is drawn before
    scored: ScoredTokens | None = None
    pooled: WantedTokens | None = None  # whose hidden states are summed up for each sequence

    @property
    def needs_logits(self) -> bool:
        """Whether drawing takes more than logits and `SamplingBatch`."""
        asks = self.penalties is not None or self.bias is not None or self.has_rules
        return asks or self.num_logprobs != NO_LOGPROBS


NO_EXTRAS = Extras()
LogitsProcessor = Callable[..., Any]  # as of SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Which tokens may follow in the M sequences of a step that have rules; known once all before them are.

    processors: (row of the step, function, prompt ids, output ids) of each that has functions of its own.
    """

    rows: np.ndarray  # [M] int64, of the step's sequences
    bits: np.ndarray  # [M, ceil(vocabulary / 32)] int32; bit i % 32 of word i // 32 is set where token i may
    processors: tuple[tuple[int, LogitsProcessor, list[int], list[int]], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of S sequences and T tokens: all that a rank needs, nothing that it may change."""

    kind: StepKind
    seq_ids: tuple[int, ...]
    slots: np.ndarray  # [S] int32, a stable row for each running sequence
    token_ids: np.ndarray  # [T] int32, flat; LAST_SAMPLED where only the device knows
    query_lens: np.ndarray  # [S] int32, how many of the T tokens each sequence brings
    context_lens: np.ndarray  # [S] int32, cached + new tokens
    block_tables: np.ndarray  # [S, W] int32, filled up with PADDING
    draws: np.ndarray  # [S] int32, how many tokens to draw: 0 while the prompt is unfinished, else 1
    sampling: SamplingBatch
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """The logprobs of N tokens, and of the k likeliest ones beside each, likeliest first."""

    values: np.ndarray  # [N, 1 + k] float32, the token's own first
    token_ids: np.ndarray  # [N, 1 + k] int64
    ranks: np.ndarray  # [N] int64, of the token itself, 1 for the likeliest

    def take(self, rows: np.ndarray) -> TokenLogprobs:
        """Those of some tokens."""
        return TokenLogprobs(self.values[rows], self.token_ids[rows], self.ranks[rows])


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What one step of S sequences drew, and what else was asked of it."""

    token_ids: np.ndarray  # [S, most draws of a row] int64; NOT_FINITE for a row that failed
    counts: np.ndarray  # [S] int32, how many of a row's tokens hold, the first ones
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
