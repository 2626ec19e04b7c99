"""Scheduler: decides which sequences run in the next step, as one Batch. No torch, no text.

It plans step n+1 without the tokens of step n, because it needs only lengths. If a sequence had already
ended, its row is surplus, and `postprocess` drops it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from nanovllm.batch import (
    LAST_SAMPLED,
    NO_EXTRAS,
    NO_SLOT,
    NOT_DRAWN,
    NOT_FINITE,
    PADDING,
    Batch,
    StepKind,
    StepOutput,
    TokenEvents,
)
from nanovllm.config import Config
from nanovllm.doors import BLOCKS, EXTRAS, Table
from nanovllm.kv_group import ONE_GROUP
from nanovllm.plan.block_manager import BlockManager
from nanovllm.plan.sequence import Room, SamplingTable, Sequence, SequenceStatus

_EXTRAS: Table[Any] = Table(EXTRAS)
_BLOCKS: Table[Any] = Table(BLOCKS)


class Scheduler:
    """Queues, slots and blocks of all unfinished requests.

    Prefill goes first; prompts longer than `max_num_batched_tokens` are computed in chunks. When blocks run
    out, the newest running sequence is preempted: it gives up its blocks and goes to the front of the waiting
    queue, to be computed again.
    """

    def __init__(self, config: Config, room: Room) -> None:
        # Whether the prefix cache also offers what decode steps wrote, with other bits than prefill.
        self._share_outputs = not config.deterministic
        manager = BlockManager if room.groups == ONE_GROUP else _BLOCKS[room.groups[-1].policy.manager]
        self.block_manager: BlockManager = manager(room, config.enable_prefix_caching, self._share_outputs)
        self.max_num_seqs = max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.room = room
        self.waiting: deque[Sequence] = deque()
        self.block_manager.coming = self.waiting
        self.running: dict[int, Sequence] = {}  # by id, oldest first
        # Those whose last token a launched step draws, by id: they keep their blocks, and no slot.
        self.ending: dict[int, Sequence] = {}
        self.num_preemptions = 0  # in total
        self.prefilling: Sequence | None = None  # the running sequence whose prompt is partly computed
        self._unfinished: dict[int, Sequence] = {}
        self._asking: set[int] = set()  # the ids of those with extras
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._sampling = SamplingTable(max_num_seqs)
        max_blocks = self.block_manager.blocks_for(room.max_model_len)
        # The block tables of each group of layers: a row for each slot.
        self._tables = [np.full((max_num_seqs, max_blocks), PADDING, np.int32) for _ in room.groups]
        self._table_lens = np.zeros(max_num_seqs, np.int32)
        self._prefilled: list[Sequence] = []  # in the last step, if not all their blocks are kept

    def is_finished(self) -> bool:
        return not self._unfinished

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises ValueError if its prompt leaves no room for an output."""
        self.room.check_fits(seq.num_prompt_tokens, seq.params.max_tokens != 0)
        seq.max_tokens_total = self.room.max_model_len
        if seq.params.max_tokens is not None:
            asked = seq.num_prompt_tokens + seq.params.max_tokens
            seq.max_tokens_total = min(seq.max_tokens_total, asked)
        self._unfinished[seq.seq_id] = seq
        if seq.extras is not None:
            self._asking.add(seq.seq_id)
        self.waiting.append(seq)

    def abort(self, seq_id: int, reason: str = "abort") -> None:
        """End a sequence in any state and free its blocks and slot; nothing if it is unknown or has ended."""
        if seq_id in self._unfinished:
            self._finish(self._unfinished[seq_id], reason, {})

    def schedule(self) -> Batch | None:
        """Plan the next step; None if nothing can run before the tokens of launched steps are known.

        The plan must be launched before the next call: the K/V that it computes counts as cached at once.
        """
        for seq in self._prefilled:  # the next tokens read less than those of that step
            if seq.status is SequenceStatus.RUNNING:
                self.block_manager.release(seq)
                self._write_table(seq)
        self._prefilled = []
        batch = self._schedule_prefill() or self._schedule_decode()
        # If all were preempted, because the blocks of the last one lay in too many slabs: it starts again.
        if batch is None and self.waiting and not (self.running or self.waiting[0].num_pending_tokens):
            batch = self._schedule_prefill()
        return batch

    def postprocess(self, batch: Batch, output: StepOutput[np.ndarray]) -> TokenEvents:
        """Add the tokens of a step to their sequences; return the new tokens and the ended sequences."""
        events = TokenEvents([], [], {})
        if batch.extras:
            for seq, reason in _EXTRAS["keep"](batch, output, self._sequences(batch)):
                self._finish(seq, reason, events.finish_reasons)
        for column, token_ids in enumerate(output.token_ids.T.tolist()):  # 0: first tokens
            self._take_in(zip(batch.seq_ids, token_ids, (batch.draws > column).tolist(), strict=True), events)
        if batch.extras.has_rules:
            for seq, token_ids in _EXTRAS["forced_ends"](batch, self._sequences(batch)):
                seq.end_with(token_ids)
                events.seq_ids.extend([seq.seq_id] * len(token_ids))
                events.token_ids.extend(token_ids)
                self._finish(seq, "length" if seq.stop_reason is None else "stop", events.finish_reasons)
        return events

    def masks(self, batch: Batch, buffer: np.ndarray) -> object:
        """The allowed tokens of a planned step, `TokenMasks` in `extras/columns.py`. Call it after
        `postprocess` of all earlier steps.

        buffer: [max_num_seqs, ceil(vocabulary / 32)] int32, the memory for the bits.
        """
        return _EXTRAS["masks"](batch, self._sequences(batch), buffer)

    def _sequences(self, batch: Batch) -> dict[int, Sequence]:
        """The unfinished sequences of a step, by row."""
        found = enumerate(map(self._unfinished.get, batch.seq_ids))
        return {row: seq for row, seq in found if seq is not None}

    def _take_in(self, rows: Iterable[tuple[int, int, bool]], events: TokenEvents) -> None:
        """Add at most one token of each row: (sequence id, token id, whether the plan draws one)."""
        unfinished, share_outputs = self._unfinished, self._share_outputs
        block_size = self.block_manager.block_size
        for seq_id, token_id, drawn in rows:
            seq = unfinished.get(seq_id)
            if seq is None or not drawn:  # a surplus row, or a chunk that is not the last of its prompt
                continue
            seq.num_pending_tokens -= 1
            if token_id == NOT_FINITE:
                self._finish(seq, "error", events.finish_reasons)
            if token_id in (NOT_FINITE, NOT_DRAWN):
                continue
            seq.append(token_id)
            events.seq_ids.append(seq_id)
            events.token_ids.append(token_id)
            num_tokens = seq.num_known_tokens
            if token_id in seq.stop_ids:
                seq.stop_reason = token_id
                self._finish(seq, "stop", events.finish_reasons)
            elif num_tokens >= seq.max_tokens_total:
                self._finish(seq, "length", events.finish_reasons)
            elif share_outputs and (num_tokens - 1) // block_size > seq.num_hashed_blocks:
                self.block_manager.register(seq)

    def _schedule_prefill(self) -> Batch | None:
        budget, grid = self.max_num_batched_tokens, self.block_manager.grid
        seqs: list[Sequence] = []
        query_lens: list[int] = []
        while budget >= grid:
            seq = self.prefilling or self._admit(first=not seqs)
            if seq is None:
                break
            query_len = seq.num_known_tokens - seq.num_computed_tokens
            if query_len > budget:
                query_len = budget - (seq.num_computed_tokens + budget) % grid
            if not self.block_manager.keeps_all:
                extended = self.block_manager.extend(seq, seq.num_computed_tokens + query_len)
                assert extended, "its admission left room for every step of its prompt"
                self._write_table(seq)
            seqs.append(seq)
            query_lens.append(query_len)
            budget -= query_len
            seq.num_computed_tokens += query_len
            # The next row can already take it: a layer stores and copies all rows' K/V before any attends.
            self.block_manager.register(seq, rest=True)
            self.prefilling = seq if seq.num_computed_tokens < seq.num_known_tokens else None
        if not seqs:
            return None
        self._prefilled = [] if self.block_manager.keeps_all else seqs
        draws = [int(s is not self.prefilling and s.max_tokens_total > s.num_known_tokens) for s in seqs]
        token_ids: list[bytes] = []
        for seq, query_len, drawn in zip(seqs, query_lens, draws, strict=True):
            end = seq.num_computed_tokens
            token_ids.append(seq.token_bytes(end - query_len, end))
            seq.num_pending_tokens += drawn
        batch = self._make_batch(
            StepKind.PREFILL,
            seqs,
            np.frombuffer(b"".join(token_ids), np.int32),
            np.array(query_lens, np.int32),
            np.array([seq.num_computed_tokens for seq in seqs], np.int32),
            np.array(draws, np.int32),
            self.block_manager.take_copies(),
        )
        self._retire(seqs)
        return batch

    def _admit(self, first: bool) -> Sequence | None:
        """Move the next waiting sequence to the running ones; None if there is none or it must wait.

        A prefill step for a single prompt stalls all running sequences. So the first admission of a step
        waits until the free slots are an eighth of the running sequences (or fit the whole queue), and leaves
        three quarters of a block free for each running sequence. Later admissions of the step leave half a
        block for each, so that sequences can grow and few are preempted and computed again. `deterministic`
        leaves all that they may take: none is computed again, because prefill rounds otherwise than decode.
        """
        if not self.waiting or not self._free_slots:
            return None
        if first and len(self._free_slots) < min(len(self.waiting), len(self.running) // 8):
            return None
        seq = self.waiting[0]
        assert not seq.num_pending_tokens, "a preempted sequence's last token is known one step later"
        spare = len(self.running) * (3 if first else 2) // 4
        if not self._share_outputs and (self.running or self.ending):
            spare = sum(map(self.block_manager.num_coming, [*self.running.values(), seq]))
        if not self.block_manager.allocate(seq, spare):
            return None
        self.waiting.popleft()
        self.running[seq.seq_id] = seq
        seq.status = SequenceStatus.RUNNING
        seq.slot = self._free_slots.pop()
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
        self._sampling.set(seq)
        self._write_table(seq)
        return seq

    def _schedule_decode(self) -> Batch | None:
        seqs: list[Sequence] = []
        context_lens: list[int] = []
        for seq in [*self.running.values()]:
            if seq.status is not SequenceStatus.RUNNING:
                break  # preempted, and so are those after it
            num_tokens = seq.num_known_tokens + seq.num_pending_tokens
            if num_tokens > seq.capacity and not self._grow(seq):
                break
            seq.num_computed_tokens = num_tokens
            seq.num_pending_tokens += 1
            seqs.append(seq)
            context_lens.append(num_tokens)
        if not seqs:
            return None
        size, lens = len(seqs), np.array(context_lens, np.int32)
        # Longest first: a GPU starts attention in row order, so only short rows are left at the end.
        order = np.argsort(-lens, kind="stable")
        batch = self._make_batch(
            StepKind.DECODE,
            [seqs[row] for row in order.tolist()],
            np.full(size, LAST_SAMPLED, np.int32),
            np.ones(size, np.int32),
            lens[order],
            np.ones(size, np.int32),
        )
        self._retire(seqs)
        return batch

    def _retire(self, seqs: list[Sequence]) -> None:
        """Give the slots of the sequences that the planned step completes to those that follow, so that the
        next step need not wait until this one is read. Their blocks are freed when it is."""
        for seq in seqs:
            if seq.num_tokens >= seq.max_tokens_total and seq is not self.prefilling:
                self.ending[seq.seq_id] = self.running.pop(seq.seq_id)
                seq.status = SequenceStatus.ENDING
                self._free_slot(seq)

    def _grow(self, seq: Sequence) -> bool:
        """Give `seq` the block it needs; if none is free, preempt the newest sequences. False if `seq` itself
        was preempted."""
        while not self.block_manager.extend(seq, seq.num_tokens):
            victim = next(reversed(self.running.values()))
            self._release(victim)
            victim.status = SequenceStatus.WAITING
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self.waiting.appendleft(victim)
            if victim is seq:
                return False
        self._write_table(seq)
        return True

    def _finish(self, seq: Sequence, reason: str, reasons: dict[int, str]) -> None:
        """End a sequence, and note the reason in `reasons`."""
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
        elif seq.status is SequenceStatus.ENDING:
            del self.ending[seq.seq_id]
            self.block_manager.free(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reasons[seq.seq_id] = reason
        del self._unfinished[seq.seq_id]
        self._asking.discard(seq.seq_id)

    def _release(self, seq: Sequence) -> None:
        """Free a running sequence's blocks and slot."""
        if seq is self.prefilling:
            self.prefilling = None
        del self.running[seq.seq_id]
        self.block_manager.free(seq)
        self._free_slot(seq)

    def _free_slot(self, seq: Sequence) -> None:
        for rows in self._tables:
            rows[seq.slot] = PADDING
        self._table_lens[seq.slot] = 0
        self._free_slots.append(seq.slot)
        seq.slot = NO_SLOT

    def _write_table(self, seq: Sequence) -> None:
        """Copy the sequence's block tables to the rows of its slot."""
        for rows, table in zip(self._tables, seq.tables, strict=True):
            rows[seq.slot, : len(table)] = table
        self._table_lens[seq.slot] = len(seq.tables[0])

    def _make_batch(
        self,
        kind: StepKind,
        seqs: list[Sequence],
        token_ids: np.ndarray,
        query_lens: np.ndarray,
        context_lens: np.ndarray,
        draws: np.ndarray,
        copies: tuple[np.ndarray, ...] = (),
    ) -> Batch:
        slots = np.array([seq.slot for seq in seqs], np.int32)
        width = int(self._table_lens[slots].max())
        extras = _EXTRAS["step"](seqs, query_lens, draws) if self._asking else None
        return Batch(
            kind=kind,
            seq_ids=tuple([seq.seq_id for seq in seqs]),
            slots=slots,
            token_ids=token_ids,
            query_lens=query_lens,
            context_lens=context_lens,
            tables=tuple([rows[slots, :width] for rows in self._tables]),
            draws=draws,
            sampling=self._sampling.take(slots, context_lens),
            extras=extras or NO_EXTRAS,
            copies=copies,
        )
