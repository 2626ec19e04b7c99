"""DraftingScheduler: plans decode steps in which a sequence has a row for its last token and for each draft.

Row j of a sequence takes the j-th draft as known and draws the token after it, by the sequence's seed and its
own position. So a draft is right if the row before it drew that token, and the rows after a wrong one are
dropped: the answers are those without drafts. Plans no step before the last one is read.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from time import perf_counter

import numpy as np

from nanovllm.batch import Batch, StepKind, StepOutput, TokenEvents
from nanovllm.config import Config
from nanovllm.drafts.budget import Budget, Trust
from nanovllm.drafts.extras import can_draft, plan_extras, write_masks
from nanovllm.drafts.places import Places
from nanovllm.drafts.proposer import NOTHING, Draft, make_proposer
from nanovllm.drafts.settings import DraftSettings
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Room, Sequence


class Text:
    """What is known of the text of one sequence."""

    def __init__(self, width: int, trust: float) -> None:
        self.places = Places(width)
        self.trust = Trust(trust)
        self.draft = NOTHING  # the last one, whether or not it was computed
        self.accepted: list[int] = []  # drafts that the last step accepted
        self._preempted = 0  # how often the sequence was, then

    def accept(self, seq: Sequence, token_ids: list[int]) -> None:
        self.accepted, self._preempted = token_ids, seq.num_preemptions

    def take_accepted(self, seq: Sequence) -> list[int]:
        """The drafts that the last step accepted, unless the sequence was computed again since then."""
        found, self.accepted = self.accepted, []
        return found if self._preempted == seq.num_preemptions else []

    def follow(self, seq: Sequence) -> None:
        """Take in the tokens of the sequence that are new."""
        known, of_prompt = len(self.places.ids), seq.num_prompt_tokens
        if known < of_prompt:
            self.places.extend(seq.prompt_ids[known:of_prompt])
            known = of_prompt
        self.places.extend(seq.output_ids[known - of_prompt :])


class DraftingScheduler(Scheduler):
    """See `Scheduler`; prefill steps are the same."""

    def __init__(self, config: Config, room: Room, settings: DraftSettings, most_rows: int) -> None:
        """most_rows: of a decode step."""
        super().__init__(config, room)
        self._settings = settings
        self._proposer = make_proposer(settings)
        self._budget = Budget(most_rows)
        self._texts: dict[int, Text] = {}  # by id of each sequence that has decoded
        self._trust = Trust()  # of all texts: where a new one starts
        self._begun = 0.0  # perf_counter when the last decode step was planned
        self._planned: list[tuple[Sequence, list[int]]] = []  # of the last decode step, with its drafts
        self._usable: dict[int, int] = {}  # of these, if not all, by sequence id

    # -- before a step -----------------------------------------------------------------------------------

    def _schedule_decode(self) -> Batch | None:
        seqs = self._with_room()
        if not seqs:
            return None
        drafts = self._drafts([self._draft(seq) for seq in seqs], seqs)
        self._planned = [*zip(seqs, drafts, strict=True)]
        for seq in seqs:  # only now: blocks are freed of what no token from here on reads
            seq.num_computed_tokens, seq.num_pending_tokens = seq.num_known_tokens, 1
        batch = self._batch_of(self._planned)
        self._retire(seqs)
        self._begun = perf_counter()
        return batch

    def _with_room(self) -> list[Sequence]:
        """The running sequences, each with room for its next token, longest first."""
        seqs: list[Sequence] = []
        index = 0
        while index < len(self.running):  # preemption shortens the list from its end
            seq = self.running[index]
            index += 1
            assert not seq.num_pending_tokens, "each step is read before the next one is planned"
            if seq.num_known_tokens > seq.capacity and not self._grow(seq):
                continue
            seqs.append(seq)
        return sorted(seqs, key=lambda seq: -seq.num_known_tokens)

    def _draft(self, seq: Sequence) -> Draft:
        """What may follow in a sequence."""
        text = self._texts.get(seq.seq_id)
        if text is None:
            text = self._texts[seq.seq_id] = Text(self._proposer.width, self._trust.value)
        left = min(self._settings.num_speculative_tokens, seq.max_tokens_total - seq.num_tokens - 1)
        text.draft = NOTHING
        if left > 0 and can_draft(seq):
            text.follow(seq)
            text.draft = self._proposer.draft(text.places, left)
        return text.draft

    def _drafts(self, found: list[Draft], seqs: list[Sequence]) -> list[list[int]]:
        """The drafts of each sequence that the step computes."""
        gains = [
            self._texts[seq.seq_id].trust.gains(draft.shares) for seq, draft in zip(seqs, found, strict=True)
        ]
        counts = self._budget.choose(gains)
        return [
            draft.token_ids[: self._room_for(seq, count)]
            for seq, draft, count in zip(seqs, found, counts, strict=True)
        ]

    def _room_for(self, seq: Sequence, count: int) -> int:
        """How many of so many drafts have room in the sequence's blocks. It gets another block while there
        are more free ones than sequences that run."""
        blocks, known = self.block_manager, seq.num_known_tokens
        if known + count > seq.capacity and len(blocks.pool.free) > len(self.running):
            blocks.extend(seq, known + count)
            self._write_table(seq)
        return min(count, seq.capacity - known)

    def _batch_of(self, planned: list[tuple[Sequence, list[int]]]) -> Batch:
        """The step: the rows of a sequence stand together, in order. Rows of drafts have slots of their own,
        after those of sequences: they read no last token and keep none."""
        seqs = [seq for seq, drafts in planned for _ in range(1 + len(drafts))]
        ids = [token for seq, drafts in planned for token in (_last_token(seq), *drafts)]
        depths = np.concatenate([np.arange(1 + len(drafts), dtype=np.int32) for _, drafts in planned])
        ones = np.ones(len(seqs), np.int32)
        lens = np.array([seq.num_known_tokens for seq in seqs], np.int32) + depths
        batch = self._make_batch(StepKind.DECODE, seqs, np.array(ids, np.int32), ones, lens, ones)
        is_draft = depths > 0
        slots = batch.slots.copy()
        slots[is_draft] = len(self._table_lens) + np.arange(int(is_draft.sum()))
        accepted = [self._texts[seq.seq_id].take_accepted(seq) for seq, _ in planned]
        return replace(batch, slots=slots, extras=plan_extras(batch.extras, planned, slots, accepted))

    def masks(self, batch: Batch, buffer: np.ndarray) -> object:
        if batch.kind is not StepKind.DECODE:
            return super().masks(batch, buffer)
        found, self._usable = write_masks(self._planned, buffer)
        return found

    # -- after a step ------------------------------------------------------------------------------------

    def postprocess(self, batch: Batch, output: StepOutput[np.ndarray]) -> TokenEvents:
        if batch.kind is not StepKind.DECODE:
            return super().postprocess(batch, output)
        self._budget.observe(len(batch.seq_ids), perf_counter() - self._begun)
        token_ids = output.token_ids[:, 0].tolist()
        draws = batch.draws.copy()
        ends = [*accumulate(1 + len(drafts) for _, drafts in self._planned)]
        for end, (seq, drafts) in zip(ends, self._planned, strict=True):
            first = end - 1 - len(drafts)
            right = _num_equal(drafts, token_ids[first:end])
            right = min(right, self._usable.get(seq.seq_id, right))
            draws[first + 1 + right : end] = 0
            if seq.seq_id in self._unfinished:
                seq.num_pending_tokens = 1 + right
                seq.num_computed_tokens = seq.num_known_tokens + right
                self._learn(seq, drafts, token_ids[first : first + right + 1])
        self._planned, self._usable = [], {}
        return super().postprocess(replace(batch, draws=draws), output)

    def _learn(self, seq: Sequence, drafts: list[int], drawn: list[int]) -> None:
        """drawn: the tokens of the rows that are kept."""
        text = self._texts[seq.seq_id]
        guessed = text.draft.token_ids if len(drafts) < len(text.draft.token_ids) else drafts
        right = _num_equal(guessed, drawn)
        for trust in (text.trust, self._trust):
            trust.learn(right, right < min(len(guessed), len(drawn)))
        text.accept(seq, drawn[1:])

    def _finish(self, seq: Sequence, reason: str, reasons: dict[int, str]) -> None:
        super()._finish(seq, reason, reasons)
        if self._texts.pop(seq.seq_id, None) is not None and reason != "error":
            self._proposer.ended(seq.output_ids)


def _last_token(seq: Sequence) -> int:
    return (seq.output_ids or seq.prompt_ids[: seq.num_prompt_tokens])[-1]


def _num_equal(guessed: list[int], drawn: list[int]) -> int:
    """How many of the first tokens are equal."""
    count = 0
    for guess, token in zip(guessed, drawn, strict=False):
        if guess != token:
            break
        count += 1
    return count
