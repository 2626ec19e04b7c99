"""LogprobDicts: the logprobs of tokens as vLLM's dictionaries, each created on access; outputs list them.

Until then logprobs stay arrays: creating all objects would take longer than the run. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from nanovllm.answers import Logprob
from nanovllm.extras.columns import LogprobColumns, TokenLogprobs
from nanovllm.text.characters import LONGEST_CUT

_PromptLogprob = dict[int, Logprob] | None


class LogprobDicts(Sequence[Any]):
    """For each token a dictionary {token id: `Logprob`}: the token itself first, then the likeliest tokens.
    Tokens that were asked for come instead of these, without ranks.

    The first `num_unknown` entries are None. Compares equal to the list of dictionaries, and is pickled as
    that list.
    decode: returns the text of a token after other tokens; None: tokens have no text. before: the last tokens
    before the first one.
    """

    def __init__(
        self,
        columns: TokenLogprobs,
        decode: Callable[[int, list[int]], str | None] | None,
        num_unknown: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        self.columns = columns
        self._decode = decode
        self.num_unknown = num_unknown
        self.before = before[-LONGEST_CUT:]

    def __len__(self) -> int:
        return self.num_unknown + len(self.columns.values)

    @overload
    def __getitem__(self, index: int) -> _PromptLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> list[_PromptLogprob]: ...
    def __getitem__(self, index: int | slice) -> _PromptLogprob | list[_PromptLogprob]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index] - self.num_unknown
        return None if place < 0 else self._dict(place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, LogprobDicts)) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return list, (list(self),)

    def _dict(self, place: int) -> dict[int, Logprob]:
        values = self.columns.values[place].tolist()
        ids = self.columns.token_ids[place].tolist()
        others = range(1, len(ids)) if self.columns.are_likeliest else [None] * (len(ids) - 1)
        ranks = [int(self.columns.ranks[place]), *others]
        before = [*self.before, *self.columns.token_ids[max(0, place - LONGEST_CUT) : place, 0].tolist()]
        dictionary: dict[int, Logprob] = {}
        for token_id, value, rank in zip(ids, values, ranks, strict=True):
            text = None if self._decode is None else self._decode(token_id, before)
            dictionary.setdefault(token_id, Logprob(value, rank, text))
        return dictionary


def join_rows(rows: Sequence[tuple[TokenLogprobs, int]], width: int) -> TokenLogprobs:
    """Join one row from each of several steps, `width` columns wide."""
    return LogprobColumns(
        np.array([columns.values[row, :width] for columns, row in rows], np.float32).reshape(-1, width),
        np.array([columns.token_ids[row, :width] for columns, row in rows], np.int64).reshape(-1, width),
        np.array([columns.ranks[row] for columns, row in rows], np.int64),
        are_likeliest=all(columns.are_likeliest for columns, _ in rows),
    )


def join_parts(parts: Sequence[TokenLogprobs], width: int) -> TokenLogprobs:
    """Join several parts in order, `width` columns wide."""
    return LogprobColumns(
        np.concatenate([np.empty((0, width), np.float32), *(part.values[:, :width] for part in parts)]),
        np.concatenate([np.empty((0, width), np.int64), *(part.token_ids[:, :width] for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.ranks for part in parts)]),
    )
