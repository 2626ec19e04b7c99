"""Sequence: the mutable state of one completion, private to the engine process. Never pickled, never on a
device."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from nanovllm.batch import NO_SLOT
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """A prompt and what has been generated from it.

    Tokens come in three kinds: computed ones have K/V in the cache (or launched to be), known ones have a
    value on the host, and pending ones were sampled by a step that has been launched but not read back.
    """

    __slots__ = (
        "_prompt_bytes",
        "block_table",
        "chain",
        "finish_reason",
        "max_tokens_total",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "seed",
        "seq_id",
        "slot",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        stop_ids: frozenset[int] = frozenset(),
        prompt_bytes: bytes | None = None,
    ) -> None:
        """prompt_bytes: the prompt's ids as int32, where the caller has them."""
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)  # known tokens
        self.num_prompt_tokens = len(prompt_token_ids)
        self._prompt_bytes = _as_bytes(prompt_token_ids) if prompt_bytes is None else prompt_bytes
        self.params = params
        self.seed = seed
        self.stop_ids = stop_ids
        self.max_tokens_total = 0  # of prompt and output; the scheduler sets it
        self.status = SequenceStatus.WAITING
        self.slot = NO_SLOT
        self.num_pending_tokens = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # at first admission
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.num_hashed_blocks = 0  # leading blocks of the table that have gone through the prefix cache
        self.chain: int | None = 0  # the prefix cache's id of that beginning; None once it cannot be extended
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None

    def token_bytes(self, start: int, end: int) -> bytes:
        """The known tokens start .. end as int32."""
        if end <= self.num_prompt_tokens:
            return self._prompt_bytes[4 * start : 4 * end]
        return _as_bytes(self.token_ids[start:end])

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, {len(self.token_ids)}+{self.num_pending_tokens} "
            f"tokens, {self.num_computed_tokens} computed, {len(self.block_table)} blocks)"
        )


def _as_bytes(token_ids: list[int]) -> bytes:
    return np.array(token_ids, np.int32).tobytes()
