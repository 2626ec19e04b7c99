"""What `score`, `embed` and `beam_search` return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nanovllm.answers import Logprob

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The log-probability of a continuation after its prompt.

    token_ids, logprobs: of the continuation's tokens, each given all tokens before it.
    is_greedy: whether each token is the likeliest one, so that greedy sampling gives this continuation.
    error: why there is no score, else None; the logprobs are then NaN.
    """

    token_ids: list[int]
    logprobs: list[float]
    is_greedy: bool
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def logprob(self) -> float:
        """The natural logarithm of the continuation's probability."""
        return math.fsum(self.logprobs)


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt's hidden state after the final norm."""

    embedding: list[float]  # [hidden_size]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass
class PoolingRequestOutput(Generic[T]):
    """What becomes of one prompt; `outputs` has no values if `error` says why."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    prompt: str | None = None
    error: str | None = None
    index: int = 0


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """What `embed` returns for a prompt; `outputs` is empty if `error` says why."""


@dataclass(slots=True)
class BeamSearchSequence:
    """A prompt with one of its likeliest continuations.

    tokens, text: of prompt and continuation. logprobs: of each new token and of the candidates it was chosen
    from. score: sequences are sorted by it.
    """

    tokens: list[int]
    logprobs: Sequence[Mapping[int, Logprob]]
    text: str | None
    cum_logprob: float
    finish_reason: str
    stop_reason: int | None = None
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence]
