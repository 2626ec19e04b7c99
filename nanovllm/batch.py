"""Batch and StepOutput: all that crosses between the plan tower and the compute tower, both ways.

Plain NumPy values that nobody changes once they are made; positions and slots are derived from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

LAST_SAMPLED = -1  # as an input token: the one last sampled in this sequence's slot, known to the device only
NOT_FINITE = -1  # as a sampled token: the row's logits held NaN or infinity
NO_SLOT = -1  # as a slot: nothing is kept of this row, or stored of this token
PADDING = -1  # in a table: no block, or no row


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


ALL_GREEDY = SamplingBatch(None, None, None, None, None)


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


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What one step of S sequences drew."""

    token_ids: np.ndarray  # [S, most draws of a row] int64; NOT_FINITE for a row that failed
    counts: np.ndarray  # [S] int32, how many of a row's tokens hold, the first ones


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
