"""Proposer: guesses the next tokens of a text from what the text, or an earlier answer, went on with before.

A guess never changes an answer: it is only computed ahead. Needs no torch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from nanovllm.drafts.places import Answers, Places
from nanovllm.drafts.settings import DraftSettings

_PLACES_OF_NGRAMS = 8  # that are compared
_PLACES_OF_SUFFIXES = 16
_SUFFIX = 2  # tokens of the shortest suffix that is looked up


class Draft(NamedTuple):
    """Guessed tokens, and of each the share of the places found that go on so, with those before it."""

    token_ids: list[int]
    shares: list[float]


NOTHING = Draft([], [])


class Proposer(Protocol):
    """Guesses tokens by one method."""

    width: int  # of the `Places` of a text

    def draft(self, text: Places, most: int) -> Draft:
        """At most `most` tokens that may follow a text."""

    def ended(self, output: array[int]) -> None:
        """A sequence ended with this output."""


class NGrams:
    """As prompt lookup: the longest end of the text, of `prompt_lookup_min` to `prompt_lookup_max` tokens,
    that occurred before; the tokens that followed there. Of equally long ones the latest."""

    def __init__(self, settings: DraftSettings) -> None:
        self.width, self._longest = settings.prompt_lookup_min, settings.prompt_lookup_max

    def draft(self, text: Places, most: int) -> Draft:
        best, found = 0, -1
        for place in text.earlier(_PLACES_OF_NGRAMS):
            length = text.matched(place, text.ids, self._longest)
            if length > best:
                best, found = length, place
            if length == self._longest:
                break
        if found < 0:
            return NOTHING
        token_ids = _following(text, found, most)
        return Draft(token_ids, [1.0] * len(token_ids))

    def ended(self, output: array[int]) -> None:
        """Other texts are not looked up."""


class Suffixes:
    """As suffix decoding (Oliaro et al. 2024): the places, in the text and in earlier answers, that match the
    longest end of the text; at each step the token with which most of these go on.

    Without a tree: of each place the match is counted back, and the places vote.
    """

    width = _SUFFIX

    def __init__(self, settings: DraftSettings) -> None:
        self._factor, self._least = (
            settings.suffix_decoding_max_spec_factor,
            settings.suffix_decoding_min_token_prob,
        )
        self._depth = settings.suffix_decoding_max_tree_depth
        # Tokens that match, at most: a longer match leaves less of the depth for drafts.
        self._longest = max(_SUFFIX, math.ceil(self._depth / (1 + self._factor)))
        self._answers = Answers(_SUFFIX, settings.suffix_decoding_max_cached_requests)

    def draft(self, text: Places, most: int) -> Draft:
        own = self._voted(text, text.earlier(_PLACES_OF_SUFFIXES), text.ids, most)
        if sum(own.shares) >= most:
            return own
        others = self._voted(self._answers, self._answers.of(text, _PLACES_OF_SUFFIXES), text.ids, most)
        return max(own, others, key=lambda draft: sum(draft.shares))

    def ended(self, output: array[int]) -> None:
        self._answers.add(output)

    def _voted(self, source: Places, places: Iterable[int], ids: array[int], most: int) -> Draft:
        """What the places of the longest match agree on."""
        lengths = [(place, source.matched(place, ids, self._longest)) for place in places]
        longest = max([length for _, length in lengths], default=0)
        most = min(most, int(self._factor * longest), self._depth - longest)
        group = [_following(source, place, most) for place, length in lengths if length == longest]
        draft = Draft([], [])
        total = len(group)
        for depth in range(most):
            votes: dict[int, int] = {}
            for each in group:
                if depth < len(each):
                    votes[each[depth]] = votes.get(each[depth], 0) + 1
            if not votes:
                break
            token_id = max(votes, key=votes.__getitem__)  # of equal ones that of the latest place
            share = votes[token_id] / total
            if token_id < 0 or share < self._least:
                break
            draft.token_ids.append(token_id)
            draft.shares.append(share)
            group = [each for each in group if depth < len(each) and each[depth] == token_id]
        return draft


def _following(source: Places, place: int, most: int) -> list[int]:
    """The `most` tokens that follow a place. Where the text ends, it is taken to repeat what follows; an
    earlier answer ends."""
    found = source.ids[place + 1 : place + 1 + most].tolist()
    if isinstance(source, Answers):
        return found
    period = len(found)
    while 0 < len(found) < most:
        found.append(found[-period])
    return found


_METHODS: dict[str, type[NGrams] | type[Suffixes]] = {"ngram": NGrams, "suffix": Suffixes}


def make_proposer(settings: DraftSettings) -> Proposer:
    return _METHODS[settings.method](settings)
