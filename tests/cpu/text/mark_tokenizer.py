"""A tokenizer of letters, and of some marks that are one token each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


class MarkTokenizer:
    """What `nanovllm.reasoning` needs of a tokenizer: token ids of letters are code points, those of marks
    begin behind them."""

    first = 0x110000

    def __init__(self, marks: Iterable[str]) -> None:
        self.added_tokens_decoder = dict(enumerate(marks, self.first))
        self._ids = {mark: token_id for token_id, mark in self.added_tokens_decoder.items()}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        pattern = "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text)
        return [
            each for part in parts for each in ([self._ids[part]] if part in self._ids else map(ord, part))
        ]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.added_tokens_decoder.get(each) or chr(each) for each in token_ids)
