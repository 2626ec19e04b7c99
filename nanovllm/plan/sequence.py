"""Sequence: the mutable state of one completion, private to the engine process. Never pickled, never on a
device."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from nanovllm.batch import NO_SLOT, TokenLogprobs
from nanovllm.params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDING = auto()  # all its steps are planned
    FINISHED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A prompt and the tokens generated from it.

    Computed tokens have K/V in the cache, or a launched step computes it. Known tokens have a value on the
    host. Pending tokens are drawn by a step that was launched but not read yet.
    """

    seq_id: int
    token_ids: array[int]  # known tokens, int32; starts as a copy of the prompt that is to be computed
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    whole_prompt: array[int] | None = None  # with a last token that is only scored; None: as `token_ids`
    rules: list[Any] = field(default_factory=list)  # on the next token, of `extras/token_rules.py`
    next_wanted: int | None = None  # the next prompt position whose hidden state is needed, if any
    pooling: str | None = None  # of these hidden states, as in `Request`; None: they score tokens
    num_prompt_tokens: int = field(init=False)
    max_tokens_total: int = 0  # of prompt and output; the scheduler sets it
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = NO_SLOT
    num_pending_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # at first admission
    num_preemptions: int = 0
    tables: list[list[int]] = field(default_factory=list)  # the blocks of each `KVGroup`; empty: it owns none
    capacity: int = 0  # tokens that its blocks have room for
    num_hashed_blocks: int = 0  # leading blocks that are registered in the prefix cache
    chain: int | None = 0  # the chain id of these blocks; None if a hash collision prevents more
    can_sleep: bool = False  # whether its only rule says from which token on it acts
    is_asleep: bool = False  # whether no rule acts on the token that the planned step draws
    is_uncounted: bool = False  # penalties have not counted its tokens since its admission
    logprobs: list[tuple[TokenLogprobs, int]] = field(default_factory=list)  # one row for each output token
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # in parts, in order
    pooled: np.ndarray | None = None  # [hidden_size] float32, the sum so far
    routed: list[tuple[int, np.ndarray]] = field(default_factory=list)  # experts from a position on, in parts
    finish_reason: str | None = None
    stop_reason: int | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids = array("i", self.token_ids)
        self.can_sleep = self.is_asleep = len(self.rules) == 1 and hasattr(self.rules[0], "wakes")

    def token_bytes(self, start: int, end: int) -> bytes:
        """The known tokens [start, end) as int32."""
        return self.token_ids[start:end].tobytes()

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def prompt_ids(self) -> array[int]:
        """The whole prompt."""
        return self.token_ids[: self.num_prompt_tokens] if self.whole_prompt is None else self.whole_prompt

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    def routed_experts(self, num_tokens: int) -> np.ndarray | None:
        """The experts [n, layers, top_k] of its first tokens, at most `num_tokens`; None if unknown."""
        if not self.routed:
            return None
        end = max(start + len(part) for start, part in self.routed)
        whole = np.zeros((end, *self.routed[0][1].shape[1:]), np.int16)
        for start, part in self.routed:  # after a preemption tokens are computed again
            whole[start : start + len(part)] = part
        return whole[:num_tokens]

    @property
    def has_rules(self) -> bool:
        """Whether the next token depends on previous tokens, by rules or by logits processors."""
        return bool((self.rules and not self.is_asleep) or self.params.logits_processors)

    def wakes(self) -> int:
        """The place of the first token that its only rule may restrict, as far as known tokens tell."""
        place: int = self.rules[0].wakes(self.token_ids, self.num_prompt_tokens)
        return place

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, {len(self.token_ids)}+{self.num_pending_tokens} "
            f"tokens, {self.num_computed_tokens} computed, {sum(map(len, self.tables[:1]))} blocks)"
        )
