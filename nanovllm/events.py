"""TokenEvents: what a step's tokens mean for the sequences; it passes from plan to the engine and to text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class TokenEvents:
    """The new tokens of one step and the sequences that ended with it. Surplus rows are not in here.

    In columns, because a step has hundreds of tokens and an object for each would cost more than planning it.
    """

    seq_ids: list[int]  # [N] whose token each is; a sequence's tokens are in order
    token_ids: list[int]  # [N] a token that ended its sequence is one of them
    finish_reasons: dict[int, str]  # by the id of each sequence that ended
