"""A device without a model: the next token is a hash of the whole context, read through the block table.

So a lost token, a wrong or stale block or a wrong position changes the output or fails an assertion.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
from invariants import check_scheduler

from nanovllm.batch import LAST_SAMPLED, Batch, StepOutput
from nanovllm.config import Config
from nanovllm.plan.scheduler import Room, Scheduler
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

VOCAB = 50
EOS = 0
POISON = -999


def next_token(context: list[int]) -> int:
    """The fake model: a hash below VOCAB, which is EOS about once in VOCAB tokens."""
    return zlib.crc32(np.array(context, np.int32).tobytes()) % VOCAB


def expected_output(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """The output that a request must give, by definition."""
    tokens, reason = list(prompt), "length"
    limit = min(len(prompt) + params.max_tokens, max_model_len)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not params.ignore_eos:
            reason = "stop"
            break
    return tokens[len(prompt) :], reason


class FakeDevice:
    """Runs batches in launch order: at once, or (lazy) when a result is requested."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, lazy: bool = False) -> None:
        self.block_size = block_size
        self.lazy = lazy
        self.tokens = np.full(num_blocks * block_size, POISON)
        self.positions = np.full(num_blocks * block_size, POISON)
        self.last = np.full(num_slots, POISON)
        self.queue: deque[Handle] = deque()

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

    def _run(self, batch: Batch) -> StepOutput:
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        slots = []
        for row, (start, length) in enumerate(
            zip(starts, batch.query_lens, strict=True)
        ):  # store all rows first, as a layer does
            ids = batch.token_ids[start : start + length]
            ids = np.where(ids == LAST_SAMPLED, self.last[batch.slots[row]], ids)
            assert (ids != POISON).all()
            positions = np.arange(batch.context_lens[row] - length, batch.context_lens[row])
            where = self._slots(batch, row, positions)
            slots.append(where)
            self.tokens[where], self.positions[where] = ids, positions
        flat = np.concatenate(slots)
        assert len(set(flat.tolist())) == len(flat), "two rows write one slot"
        output = np.full(len(batch.slots), POISON)
        for row, context_len in enumerate(batch.context_lens):  # then attend
            where = self._slots(batch, row, np.arange(context_len))
            assert (self.positions[where] == np.arange(context_len)).all(), "a cell holds another position"
            output[row] = next_token(self.tokens[where].tolist())
            if batch.draws[row]:
                self.last[batch.slots[row]] = output[row]
        return StepOutput(output[:, None])

    def _slots(self, batch: Batch, row: int, positions: np.ndarray) -> np.ndarray:
        blocks = batch.block_tables[row, positions // self.block_size]
        assert (blocks >= 0).all(), "a position has no block"
        return blocks * self.block_size + positions % self.block_size


@dataclass(eq=False)
class Handle:
    device: FakeDevice
    batch: Batch
    output: StepOutput | None = None

    def result(self) -> StepOutput:
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

    def take(self, batch: Batch, output: StepOutput) -> None:
        """Take in the tokens of a step; check the events against the sequences."""
        unfinished = {seq.seq_id: seq for seq in (*self.scheduler.running, *self.scheduler.waiting)}
        events = self.scheduler.postprocess(batch, output)
        for seq_id, token_id in zip(events.seq_ids, events.token_ids, strict=True):
            self.tokens[seq_id].append(token_id)
        for seq_id, reason in events.finish_reasons.items():
            assert seq_id not in self.finished
            seq = self.finished[seq_id] = unfinished[seq_id]
            assert (seq.completion_token_ids, seq.finish_reason) == (self.tokens[seq_id], reason)


def make_sequence(seq_id: int, prompt: list[int], params: SamplingParams) -> Sequence:
    return Sequence(
        seq_id, prompt, params, seed=seq_id, stop_ids=frozenset() if params.ignore_eos else frozenset({EOS})
    )


def make_loop(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 60,
    caching: bool = True,
    run_ahead: bool = True,
    lazy: bool = True,
) -> Loop:
    config = Config(
        "model",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=caching,
    )
    scheduler = Scheduler(config, Room(num_blocks, block_size, max_model_len))
    return Loop(scheduler, FakeDevice(num_blocks, block_size, max_num_seqs, lazy), run_ahead)


def run_all(loop: Loop, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """Run requests to their end; check and return their outputs."""
    first = max(loop.finished, default=-1) + 1
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        loop.scheduler.add(make_sequence(first + index, prompt, param))
    while not loop.scheduler.is_finished():
        loop.step()
    assert loop.scheduler.block_manager.usage == 0
    outputs = []
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        seq = loop.finished[first + index]
        tokens, reason = expected_output(prompt, param, loop.scheduler.room.max_model_len)
        assert (seq.completion_token_ids, seq.finish_reason) == (tokens, reason)
        outputs.append(tokens)
    return outputs
