"""The invariants of a scheduler and its blocks after every step. Visits all sequences and blocks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import inside
import numpy as np

from nanovllm.batch import NO_SLOT, PADDING
from nanovllm.plan.block_manager import BlockManager
from nanovllm.plan.prefix_tree import child_key
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Sequence, SequenceStatus
from nanovllm.windows.blocks import Twin


def check_scheduler(scheduler: Scheduler) -> None:
    """Check every invariant of the queues, the slots and the blocks."""
    state = inside.scheduler_state(scheduler)
    ending = list(scheduler.ending.values())
    check_blocks(scheduler.block_manager, [*scheduler.running.values(), *ending])
    slots = [seq.slot for seq in scheduler.running.values()]
    assert sorted(slots + state.free_slots) == list(range(scheduler.max_num_seqs)), "slots drifted"
    queued = sorted(seq.seq_id for seq in [*scheduler.waiting, *scheduler.running.values(), *ending])
    assert queued == sorted(state.unfinished), "a request is lost or queued twice"
    for seq in scheduler.waiting:
        assert seq.status is SequenceStatus.WAITING and not seq.tables and seq.slot == NO_SLOT, seq
    for seq in [*scheduler.running.values(), *ending]:
        assert seq.capacity == len(seq.tables[0]) * scheduler.block_manager.block_size, seq
    for seq in ending:
        assert seq.status is SequenceStatus.ENDING and seq.slot == NO_SLOT, seq
        assert seq.num_tokens == seq.max_tokens_total, f"{seq} is not complete"
    for seq in scheduler.running.values():
        assert seq.status is SequenceStatus.RUNNING and seq.num_computed_tokens <= seq.num_tokens, seq
        assert seq.num_computed_tokens <= len(seq.tables[0]) * scheduler.block_manager.block_size, seq
        for rows, table in zip(state.tables, seq.tables, strict=True):
            same = rows[seq.slot][: len(table)].tolist() == table
            assert same and (rows[seq.slot][len(table) :] == PADDING).all(), f"{seq}: its slot's differs"


def check_blocks(manager: BlockManager, sequences: list[Sequence]) -> None:
    """Check every invariant of the blocks, given all sequences that own any."""
    state = inside.block_state(manager)
    offsets = np.array(state.offsets)
    tables = [
        (seq, [(index, block + offset) for index, block in enumerate(table) if block != PADDING])
        for seq in sequences
        for offset, table in zip(offsets.tolist()[:-1], seq.tables, strict=True)
    ]

    def group_of(block: int) -> int:
        return int(np.searchsorted(offsets, block, "right")) - 1

    owners = Counter(block for _, table in tables for _, block in table)
    counts, slabs = np.zeros(len(state.ref_counts), np.int64), np.arange(manager.num_blocks)
    counts[list(owners)] = list(owners.values())
    assert np.array_equal(state.ref_counts, counts), "reference counts drifted"
    used = np.zeros((len(offsets) - 1, len(slabs)), bool)  # by group
    for block in owners:
        used[group_of(block), block % len(slabs)] = True
    assert sorted(state.free) == slabs[~np.any(used, 0)].tolist(), "free list drifted"
    assert np.sum(used, 0).max(initial=0) <= 1, "blocks of two groups in a slab"
    for (a, b), mine, free in zip(pairwise(offsets), used, state.free_parts, strict=True):
        parts = a + np.flatnonzero((counts[a:b] == 0) & mine[np.arange(b - a) % len(slabs)])
        assert sorted(free) == parts.tolist(), "free parts drifted"
    assert not state.pinned, "the source of a copy is owned after its step was planned"
    for key, content in state.by_key.items():
        assert content.key == key and content.is_full
        assert len(content.tokens) == 4 * manager.block_size, "a block that is not full has a chain id"
    num_found, partial = 0, []
    for place, children in state.children.items():
        several = children if isinstance(children, list) else [children]
        assert isinstance(children, list) == (len(several) > 1), "a parent without children, or a list of one"
        found = [content.tokens for content in several]
        assert found == sorted(set(found)), "children are not in order, or twice"
        num_found += len(several)
        for content in several:
            assert child_key(content.parent, content.tokens) == place == content.place, content
            assert state.content[content.block] is content, f"{content} is found, and its block is reused"
            assert not any(each[content.block % len(slabs)] for each in used[1:]), f"{content} is overwritten"
            assert not content.is_full or state.by_key[content.key] is content, f"{content} has no key"
            partial += [content.block] if not owners[content.block] and not content.is_full else []
            assert content.is_full or len(content.tokens) < 4 * manager.block_size, f"{content} is full"
    for group, twins in enumerate(state.twins):
        for first, block in twins.items():
            twin, node = state.content[block], state.content[first]
            assert twin == Twin(block, first, group, node.is_full) and group_of(block) == group
            others = [each for number, each in enumerate(used) if number != group]
            assert not any(each[block % len(slabs)] for each in others), f"{twin} is cached, and overwritten"
    num_cached = len(state.content) - state.content.count(None)
    assert num_cached == num_found + sum(map(len, state.twins)), "a cached block cannot be found"
    is_plain = offsets.tolist() == [0, len(slabs)]
    assert sorted(state.free_partial) == (sorted(partial) if is_plain else []), "free partial blocks drifted"
    shared = {block for block, count in owners.items() if count > 1}
    for seq, table in tables:
        assert len({block for _, block in table}) == len(table), f"{seq} owns a block twice"
        for index, block in table:
            content = state.content[block]
            if isinstance(content, Twin):
                content = state.content[content.first]
            if content is not None:  # what others find there is what this sequence stored
                stored, start = np.frombuffer(content.tokens, np.int32).tolist(), index * manager.block_size
                own = seq.token_ids[start : start + len(stored)].tolist()
                assert stored == own, f"{seq}: block {block} is stale"
                assert start + len(stored) <= seq.num_computed_tokens, f"{seq}: {block} is not computed"
            if block in shared:
                assert index < seq.num_hashed_blocks, f"{seq} may write block {block}, which others share"
