"""The types of prompts that users pass, with vLLM's names; `text/prompts.py` checks them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypedDict

PromptLike: TypeAlias = "str | Iterable[int] | Mapping[str, Any]"


class TextPrompt(TypedDict):
    """A text prompt: `TextPrompt(prompt="Hello")`, a dictionary."""

    prompt: str


class _WithText(TypedDict, total=False):
    prompt: str  # the text that the ids came from; shown in the output


class TokensPrompt(_WithText):
    """A prompt of token ids: `TokensPrompt(prompt_token_ids=[5, 6])`, a dictionary."""

    prompt_token_ids: list[int]
