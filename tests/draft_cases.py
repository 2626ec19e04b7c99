"""Engines whose drafts are chosen by a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nanovllm.drafts import scheduler
from nanovllm.drafts.budget import Budget


def set_proposer(patch: pytest.MonkeyPatch, proposer: Any) -> None:
    """Engines that are made from now on draft what `proposer` guesses."""
    patch.setattr(scheduler, "make_proposer", lambda settings: proposer)


def compute_all_drafts(patch: pytest.MonkeyPatch, share: Callable[[], float] = lambda: 1.0) -> None:
    """Steps compute all drafts for which they have rows, whatever that costs. share: how many of the next
    sequence's, 0 to 1."""

    def choose(self: Budget, gains: Sequence[Sequence[float]]) -> list[int]:
        counts: list[int] = []
        for each in gains:
            counts.append(min(round(share() * len(each)), self.most_rows - len(gains) - sum(counts)))
        return counts

    patch.setattr(Budget, "choose", choose)
