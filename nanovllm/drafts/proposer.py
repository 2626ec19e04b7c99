"""Proposer: guesses the next tokens of texts from what a text, or an earlier answer, went on with before.

A guess never changes an answer: it is only computed ahead. All texts of a step are looked up together. Needs
no torch.
"""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple, Protocol

import numpy as np

from nanovllm.drafts.places import END, Answers, Lines, Places, own_places
from nanovllm.drafts.settings import DraftSettings

_PLACES_OF_NGRAMS = 8  # that are compared
_PLACES_OF_SUFFIXES = 16
_SUFFIX = 2  # tokens of the shortest suffix that is looked up


class Drafts(NamedTuple):
    """Guessed tokens of M texts, K at most, and of each the share of the places found that go on so, with
    those before it: never rising, and 0 where nothing is guessed."""

    token_ids: np.ndarray  # [M, K] int32
    shares: np.ndarray  # [M, K] float64


class Proposer(Protocol):
    """Guesses tokens by one method."""

    most: int  # tokens of a text at once

    def draft(self, lines: Lines) -> Drafts:
        """At most `most` tokens that may follow each text."""

    def ended(self, output: array[int]) -> None:
        """A sequence ended with this output."""


class NGrams:
    """As prompt lookup: the longest end of the text, of `prompt_lookup_min` to `prompt_lookup_max` tokens,
    that occurred before; the tokens that followed there. Of equally long ones the latest."""

    def __init__(self, settings: DraftSettings) -> None:
        self.most = settings.num_speculative_tokens
        self._width, self._longest = settings.prompt_lookup_min, settings.prompt_lookup_max

    def draft(self, lines: Lines) -> Drafts:
        places = own_places(lines, self._width, self._longest, _PLACES_OF_NGRAMS)
        if not places.lengths.any():
            return nothing(len(places.at), self.most)
        best = places.lengths.argmax(1)[:, None]  # of equal ones the first
        at, lengths = (np.take_along_axis(each, best, 1) for each in (places.at, places.lengths))
        token_ids = places._replace(at=at, lengths=lengths).following(self.most)[:, 0]
        return Drafts(token_ids, np.repeat(lengths > 0, self.most, 1).astype(float))

    def ended(self, output: array[int]) -> None:
        """Other texts are not looked up."""


class Suffixes:
    """As suffix decoding (Oliaro et al. 2024): the places, in the text and in earlier answers, that match the
    longest end of the text; at each step the token with which most of these go on.

    Without a tree: of each place the match is counted back, and the places vote.
    """

    def __init__(self, settings: DraftSettings) -> None:
        self._factor, self._least = (
            settings.suffix_decoding_max_spec_factor,
            settings.suffix_decoding_min_token_prob,
        )
        self._depth = settings.suffix_decoding_max_tree_depth
        # Tokens that match, at most: a longer match leaves less of the depth for drafts.
        self._longest = max(_SUFFIX, math.ceil(self._depth / (1 + self._factor)))
        drafts = self._allowed(np.arange(1, self._longest + 1)).max(initial=1)
        self.most = min(int(drafts), settings.num_speculative_tokens)
        self._answers = Answers(settings.suffix_decoding_max_cached_requests)

    def _allowed(self, lengths: np.ndarray) -> np.ndarray:
        """Drafts after a match of these lengths."""
        return np.minimum((self._factor * lengths).astype(np.int64), self._depth - lengths)

    def draft(self, lines: Lines) -> Drafts:
        own = self._voted(own_places(lines, _SUFFIX, self._longest, _PLACES_OF_SUFFIXES))
        others = self._voted(self._answers.places(lines, self._longest, _PLACES_OF_SUFFIXES))
        is_own = (own.shares.sum(1) >= others.shares.sum(1))[:, None]
        token_ids = np.where(is_own, own.token_ids, others.token_ids)
        return Drafts(token_ids, np.where(is_own, own.shares, others.shares))

    def ended(self, output: array[int]) -> None:
        self._answers.add(output)

    def _voted(self, places: Places) -> Drafts:
        """What the places of each text's longest match agree on."""
        drafts = nothing(len(places.at), self.most)
        longest = places.lengths.max(1, initial=0)
        most = np.where(longest > 0, np.minimum(self._allowed(longest), self.most), 0)
        if not most.any():
            return drafts
        alive = (places.lengths == longest[:, None]) & (most > 0)[:, None]
        total = np.maximum(alive.sum(1), 1)
        for depth, tokens in enumerate(np.moveaxis(places.following(int(most.max())), 2, 0)):
            alive &= (tokens != END) & (depth < most)[:, None]
            votes = ((tokens[:, :, None] == tokens[:, None, :]) & alive[:, None, :]).sum(2) * alive
            best = votes.argmax(1)[:, None]  # of equal ones that of the latest place
            token = np.take_along_axis(tokens, best, 1)
            share = np.take_along_axis(votes, best, 1)[:, 0] / total
            share[share < self._least] = 0.0
            if not share.any():
                break
            drafts.token_ids[:, depth], drafts.shares[:, depth] = token[:, 0], share
            alive &= (tokens == token) & (share > 0)[:, None]
        return drafts


def nothing(texts: int, most: int) -> Drafts:
    return Drafts(np.zeros((texts, most), np.int32), np.zeros((texts, most)))


_METHODS: dict[str, type[NGrams] | type[Suffixes]] = {"ngram": NGrams, "suffix": Suffixes}


def make_proposer(settings: DraftSettings) -> Proposer:
    return _METHODS[settings.method](settings)
