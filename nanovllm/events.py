"""TokenEvents: the new tokens and ended sequences of a step; passes from plan to the engine and to text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class TokenEvents:
    """The new tokens of one step and the sequences that ended with it, without surplus rows.

    Columns, because an object for each of hundreds of tokens would take longer than planning the step.
    """

    seq_ids: list[int]  # [N] the sequence of each token; a sequence's tokens are in order
    token_ids: list[int]  # [N] including tokens that ended their sequence
    finish_reasons: dict[int, str]  # by id of each sequence that ended
