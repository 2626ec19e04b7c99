"""DraftingScheduler: plans decode steps in which a sequence has a row for its last token and for each draft.

Row j of a sequence takes the j-th draft as known and draws the token after it, by the sequence's seed and its
own position. So a draft is right if the row before it drew that token, and the rows after a wrong one are
dropped: the answers are those without drafts. While nothing is drafted, steps are planned one ahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import numpy as np

from nanovllm.batch import Batch, StepKind, StepOutput, TokenEvents, prefix_sum
from nanovllm.config import Config
from nanovllm.drafts.budget import Budget
from nanovllm.drafts.extras import Planned, can_draft, plan_extras, write_masks
from nanovllm.drafts.proposer import make_proposer
from nanovllm.drafts.settings import DraftSettings
from nanovllm.drafts.texts import Texts
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Room, Sequence, SequenceStatus


class _Plan(NamedTuple):
    """A decode step that is not read."""

    batch: Batch
    is_ahead: bool  # planned while the step before was not read
    planned: Planned | None = None  # None: no sequence has a draft, and all read the last token of their slot

    @property
    def seqs(self) -> int:
        return len(self.batch.seq_ids) if self.planned is None else len(self.planned)


class DraftingScheduler(Scheduler):
    """See `Scheduler`; prefill steps are the same."""

    def __init__(self, config: Config, room: Room, settings: DraftSettings, most_rows: int) -> None:
        """most_rows: of a decode step."""
        super().__init__(config, room)
        self._texts = Texts(make_proposer(settings))
        self._budget = Budget(self.max_num_seqs, most_rows - self.max_num_seqs)
        # Whether drafts are worth it that a step waits for the tokens of the one before; and whether that was
        # found out beside a step without any.
        self._drafting = self._found_ahead = False
        self._is_stale = False  # whether a slot lacks its last token, which the row of a draft drew
        self._plans: deque[_Plan] = deque()
        self._usable: dict[int, int] = {}  # of the last step: drafts with known masks, by id, if not all
        # By id of a sequence with penalties: what rows of accepted drafts drew in its last step, and
        # its preemptions then.
        self._accepted: dict[int, tuple[list[int], int]] = {}
        self._runs_ahead = False  # whether steps are ever planned ahead
        self._read: float | None = None  # perf_counter when the last step was read, if that was a decode step
        self._looked = False  # whether texts were looked at since then

    # -- before a step -----------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        if self._drafting and any(seq.num_pending_tokens for seq in self.running.values()):
            return None
        return super().schedule()

    def _schedule_decode(self) -> Batch | None:
        is_ahead = any(seq.num_pending_tokens for seq in self.running.values())
        self._runs_ahead |= is_ahead
        planned = None if is_ahead else self._plan()
        self._drafting = planned is not None and any(drafts for _, drafts in planned)
        if planned is None:
            assert not self._is_stale, "after a step with drafts, steps wait until one without was planned"
            batch = super()._schedule_decode()
            if batch is not None:
                self._plans.append(_Plan(batch, is_ahead))
            return batch
        for seq, _ in planned:  # only now: blocks are freed of what no token from here on reads
            seq.num_computed_tokens = seq.num_tokens
        batch = self._batch_of(planned)
        for seq, _ in planned:
            seq.num_pending_tokens += 1
        self._plans.append(_Plan(batch, is_ahead, planned))
        self._is_stale = False
        self._retire([seq for seq, _ in planned])
        return batch

    def _plan(self) -> Planned | None:
        """The sequences of a step with drafts, or with tokens that slots lack; None if it has neither."""
        may_draft, self._found_ahead = self._found_ahead or self._budget.may_look, False
        if not (may_draft or self._is_stale):
            return None
        seqs = self._with_room()
        found = self._choose(seqs) if may_draft else None
        if found is not None:
            counts, guessed = found
            return [*zip(seqs, map(self._with_blocks, seqs, counts, guessed), strict=True)]
        self._is_stale &= bool(seqs)  # others are computed again, which fills their slots
        return [(seq, []) for seq in seqs] if self._is_stale else None

    def _with_room(self) -> list[Sequence]:
        """The running sequences, each with room for its next token, longest first."""
        seqs: list[Sequence] = []
        for seq in [*self.running.values()]:
            if seq.status is not SequenceStatus.RUNNING:
                break  # preempted, and so are those after it
            if seq.num_tokens <= seq.capacity or self._grow(seq):
                seqs.append(seq)
        return sorted(seqs, key=lambda seq: -seq.num_tokens)

    def _choose(self, seqs: list[Sequence]) -> tuple[list[int], list[list[int]]] | None:
        """The number of drafts of each sequence that are worth their rows, and what is guessed; None if no
        draft is. A sequence has guesses for all but the last token that it may have."""
        if not seqs:
            return None
        most = np.array([seq.max_tokens_total - seq.num_tokens - 1 if can_draft(seq) else 0 for seq in seqs])
        guessed = self._texts.draft(seqs, most)
        counts = self._budget.choose(guessed.gains)
        self._looked = True
        return (counts.tolist(), guessed.token_ids.tolist()) if counts.any() else None

    def _with_blocks(self, seq: Sequence, count: int, guessed: list[int]) -> list[int]:
        """So many drafts of a sequence, or fewer: those with room in its blocks. It gets another block while
        there are more free ones than sequences that run."""
        if not count:
            return []
        blocks, known = self.block_manager, seq.num_known_tokens
        if known + count > seq.capacity and len(blocks.pool.free) > len(self.running):
            blocks.extend(seq, known + count)
            self._write_table(seq)
        return guessed[: min(count, seq.capacity - known)]

    def _batch_of(self, planned: Planned) -> Batch:
        """The step: the rows of a sequence stand together, in order. Rows of drafts have slots of their own,
        after those of sequences: they read no last token, and none is kept of them."""
        seqs = [seq for seq, drafts in planned for _ in range(1 + len(drafts))]
        ids = [token for seq, drafts in planned for token in (_last_token(seq), *drafts)]
        depths = _depths(_numbers(planned))
        ones = np.ones(len(seqs), np.int32)
        lens = np.array([seq.num_computed_tokens for seq in seqs], np.int32) + depths
        batch = self._make_batch(StepKind.DECODE, seqs, np.array(ids, np.int32), ones, lens, ones)
        slots, is_draft = batch.slots.copy(), depths > 0
        slots[is_draft] = self.max_num_seqs + np.arange(len(seqs) - len(planned))
        accepted = [self._take_accepted(seq) for seq, _ in planned] if batch.extras else []
        return replace(batch, slots=slots, extras=plan_extras(batch.extras, planned, slots, accepted))

    def _take_accepted(self, seq: Sequence) -> list[int]:
        """What rows of drafts drew in the last step, unless the sequence was computed again since then."""
        found, num_preemptions = self._accepted.pop(seq.seq_id, ([], 0))
        return found if num_preemptions == seq.num_preemptions else []

    def masks(self, batch: Batch, buffer: np.ndarray) -> object:
        if batch.kind is not StepKind.DECODE:
            return super().masks(batch, buffer)
        self._usable, planned = {}, self._plans[-1].planned
        if planned is None:
            return super().masks(batch, buffer)
        found, self._usable = write_masks(planned, self._unfinished, buffer)
        return found

    # -- after a step ------------------------------------------------------------------------------------

    def postprocess(self, batch: Batch, output: StepOutput[np.ndarray]) -> TokenEvents:
        if batch.kind is not StepKind.DECODE:
            self._read = None
            return super().postprocess(batch, output)
        while (
            self._plans[0].batch is not batch
        ):  # steps that nobody read, because their requests were dropped
            self._plans.popleft()
        plan = self._plans.popleft()
        draws = self._accept(plan, output.token_ids[:, 0])
        self._note(plan, draws)
        events = super().postprocess(batch if draws is batch.draws else replace(batch, draws=draws), output)
        if self._plans and not self._drafting and self._budget.may_look:
            # A step was planned ahead: look whether that is still right.
            self._drafting = self._found_ahead = self._choose(self._decoding()) is not None
        return events

    def _accept(self, plan: _Plan, token_ids: np.ndarray) -> np.ndarray:
        """Which rows of a step count, [rows]: those up to the first that drew another token than the draft
        after it."""
        batch, planned = plan.batch, plan.planned
        if planned is None:
            if self._texts.has_guesses:
                self._texts.learn(batch.seq_ids, token_ids[:, None], np.ones(len(token_ids), np.int64))
            return batch.draws
        numbers = _numbers(planned)
        first, depths = prefix_sum(numbers)[:-1], _depths(numbers)
        is_wrong = (depths > 0) & (batch.token_ids != np.roll(token_ids, 1))
        right = np.minimum.reduceat(np.where(is_wrong, depths, np.repeat(numbers, numbers)), first) - 1
        for place in np.flatnonzero(right).tolist():
            seq, drafts = planned[place]
            accepted = min(int(right[place]), self._usable.get(seq.seq_id, len(drafts)))
            if seq.seq_id not in self._unfinished:
                accepted = 0
            right[place] = accepted
            seq.num_pending_tokens += accepted
            seq.num_computed_tokens += accepted
            if seq.extras is not None and seq.extras.penalties is not None:
                drawn = token_ids[first[place] + 1 : first[place] + 1 + accepted].tolist()
                self._accepted[seq.seq_id] = drawn, seq.num_preemptions
        self._is_stale = bool(right.any())
        places = np.minimum(first[:, None] + np.arange(int(right.max()) + 1), len(token_ids) - 1)
        self._texts.learn([seq.seq_id for seq, _ in planned], token_ids[places], right + 1)
        return np.where(depths > np.repeat(right, numbers), 0, batch.draws)

    def _note(self, plan: _Plan, draws: np.ndarray) -> None:
        """Tell the budget what a step took, from the end of the one before. One without drafts counts only if
        it was planned as such steps are."""
        now, seqs, rows = perf_counter(), plan.seqs, len(draws)
        seconds = None if self._read is None else now - self._read
        if rows > seqs:
            self._budget.drafted(seqs, rows, int(draws.sum()), seconds)
        else:
            usual = plan.is_ahead or not self._runs_ahead
            self._budget.plain(seqs, seconds if usual else None, self._looked)
        self._read, self._looked = now, False

    def _decoding(self) -> list[Sequence]:
        """The running sequences that have an output."""
        return [seq for seq in self.running.values() if seq.output_ids]

    def _finish(self, seq: Sequence, reason: str, reasons: dict[int, str]) -> None:
        super()._finish(seq, reason, reasons)
        self._texts.ended(seq, reason)
        self._accepted.pop(seq.seq_id, None)


def _numbers(planned: Planned) -> np.ndarray:
    """The rows of each sequence, int32."""
    return np.array([1 + len(drafts) for _, drafts in planned], np.int32)


def _depths(numbers: np.ndarray) -> np.ndarray:
    """The place of each row among those of its sequence, int32."""
    return np.arange(int(numbers.sum()), dtype=np.int32) - np.repeat(prefix_sum(numbers)[:-1], numbers)


def _last_token(seq: Sequence) -> int:
    """The token to compute."""
    return (seq.output_ids or seq.prompt_ids[: seq.num_prompt_tokens])[-1]
