"""The invariants of a scheduler and its blocks after every step. Visits all sequences and blocks."""

from __future__ import annotations

from collections import Counter

import inside
import numpy as np

from nanovllm.batch import NO_SLOT, PADDING
from nanovllm.plan.block_manager import BlockManager
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Sequence, SequenceStatus


def check_scheduler(scheduler: Scheduler) -> None:
    """Check every invariant of the queues, the slots and the blocks."""
    state = inside.scheduler_state(scheduler)
    check_blocks(scheduler.block_manager, scheduler.running)
    slots = [seq.slot for seq in scheduler.running]
    assert sorted(slots + state.free_slots) == list(range(scheduler.max_num_seqs)), "slots drifted"
    queued = sorted(seq.seq_id for seq in [*scheduler.waiting, *scheduler.running])
    assert queued == sorted(state.unfinished), "a request is lost or queued twice"
    for seq in scheduler.waiting:
        assert seq.status is SequenceStatus.WAITING and not seq.block_table and seq.slot == NO_SLOT, seq
    for seq in scheduler.running:
        assert seq.status is SequenceStatus.RUNNING and seq.num_computed_tokens <= seq.num_tokens, seq
        assert seq.num_computed_tokens <= len(seq.block_table) * scheduler.block_manager.block_size, seq
        row = state.block_tables[seq.slot]
        assert row[row != PADDING].tolist() == seq.block_table, f"{seq}: the slot's table differs"


def check_blocks(manager: BlockManager, sequences: list[Sequence]) -> None:
    """Check every invariant of the blocks, given all sequences that own any."""
    owners = Counter(block for seq in sequences for block in seq.block_table)
    blocks, state = range(manager.num_blocks), inside.block_state(manager)
    assert all(state.ref_counts[b] == owners[b] for b in blocks), "reference counts drifted"
    assert set(state.free) == {b for b in blocks if owners[b] == 0}, "free list drifted"
    for key, block in state.by_key.items():
        content = state.content[block]
        assert content is not None and content.key == key, f"hash entry {key} points at block {block}"
    num_cached = sum(content is not None for content in state.content)
    assert num_cached == len(state.by_key), "a cached block cannot be found"
    for seq in sequences:
        assert len(set(seq.block_table)) == len(seq.block_table), f"{seq} owns a block twice"
        for index, block in enumerate(seq.block_table):
            content = state.content[block]
            if content is not None:  # what others may find there is what this sequence stored
                tokens = seq.token_ids[index * manager.block_size : (index + 1) * manager.block_size]
                stored = np.frombuffer(content.tokens, np.int32).tolist()
                assert stored == tokens, f"{seq}: block {block} is stale"
            if owners[block] > 1:
                assert index < seq.num_hashed_blocks, f"{seq} may write block {block}, which others share"
