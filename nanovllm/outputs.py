"""What a request returns. RequestOutput reads like vLLM's object and like nano-vLLM's dictionary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KEYS = ("text", "token_ids", "finish_reason")  # of a RequestOutput as a dictionary


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `finish_reason` is "stop", "length", "abort" or "error".

    text: what the decoding of prompt and output has behind that of the prompt, without special tokens, the
    stop string or token that ended the output (SamplingParams can ask for both), and a character that is cut
    at its end.
    token_ids: those that ended the output included.
    stop_reason: the stop string or token id that ended the output; None when it was the tokenizer's
    end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether the answer has ended; all that the engine returns have."""
        return True


@dataclass(frozen=True)
class RequestOutput(Mapping[str, Any]):
    """A finished request: `out["text"]`, `out["token_ids"]`, or `out.outputs[0].text` and its siblings.

    As a dictionary, which nano-vLLM returns, it has the keys "text", "token_ids" and "finish_reason".

    num_cached_tokens: prompt tokens whose K/V came from the prefix cache when the request was first admitted.
    error: why `finish_reason` is "error", else None.
    index: the place of its prompt among those of the call.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    error: str | None = None
    index: int = 0

    finished = True

    def __getitem__(self, key: str) -> Any:
        if key not in KEYS:
            raise KeyError(f"{key!r}; a RequestOutput has {', '.join(map(repr, KEYS))}")
        return getattr(self.outputs[0], key)

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)
