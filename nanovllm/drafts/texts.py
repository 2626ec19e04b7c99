"""Texts: what is known of the texts of running sequences, for their drafts: how often drafts were right, and
which are looked at. Plans nothing. Needs no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from nanovllm.drafts.places import Lines
from nanovllm.drafts.proposer import Proposer, nothing
from nanovllm.plan.sequence import Sequence

FIRST_TRUST = 0.6  # how often a draft is right before anything is known
_WEIGHT = 0.1  # of the newest draft in a mean
_LONGEST_PAUSE = 7  # steps after which a text with no good draft is looked at again
_GOOD = 0.2  # the chance from which a first draft is good


class Guessed(NamedTuple):
    """The drafts of some texts and the chance of each that it and all before it are right."""

    token_ids: np.ndarray  # [M, K] int32
    gains: np.ndarray  # [M, K] float64, never rising; 0: there is no draft


class Texts:
    """Those of sequences that have decoded. Each has a row in tables."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.most = proposer.most
        self._rows: dict[int, int] = {}  # by id of each sequence
        self._free: list[int] = []
        self._all_trust = FIRST_TRUST  # of all texts: where a new one starts
        self._trust = np.empty(0)
        self._pause = np.empty(0, np.int64)  # steps between two looks at a text
        self._paused = np.empty(0, np.int64)  # those of them that are left
        # The last guesses, whether or not they were computed, and how many of each.
        self._guesses, self._num_guesses = np.empty((0, self.most), np.int32), np.empty(0, np.int64)
        self.has_guesses = False  # of which nothing was learned yet

    def draft(self, seqs: Many[Sequence], most: np.ndarray) -> Guessed:
        """At most `most` [M] tokens that may follow each sequence; nothing while a text is not looked at."""
        rows = np.array([self._row(seq.seq_id) for seq in seqs], np.int64)
        token_ids, shares = nothing(len(seqs), self.most)
        found = Guessed(token_ids, shares)
        is_due = self._paused[rows] == 0
        self._paused[rows[~is_due]] -= 1
        looked = np.flatnonzero(is_due & (most > 0))
        if not len(looked):
            return found
        drafts, own = self._proposer.draft(Lines.of([_parts(seqs[i]) for i in looked.tolist()])), rows[looked]
        shares = np.where(np.arange(self.most) < most[looked, None], drafts.shares, 0.0)
        trust = np.repeat(self._trust[own, None], self.most, 1).cumprod(1)
        found.token_ids[looked], found.gains[looked] = drafts.token_ids, shares * trust
        self._guesses[own], self._num_guesses[own] = drafts.token_ids, (shares > 0).sum(1)
        self.has_guesses = True
        pause = np.minimum(2 * self._pause[own] + 1, _LONGEST_PAUSE)
        self._pause[own] = self._paused[own] = np.where(found.gains[looked, 0] >= _GOOD, 0, pause)
        return found

    def _row(self, seq_id: int) -> int:
        row = self._rows.get(seq_id)
        if row is None:
            if not self._free:
                self._enlarge()
            row = self._rows[seq_id] = self._free.pop()
            self._trust[row] = self._all_trust
            self._pause[row] = self._paused[row] = self._num_guesses[row] = 0
        return row

    def _enlarge(self) -> None:
        """Twice as many rows."""
        known, more = len(self._trust), max(16, len(self._trust))
        self._free = [*range(known, known + more)]
        self._trust, self._pause, self._paused, self._guesses, self._num_guesses = (
            np.concatenate([each, np.zeros((more, *each.shape[1:]), each.dtype)])
            for each in (self._trust, self._pause, self._paused, self._guesses, self._num_guesses)
        )

    def learn(self, seq_ids: Many[int], drawn: np.ndarray, numbers: np.ndarray) -> None:
        """A step drew the first `numbers` [M] of these tokens [M, N] for each sequence."""
        rows = np.array([self._rows.get(seq_id, -1) for seq_id in seq_ids], np.int64)
        known = rows >= 0  # others have only been planned ahead
        if not known.any():
            return
        self.has_guesses = False
        rows, drawn = rows[known], drawn[known]
        compared = np.minimum(self._num_guesses[rows], numbers[known])
        self._num_guesses[rows] = 0
        width = min(self.most, drawn.shape[1])
        equal = self._guesses[rows, :width] == drawn[:, :width]
        equal &= np.arange(width) < compared[:, None]
        right = np.logical_and.accumulate(equal, axis=1).sum(1)
        wrong = right < compared
        self._trust[rows] = learned(self._trust[rows], right, wrong)
        if total := int(compared.sum()):
            share = right.sum() / (right.sum() + wrong.sum())
            keep = (1 - _WEIGHT) ** min(total, 1 / _WEIGHT)
            self._all_trust = self._all_trust * keep + float(share) * (1 - keep)

    def ended(self, seq: Sequence, reason: str) -> None:
        """A sequence ended; later drafts may follow its output."""
        row = self._rows.pop(seq.seq_id, None)
        if row is not None:
            self._free.append(row)
            if reason != "error":
                self._proposer.ended(seq.output_ids)


def _parts(seq: Sequence) -> tuple[array[int], array[int]]:
    prompt, length = seq.prompt_ids, seq.num_prompt_tokens
    return prompt if length == len(prompt) else prompt[:length], seq.output_ids


def learned(trust: np.ndarray, right: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """A mean that forgets: of each text after so many drafts that were right, and one that was not."""
    keep = (1 - _WEIGHT) ** right
    return np.asarray((trust * keep + 1 - keep) * np.where(wrong, 1 - _WEIGHT, 1.0))
