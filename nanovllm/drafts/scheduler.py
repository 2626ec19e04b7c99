"""DraftingScheduler: plans decode steps in which a sequence has a row for its last token and for each draft.

Row j of a sequence takes the j-th draft as known and draws the token after it, by the sequence's seed and its
own position. So a draft is right if the row before it drew that token, and the rows after a wrong one are
dropped: the answers are those without drafts. While nothing is drafted, steps are planned one ahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from time import perf_counter

import numpy as np

from nanovllm.batch import LAST_SAMPLED, Batch, StepKind, StepOutput, TokenEvents, prefix_sum
from nanovllm.config import Config
from nanovllm.drafts.budget import Budget
from nanovllm.drafts.extras import Planned, can_draft, plan_extras, write_masks
from nanovllm.drafts.proposer import Draft, make_proposer
from nanovllm.drafts.settings import DraftSettings
from nanovllm.drafts.texts import Texts, num_equal
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Room, Sequence


class DraftingScheduler(Scheduler):
    """See `Scheduler`; prefill steps are the same."""

    def __init__(self, config: Config, room: Room, settings: DraftSettings, most_rows: int) -> None:
        """most_rows: of a decode step."""
        super().__init__(config, room)
        self._most = settings.num_speculative_tokens
        self._texts = Texts(make_proposer(settings))
        self._budget = Budget(most_rows)
        # Whether drafts are worth it that a step waits for the tokens of the one before.
        self._drafting = True
        self._plans: deque[tuple[Batch, Planned]] = deque()  # the decode steps that are not read
        self._usable: dict[
            int, int
        ] = {}  # of the last one: drafts with known masks, by sequence id, if not all
        self._begun = 0.0  # perf_counter when it was planned

    # -- before a step -----------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        if self._drafting and any(seq.num_pending_tokens for seq in self.running):
            return None
        return super().schedule()

    def _schedule_decode(self) -> Batch | None:
        seqs = self._with_room()
        if not seqs:
            return None
        planned: Planned = [(seq, []) for seq in seqs]
        if not any(seq.num_pending_tokens for seq in seqs):
            counts = self._choose(seqs)
            self._drafting = any(counts)
            if self._drafting:
                planned = [*zip(seqs, map(self._with_blocks, seqs, counts), strict=True)]
        for seq in seqs:  # only now: blocks are freed of what no token from here on reads
            seq.num_computed_tokens = seq.num_tokens
        batch = self._batch_of(planned)
        for seq in seqs:
            seq.num_pending_tokens += 1
        self._plans.append((batch, planned))
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
            if seq.num_tokens <= seq.capacity or self._grow(seq):
                seqs.append(seq)
        return sorted(seqs, key=lambda seq: -seq.num_tokens)

    def _choose(self, seqs: list[Sequence]) -> list[int]:
        """The number of drafts of each sequence that are worth their rows."""
        return self._budget.choose([self._texts.gains(seq, self._draft(seq)) for seq in seqs])

    def _draft(self, seq: Sequence) -> Draft:
        """What may follow in a sequence, at most all but the last token that it may have."""
        most = min(self._most, seq.max_tokens_total - seq.num_tokens - 1)
        return self._texts.draft(seq, most if can_draft(seq) else 0)

    def _with_blocks(self, seq: Sequence, count: int) -> list[int]:
        """So many drafts of a sequence, or fewer: those with room in its blocks. It gets another block while
        there are more free ones than sequences that run."""
        blocks, known = self.block_manager, seq.num_known_tokens
        if known + count > seq.capacity and len(blocks.pool.free) > len(self.running):
            blocks.extend(seq, known + count)
            self._write_table(seq)
        return self._texts.last_draft(seq).token_ids[: min(count, seq.capacity - known)]

    def _batch_of(self, planned: Planned) -> Batch:
        """The step: the rows of a sequence stand together, in order. Rows of drafts have slots of their own,
        after those of sequences: they read no last token, and none is kept of them."""
        seqs = [seq for seq, drafts in planned for _ in range(1 + len(drafts))]
        ids = [token for seq, drafts in planned for token in (_last_token(seq), *drafts)]
        numbers = np.array([1 + len(drafts) for _, drafts in planned], np.int32)
        depths = np.arange(len(seqs), dtype=np.int32) - np.repeat(prefix_sum(numbers)[:-1], numbers)
        ones = np.ones(len(seqs), np.int32)
        lens = np.array([seq.num_computed_tokens for seq in seqs], np.int32) + depths
        batch = self._make_batch(StepKind.DECODE, seqs, np.array(ids, np.int32), ones, lens, ones)
        slots, is_draft = batch.slots.copy(), depths > 0
        slots[is_draft] = self.max_num_seqs + np.arange(len(seqs) - len(planned))
        accepted = [self._texts.take_accepted(seq) for seq, _ in planned]
        return replace(batch, slots=slots, extras=plan_extras(batch.extras, planned, slots, accepted))

    def masks(self, batch: Batch, buffer: np.ndarray) -> object:
        if batch.kind is not StepKind.DECODE:
            return super().masks(batch, buffer)
        found, self._usable = write_masks(self._plans[-1][1], self._unfinished, buffer)
        return found

    # -- after a step ------------------------------------------------------------------------------------

    def postprocess(self, batch: Batch, output: StepOutput[np.ndarray]) -> TokenEvents:
        if batch.kind is not StepKind.DECODE:
            return super().postprocess(batch, output)
        while self._plans[0][0] is not batch:  # steps that nobody read, because their requests were dropped
            self._plans.popleft()
        _, planned = self._plans.popleft()
        if not self._plans:
            self._budget.observe(len(batch.seq_ids), perf_counter() - self._begun)
        token_ids, draws, first = output.token_ids[:, 0].tolist(), batch.draws.copy(), 0
        for seq, drafts in planned:
            end = first + 1 + len(drafts)
            if seq.seq_id in self._unfinished:
                right = num_equal(drafts, token_ids[first:end])
                right = min(right, self._usable.get(seq.seq_id, right)) if drafts else 0
                draws[first + 1 + right : end] = 0
                seq.num_pending_tokens += right
                seq.num_computed_tokens += right
                self._texts.learn(seq, drafts, token_ids[first : first + 1 + right])
            first = end
        events = super().postprocess(replace(batch, draws=draws), output)
        if self._plans and not self._drafting:  # a step was planned ahead: look whether that is still right
            self._drafting = any(self._choose(self._decoding()))
        return events

    def _decoding(self) -> list[Sequence]:
        """The running sequences that have an output."""
        return [seq for seq in self.running if seq.output_ids]

    def _finish(self, seq: Sequence, reason: str, reasons: dict[int, str]) -> None:
        super()._finish(seq, reason, reasons)
        self._texts.ended(seq, reason)


def _last_token(seq: Sequence) -> int:
    """The token to compute; LAST_SAMPLED if a step that is not read draws it."""
    if seq.num_pending_tokens:
        return LAST_SAMPLED
    return (seq.output_ids or seq.prompt_ids[: seq.num_prompt_tokens])[-1]
