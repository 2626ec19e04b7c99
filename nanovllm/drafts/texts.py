"""Texts: what is known of the texts of running sequences, for their drafts: where runs of tokens are, and how
often drafts were right. Plans nothing. Needs no torch.
"""

from __future__ import annotations

from nanovllm.drafts.budget import Trust
from nanovllm.drafts.places import Places
from nanovllm.drafts.proposer import NOTHING, Draft, Proposer
from nanovllm.plan.sequence import Sequence

_LONGEST_PAUSE = 7  # tokens after which a text with no good draft is looked at again
_GOOD = 0.2  # the chance from which a first draft is good


class Text:
    """What is known of the text of one sequence."""

    def __init__(self, width: int, trust: float) -> None:
        self.places = Places(width)
        self.trust = Trust(trust)
        self.draft = NOTHING  # the last one, whether or not it was computed
        self.pause = self.paused = 0  # tokens between two looks, and those left
        self.accepted: list[int] = []  # drafts that the last step accepted
        self.num_preemptions = 0  # of the sequence, then

    def follow(self, seq: Sequence) -> None:
        """Take in the tokens of the sequence that are new."""
        known, of_prompt = len(self.places.ids), seq.num_prompt_tokens
        if known < of_prompt:
            self.places.extend(seq.prompt_ids[known:of_prompt])
            known = of_prompt
        self.places.extend(seq.output_ids[known - of_prompt :])


class Texts:
    """Those of sequences that have decoded."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._texts: dict[int, Text] = {}  # by id of each sequence
        self._trust = Trust()  # of all texts: where a new one starts

    def draft(self, seq: Sequence, most: int) -> Draft:
        """At most `most` tokens that may follow a sequence; nothing while its text is not looked at."""
        text = self._texts.get(seq.seq_id)
        if text is None:
            text = self._texts[seq.seq_id] = Text(self._proposer.width, self._trust.value)
        text.draft = NOTHING
        if most <= 0:
            return NOTHING
        if text.paused:
            text.paused -= 1
            return NOTHING
        text.follow(seq)
        text.draft = self._proposer.draft(text.places, most)
        is_good = text.draft.shares and text.draft.shares[0] * text.trust.value >= _GOOD
        text.pause = text.paused = 0 if is_good else min(2 * text.pause + 1, _LONGEST_PAUSE)
        return text.draft

    def last_draft(self, seq: Sequence) -> Draft:
        return self._texts[seq.seq_id].draft

    def gains(self, seq: Sequence, draft: Draft) -> list[float]:
        """The chance of each token of a sequence's draft that it and all before it are right."""
        return self._texts[seq.seq_id].trust.gains(draft.shares) if draft.shares else []

    def learn(self, seq: Sequence, drafts: list[int], drawn: list[int]) -> None:
        """A step computed these of the last draft, and drew these tokens."""
        text = self._texts.get(seq.seq_id)
        if text is None:  # it has only been planned ahead
            return
        guessed = text.draft.token_ids
        if guessed:
            right = num_equal(guessed, drawn)
            for trust in (text.trust, self._trust):
                trust.learn(right, right < min(len(guessed), len(drawn)))
        text.draft = NOTHING
        text.accepted, text.num_preemptions = drawn[1:], seq.num_preemptions

    def take_accepted(self, seq: Sequence) -> list[int]:
        """The drafts that the last step accepted, unless the sequence was computed again since then."""
        text = self._texts.get(seq.seq_id)
        if text is None:
            return []
        found, text.accepted = text.accepted, []
        return found if text.num_preemptions == seq.num_preemptions else []

    def ended(self, seq: Sequence, reason: str) -> None:
        """A sequence ended; later drafts may follow its output."""
        if self._texts.pop(seq.seq_id, None) is not None and reason != "error":
            self._proposer.ended(seq.output_ids)


def num_equal(guessed: list[int], drawn: list[int]) -> int:
    """How many of the first tokens are equal."""
    count = 0
    for guess, token in zip(guessed, drawn, strict=False):
        if guess != token:
            break
        count += 1
    return count
