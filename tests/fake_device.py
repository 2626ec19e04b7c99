"""A device without a model: the next token is a hash of the context, read through the block tables.

So a lost token, a wrong or stale block or a wrong position changes the output or fails an assertion. With a
window, a token's cell holds its value, a hash of the token and of all values that its window sees. So a value
depends on all tokens before it, as keys of deeper layers do.
"""

from __future__ import annotations

import zlib
from array import array
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import inside
import numpy as np
from invariants import check_scheduler

from nanovllm.batch import LAST_SAMPLED, Batch, StepOutput
from nanovllm.config import Config
from nanovllm.extras.columns import NO_LOGPROBS
from nanovllm.extras.planned import SequenceExtras
from nanovllm.kv_group import ONE_GROUP, KVGroup
from nanovllm.plan.prefix_tree import ROOT
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Room, Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.states.policy import groups as groups_of_states
from nanovllm.windows.policy import Window

VOCAB = 50
EOS = 0
POISON = -999


class Windows(NamedTuple):
    """A model whose layers have windows: all, or some."""

    reach: int
    parts: int | None = None  # blocks of the other layers in a slab; None: all have windows

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        near = KVGroup(Window(self.reach))
        return (near,) if self.parts is None else (KVGroup(per_slab=self.parts), near)


def next_token(context: list[int]) -> int:
    """The fake model: a hash below VOCAB, which is EOS about once in VOCAB tokens."""
    return zlib.crc32(np.array(context, np.int32).tobytes()) % VOCAB


def value_of(token: int, before: list[int]) -> int:
    """What a layer with a window stores for a token, given the values that it sees before it."""
    return zlib.crc32(np.array([token, *before], np.int64).tobytes())


def values(tokens: list[int], window: int) -> list[int]:
    """The values of all tokens."""
    found: list[int] = []
    for token in tokens:
        found.append(value_of(token, found[max(0, len(found) - window + 1) :]))
    return found


def expected_output(
    prompt: list[int], params: SamplingParams, max_model_len: int, windows: Windows | None = None
) -> tuple[list[int], str]:
    """The output that a request must give, by definition."""
    tokens, reason = list(prompt), "length"
    limit = min(len(prompt) + params.max_tokens, max_model_len)
    while len(tokens) < limit:
        context = tokens if windows is None or windows.parts is not None else []
        seen = [] if windows is None else values(tokens, windows.reach)[-windows.reach :]
        tokens.append(next_token([*context, *[value % 2**31 for value in seen]]))
        if tokens[-1] == EOS and not params.ignore_eos:
            reason = "stop"
            break
    return tokens[len(prompt) :], reason


class FakeDevice:
    """Runs batches in launch order: at once, or (lazy) when a result is requested."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        lazy: bool = False,
        windows: Windows | None = None,
    ) -> None:
        """With windows, one memory holds both kinds of blocks: `memory[kind]` of what each cell holds, where
        a block of the layers with a window and the blocks of the others in its slab exclude each other."""
        self.block_size, self.num_blocks = block_size, num_blocks
        self.lazy, self.windows = lazy, windows
        parts = 1 if windows is None else windows.parts or 1
        self.tokens = np.full(num_blocks * parts * block_size, POISON)
        self.positions = np.full(num_blocks * parts * block_size, POISON)
        self.values = np.full(num_blocks * block_size, POISON)  # of the layers with a window
        self.value_positions = np.full(num_blocks * block_size, POISON)
        self.last = np.full(num_slots, POISON)
        self.queue: deque[Handle] = deque()
        self.states: dict[int, list[int]] = {}  # of each row of a pool of states, the tokens that it consumed
        self.has_states = False

    def launch(self, batch: Batch) -> Handle:
        handle = Handle(self, batch)
        self.queue.append(handle)
        if not self.lazy:
            self.run_until(handle)
        return handle

    def run_until(self, handle: Handle) -> None:
        while handle.output is None:
            oldest = self.queue.popleft()
            oldest.output = self._run(oldest.batch)

    def _run(self, batch: Batch) -> StepOutput[np.ndarray]:
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        inputs = []
        for row, (start, length) in enumerate(zip(starts, batch.query_lens, strict=True)):
            ids = batch.token_ids[start : start + length]
            ids = np.where(ids == LAST_SAMPLED, self.last[batch.slots[row]], ids)
            assert (ids != POISON).all()
            inputs.append((ids, np.arange(batch.context_lens[row] - length, batch.context_lens[row])))
        seen: list[list[int]] = [[] for _ in inputs]
        if self.windows is None or self.windows.parts is not None:
            seen = self._attend_all(batch, inputs)
        if self.has_states:
            self._move_states(batch, inputs, seen)
        if self.windows is not None:
            near = self._attend_windows(batch, inputs, self.windows.reach)
            seen = [[*all_tokens, *own] for all_tokens, own in zip(seen, near, strict=True)]
        output = np.full(len(batch.slots), POISON)
        for row, context in enumerate(seen):
            output[row] = next_token(context)
            if batch.draws[row]:
                self.last[batch.slots[row]] = output[row]
        return StepOutput(output[:, None])

    def _move_states(
        self, batch: Batch, inputs: list[tuple[np.ndarray, np.ndarray]], seen: list[list[int]]
    ) -> None:
        """Each row's state goes on by its tokens; at position 0 it begins anew. seen: all tokens of a row."""
        moves = [] if len(batch.copies) < 2 else batch.copies[1].tolist()
        read = {slot: (kept, position) for kept, slot, position, saved in moves if not saved}
        saves = [(slot, position, kept) for kept, slot, position, saved in moves if saved]
        written: dict[int, list[int]] = {}
        for row, (ids, positions) in enumerate(inputs):
            slot, start = int(batch.slots[row]), int(positions[0])
            kept, position = read.pop(slot, (slot, start))
            assert position == start, "a state is read at another position"
            whole = [*(self.states[kept] if start else []), *ids.tolist()]
            assert whole == seen[row], "a row's state is of other tokens"
            written[slot] = whole
            for _, end, to in [each for each in saves if each[0] == slot]:
                assert start < end <= len(whole) and to not in written
                written[to] = whole[:end]
        assert not read, "a row that is not in the step reads a state"
        sources = {kept for kept, _, _, saved in moves if not saved}
        assert not sources & written.keys(), "a row is read and written in one step"
        self.states |= written

    def _attend_all(self, batch: Batch, inputs: list[tuple[np.ndarray, np.ndarray]]) -> list[list[int]]:
        """Store all rows, as a layer does, then read each row's context."""
        slots = []
        for row, (ids, positions) in enumerate(inputs):
            where = self._slots(batch.tables[0], row, positions)
            slots.append(where)
            self._spoil(where, windowed=False)
            self.tokens[where], self.positions[where] = ids, positions
        flat = np.concatenate(slots)
        if batch.copies:
            copied = self._copy(batch.copies[0], self.tokens, self.positions)
            flat = np.concatenate([flat, copied])
        assert len(set(flat.tolist())) == len(flat), "two rows write one slot"
        seen = []
        for row, context_len in enumerate(batch.context_lens):
            where = self._slots(batch.tables[0], row, np.arange(context_len))
            assert (self.positions[where] == np.arange(context_len)).all(), "a cell holds another position"
            seen.append(self.tokens[where].tolist())
        return seen

    def _copy(self, copies: np.ndarray, *memory: np.ndarray) -> np.ndarray:
        """Copy cells of `memory` at once, as a kernel does in any order; return the targets."""
        if not len(copies):
            return np.empty(0, np.int64)
        cells = [np.arange(first, first + count) for _, _, first, count in copies]
        assert all(len(each) and each[-1] < self.block_size for each in cells)
        sources, targets = (
            np.concatenate(
                [block * self.block_size + each for block, each in zip(blocks, cells, strict=True)]
            )
            for blocks in (copies[:, 0], copies[:, 1])
        )
        assert not np.isin(sources, targets).any(), "a cell is source and target of copies"
        for cells_of in memory:
            cells_of[targets] = cells_of[sources]
            assert (cells_of[targets] != POISON).all(), "a cell is copied before it is stored"
        return targets

    def _attend_windows(
        self, batch: Batch, inputs: list[tuple[np.ndarray, np.ndarray]], reach: int
    ) -> list[list[int]]:
        """Each row's tokens see only their windows. Blocks that left them are in other hands: a row stores
        only after all rows have read what was there before the step, except for what the step computes."""
        tables, copies = batch.tables[-1], batch.copies[-1] if batch.copies else np.empty((0, 4), np.int32)
        for row, (_, positions) in enumerate(inputs):  # the positions of this step, in all rows
            where = self._slots(tables, row, positions)
            self._spoil(where, windowed=True)
            self.value_positions[where] = positions
        self._spoil(copies[:, 1] * self.block_size, windowed=True)
        self._copy(copies, self.value_positions)
        seen = []
        for row, (ids, positions) in enumerate(inputs):
            self._copy(copies[np.isin(copies[:, 1], tables[row])], self.values)
            for token, position in zip(ids.tolist(), positions.tolist(), strict=True):
                before = self._values(tables, row, max(0, position - reach + 1), position)
                self.values[self._slots(tables, row, np.array([position]))] = value_of(token, before)
            last = int(batch.context_lens[row])
            own = self._values(tables, row, max(0, last - reach), last)
            seen.append([value % 2**31 for value in own])
        return seen

    def _values(self, tables: np.ndarray, row: int, start: int, end: int) -> list[int]:
        where = self._slots(tables, row, np.arange(start, end))
        assert (self.value_positions[where] == np.arange(start, end)).all(), "a cell holds another position"
        values: list[int] = self.values[where].tolist()
        return values

    def _spoil(self, where: np.ndarray, windowed: bool) -> None:
        """Writing to blocks of one kind overwrites the other kind in the same slabs."""
        if self.windows is None or self.windows.parts is None:
            return
        slabs = np.unique(where // self.block_size % self.num_blocks)
        positions = self.positions if windowed else self.value_positions
        cells = positions.reshape(-1, self.num_blocks, self.block_size)
        cells[:, slabs] = POISON

    def _slots(self, tables: np.ndarray, row: int, positions: np.ndarray) -> np.ndarray:
        blocks = tables[row, positions // self.block_size]
        assert (blocks >= 0).all(), "a position has no block"
        return blocks * self.block_size + positions % self.block_size


@dataclass(eq=False)
class Handle:
    device: FakeDevice
    batch: Batch
    output: StepOutput[np.ndarray] | None = None

    def result(self) -> StepOutput[np.ndarray]:
        self.device.run_until(self)
        assert self.output is not None
        return self.output


@dataclass
class Loop:
    """The engine's step loop with a fake device; `check_scheduler` runs after every step."""

    scheduler: Scheduler
    device: FakeDevice
    run_ahead: bool
    in_flight: tuple[Batch, Handle] | None = None
    finished: dict[int, Sequence] = field(default_factory=dict)
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # of events
    steps: int = 0

    def step(self) -> None:
        batch = self.scheduler.schedule()
        launched = None
        if batch is not None:
            assert batch.query_lens.sum() == len(batch.token_ids)
            launched = batch, self.device.launch(batch)
        if self.run_ahead:
            launched, self.in_flight = self.in_flight, launched
        assert launched is not None or batch is not None, "the engine is stuck"
        if launched is not None:
            self.take(launched[0], launched[1].result())
        check_scheduler(self.scheduler)
        self.steps += 1
        assert self.steps < 20_000, "the engine does not end"

    def take(self, batch: Batch, output: StepOutput[np.ndarray]) -> None:
        """Take in the tokens of a step; check the events against the sequences."""
        unfinished = inside.scheduler_state(self.scheduler).unfinished
        events = self.scheduler.postprocess(batch, output)
        for seq_id, token_id in zip(events.seq_ids, events.token_ids, strict=True):
            self.tokens[seq_id].append(token_id)
        for seq_id, reason in events.finish_reasons.items():
            assert seq_id not in self.finished
            seq = self.finished[seq_id] = unfinished[seq_id]
            assert (seq.completion_token_ids, seq.finish_reason) == (self.tokens[seq_id], reason)


def make_sequence(seq_id: int, prompt: list[int], params: SamplingParams, root: int = ROOT) -> Sequence:
    return Sequence(
        seq_id,
        array("i", prompt),
        params,
        seed=seq_id,
        stop_ids=frozenset() if params.ignore_eos else frozenset({EOS}),
        root=root,
    )


def want_states(seq: Sequence, first: int | None) -> None:
    """Let the hidden states of a sequence's prompt be needed, to score tokens, from a position on."""
    if first is not None:
        seq.extras = SequenceExtras(seq.token_ids[:], [], False, first, None, None, None, NO_LOGPROBS, [])


def make_loop(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 60,
    caching: bool = True,
    run_ahead: bool = True,
    lazy: bool = True,
    windows: Windows | None = None,
    deterministic: bool = False,
    states: bool = False,
) -> Loop:
    config = Config(
        "model",
        deterministic=deterministic,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=caching,
    )
    groups = ONE_GROUP if windows is None else windows.groups
    if states:
        groups = groups_of_states(max_num_seqs)
    room = Room(num_blocks, block_size, max_model_len, groups=groups, chunk=max_num_batched_tokens)
    device = FakeDevice(num_blocks, block_size, max_num_seqs, lazy, windows)
    device.has_states = states
    return Loop(Scheduler(config, room), device, run_ahead)


def run_all(loop: Loop, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """Run requests to their end; check and return their outputs."""
    first = max(loop.finished, default=-1) + 1
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        loop.scheduler.add(make_sequence(first + index, prompt, param))
    while not loop.scheduler.is_finished():
        loop.step()
    assert loop.scheduler.block_manager.pool.usage == 0
    outputs = []
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        seq = loop.finished[first + index]
        room = loop.scheduler.room
        tokens, reason = expected_output(prompt, param, room.max_model_len, loop.device.windows)
        assert (seq.completion_token_ids, seq.finish_reason) == (tokens, reason)
        outputs.append(tokens)
    return outputs
