"""Engines whose drafts are chosen by a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nanovllm.drafts import scheduler
from nanovllm.drafts.budget import Budget


def set_proposer(patch: pytest.MonkeyPatch, proposer: Any) -> None:
    """Engines that are made from now on draft what `proposer` guesses."""
    patch.setattr(scheduler, "make_proposer", lambda settings: proposer)


def compute_all_drafts(patch: pytest.MonkeyPatch, share: Callable[[], float] = lambda: 1.0) -> None:
    """Steps compute all drafts for which they have rows, whatever that costs. share: how many of the next
    sequence's, 0 to 1."""

    def choose(self: Budget, gains: np.ndarray) -> np.ndarray:
        counts: list[int] = []
        for each in (gains > 0).sum(1).tolist():
            counts.append(min(round(share() * each), self.most_drafts - sum(counts)))
        return np.array(counts)

    patch.setattr(Budget, "choose", choose)
    patch.setattr(Budget, "may_look", True)
