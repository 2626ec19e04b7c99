"""What a request returns. RequestOutput reads like vLLM's object and like nano-vLLM's dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `finish_reason` is "stop", "length", "abort" or "error".

    text: what the decoding of prompt and output has behind that of the prompt, without special tokens, the
    token that ended the output, and a character that is cut at its end.
    stop_reason: the token id that ended the output; None when it was the tokenizer's end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request: `out["text"]`, `out["token_ids"]`, or `out.outputs[0].text` and its siblings.

    num_cached_tokens: prompt tokens whose K/V came from the prefix cache when the request was first admitted.
    error: why `finish_reason` is "error", else None.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    error: str | None = None

    finished = True

    def __getitem__(self, key: str) -> Any:
        if key in ("text", "token_ids", "finish_reason"):
            return getattr(self.outputs[0], key)
        raise KeyError(f"{key!r}; a RequestOutput has 'text', 'token_ids' and 'finish_reason'")

    def keys(self) -> Iterator[str]:
        """The keys of the dictionary view, so that `dict(output)` works."""
        return iter(("text", "token_ids", "finish_reason"))
