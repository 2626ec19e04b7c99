"""Request: one prompt as token ids, with its parameters. Created by `Processor`, immutable."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.structured import Constraint


@dataclass(frozen=True, slots=True)
class Request:
    """A request for `params.n` completions of a prompt. Every value is checked."""

    request_id: int
    prompt: str | None  # the prompt's string, if the caller passed one
    prompt_token_ids: list[int]
    prompt_bytes: bytes  # the same ids as int32
    params: SamplingParams
    stop_token_ids: frozenset[int]  # the caller's and, unless ignored, the model's end-of-sequence ids
    bad_words: tuple[tuple[int, ...], ...]  # the token ids of each
    constraint: Constraint | None  # on the output's text
    index: int = 0  # of the prompt, in its call
    first_scored: int | None = None  # the first prompt token to score; None: none
    pooling: str | None = None  # of the prompt's hidden states: "last" or "mean"; None: no pooling

    @property
    def num_needed(self) -> int:
        """The number of leading prompt tokens to compute: the score of the last token does not need its own
        hidden state."""
        scores_only = self.params.max_tokens == 0 and self.first_scored is not None
        return max(1, len(self.prompt_token_ids) - scores_only)

    @property
    def next_wanted(self) -> int | None:
        """The first prompt position whose hidden state is needed, to score the next token or for pooling."""
        if self.pooling is not None:
            return 0 if self.pooling == "mean" else len(self.prompt_token_ids) - 1
        return None if self.first_scored is None else self.first_scored - 1
