"""Request: one prompt as token ids, and all that is asked of it. Made by `Processor`, never changed."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.structured import Constraint


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller wants: `params.n` completions of a prompt. Every value is checked."""

    request_id: int
    prompt: str | None  # the text, where the caller gave one
    prompt_token_ids: list[int]
    prompt_bytes: bytes  # the same ids as int32
    params: SamplingParams
    stop_token_ids: frozenset[int]  # all that end a completion: the caller's and, unless ignored, the model's
    bad_words: tuple[tuple[int, ...], ...]  # the token ids of each
    constraint: Constraint | None  # what the text must look like
    index: int = 0  # of the prompt, in its call
    first_scored: int | None = None  # the first prompt token that is to be scored; None: none
    pooling: str | None = None  # what the prompt's hidden states become: "last" one or "mean"; None: nothing

    @property
    def next_wanted(self) -> int | None:
        """The first prompt position whose hidden state is wanted, to score the next token or to be pooled."""
        if self.pooling is not None:
            return 0 if self.pooling == "mean" else len(self.prompt_token_ids) - 1
        return None if self.first_scored is None else self.first_scored - 1
