"""The invariants of a scheduler and its blocks after every step. Visits all sequences and blocks."""

from __future__ import annotations

from collections import Counter

import inside
import numpy as np

from nanovllm.batch import NO_SLOT, PADDING
from nanovllm.plan.block_manager import BlockManager
from nanovllm.plan.prefix_tree import child_key
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Sequence, SequenceStatus


def check_scheduler(scheduler: Scheduler) -> None:
    """Check every invariant of the queues, the slots and the blocks."""
    state = inside.scheduler_state(scheduler)
    ending = list(scheduler.ending.values())
    check_blocks(scheduler.block_manager, [*scheduler.running, *ending])
    slots = [seq.slot for seq in scheduler.running]
    assert sorted(slots + state.free_slots) == list(range(scheduler.max_num_seqs)), "slots drifted"
    queued = sorted(seq.seq_id for seq in [*scheduler.waiting, *scheduler.running, *ending])
    assert queued == sorted(state.unfinished), "a request is lost or queued twice"
    for seq in scheduler.waiting:
        assert seq.status is SequenceStatus.WAITING and not seq.block_table and seq.slot == NO_SLOT, seq
    for seq in ending:
        assert seq.status is SequenceStatus.ENDING and seq.slot == NO_SLOT, seq
        assert seq.num_tokens == seq.max_tokens_total, f"{seq} is not complete"
    for seq in scheduler.running:
        assert seq.status is SequenceStatus.RUNNING and seq.num_computed_tokens <= seq.num_tokens, seq
        assert seq.num_computed_tokens <= len(seq.block_table) * scheduler.block_manager.block_size, seq
        for rows, table in ((state.block_tables, seq.block_table), (state.window_tables, seq.window_table)):
            if rows is not None:
                same = rows[seq.slot][: len(table)].tolist() == table
                assert same and (rows[seq.slot][len(table) :] == PADDING).all(), f"{seq}: its slot's differs"


def check_blocks(manager: BlockManager, sequences: list[Sequence]) -> None:
    """Check every invariant of the blocks, given all sequences that own any."""
    first, state = manager.pool.first_windowed, inside.block_state(manager)
    tables = [
        (seq, [(index, block + offset) for index, block in enumerate(table) if block != PADDING])
        for seq in sequences
        for table, offset in ((seq.block_table, 0), (seq.window_table, first))
    ]
    owners = Counter(block for _, table in tables for _, block in table)
    counts, slabs = np.zeros(len(state.ref_counts), np.int64), np.arange(manager.num_blocks)
    counts[list(owners)] = list(owners.values())
    assert np.array_equal(state.ref_counts, counts), "reference counts drifted"
    windowed, plain = np.zeros(len(slabs), bool), np.zeros(len(slabs), bool)
    windowed[[block % len(slabs) for block in owners if block >= first]] = True
    plain[[block % len(slabs) for block in owners if block < first]] = True
    used = windowed | plain
    assert sorted(state.free) == slabs[~used].tolist(), "free list drifted"
    assert not (windowed & plain).any(), "two kinds"
    parts = np.flatnonzero((counts[:first] == 0) & (used & ~windowed)[np.arange(first) % len(slabs)])
    assert sorted(state.free_parts) == parts.tolist(), "free parts drifted"
    assert not state.pinned, "the source of a copy is owned after its step was planned"
    cached = [(block, content) for block, content in enumerate(state.content) if content is not None]
    partial = [b for b, content in cached if b < len(slabs) and not owners[b] and not content.is_full]
    found_partial = sorted(state.free_partial)
    assert found_partial == ([] if manager.two_kinds else partial), "free partial blocks drifted"
    for key, content in state.by_key.items():
        assert content.key == key and content.is_full
        assert len(content.tokens) == 4 * manager.block_size, "a block that is not full has a chain id"
    num_found = 0
    for place, children in state.children.items():
        several = children if isinstance(children, list) else [children]
        assert isinstance(children, list) == (len(several) > 1), "a parent without children, or a list of one"
        found = [content.tokens for content in several]
        assert found == sorted(set(found)), "children are not in order, or twice"
        num_found += len(several)
        for content in several:
            assert child_key(content.parent, content.tokens) == place == content.place, content
            assert state.content[content.block] is content, f"{content} is found, and its block is reused"
            assert not windowed[content.block % len(slabs)], f"{content} is overwritten"
            assert not content.is_full or state.by_key[content.key] is content, f"{content} has no key"
            assert content.is_full or len(content.tokens) < 4 * manager.block_size, f"{content} is full"
    for chain, block in state.windowed.items():
        assert state.content[block].chain == chain and block >= first
        assert not (used & ~windowed)[block % len(slabs)], f"block {block} is cached, and overwritten"
    assert len(cached) == num_found + len(state.windowed), "a cached block cannot be found"
    shared = {block for block, count in owners.items() if count > 1}
    for seq, table in tables:
        assert len({block for _, block in table}) == len(table), f"{seq} owns a block twice"
        for index, block in table:
            content = state.content[block]
            if content is not None and content.tokens:  # what others find there is what this sequence stored
                start = index * manager.block_size
                end = start + len(content.tokens) // 4
                own = np.asarray(seq.token_ids[start:end], np.int32).tobytes()
                assert content.tokens == own, f"{seq}: block {block} is stale"
                assert end <= seq.num_computed_tokens, f"{seq}: {block} is not computed"
            if block in shared:
                assert index < seq.num_hashed_blocks, f"{seq} may write block {block}, which others share"
