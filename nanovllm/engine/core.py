"""Core: the Executor of one model in this process, on one device or split over several.

Owns the Scheduler, the Ranks with rank 0's ModelRunner, and the Requests: sequences inside, requests outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any, ClassVar, TypeAlias

from nanovllm.answers import RequestOutput
from nanovllm.batch import Batch, StepKind, TokenEvents
from nanovllm.device import Device
from nanovllm.doors import DRAFTS, Table, cpu_door
from nanovllm.engine.executor import Load
from nanovllm.engine.requests import Requests
from nanovllm.engine.startup import OpenedModel, cache_options, usable_length
from nanovllm.engine.stats import StepStats, attention_pairs
from nanovllm.lifecycle import held_interrupts
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Room
from nanovllm.runner.inputs import PendingOutput
from nanovllm.runner.model_runner import ModelRunner, RankSetup
from nanovllm.runner.start import start_ranks
from nanovllm.text.prompts import Request

_DRAFTS: Table[Any] = Table(DRAFTS)
_ANSWERS = 16  # that a step makes at least, of those that wait; or a sixteenth of them, if that is more

# A step that was launched and not read yet: its batch, its `num_cached_tokens` and `num_preemptions`, and its
# output; None: its tokens are not drawn yet.
_Launched: TypeAlias = "tuple[Batch, int, int, PendingOutput | None]"


class Core:
    """See `Executor`."""

    asleep: frozenset[str] = frozenset()
    runner_class: ClassVar[type[ModelRunner]] = ModelRunner

    def __init__(self, model: OpenedModel, on_progress: Callable[[], None] = lambda: None) -> None:
        """Load the model. on_progress: as in `start_ranks`."""
        self._config = config = model.config
        self._device = device = Device(config.device)
        asked = config.speculative_config is not None
        drafting = _DRAFTS["drafting"](config, model.model_config) if asked else None
        usable = usable_length(config, model.model_config, device, model.max_model_len)
        own = replace(config, tokenizer=None, hf_token=None)  # no rank needs them
        if drafting is not None:
            own = replace(own, max_num_seqs=drafting.most_rows)
        size, kind = config.tensor_parallel_size, self.runner_class
        setup = RankSetup(0, size, config.device, own, model.model_config, model.path, usable, kind)
        self.ranks = start_ranks(setup, on_progress)
        self.runner = runner = self.ranks.runner
        if not device.is_cuda:
            cpu_door("compile_ahead")(runner)
        self.room = Room(
            self.ranks.num_blocks,
            runner.block_size,
            runner.max_model_len,
            model.model_config.longest,
            cache_options(config, device),
            runner.layout.groups,
            config.max_num_batched_tokens,
        )
        self._make_scheduler = Scheduler if drafting is None else drafting.scheduler
        self.scheduler: Scheduler = self._make_scheduler(config, self.room)
        self.requests = Requests(model.processor, config.seed, config.return_routed_experts)
        self._run_ahead = device.is_cuda if config.async_scheduling is None else config.async_scheduling
        # Requests without sequences yet, and perf_counter when they arrived.
        self._arrived: deque[tuple[Request, float]] = deque()
        self._num_arrived = 0  # sequences that these will have
        self._in_flight: _Launched | None = None
        # The last one that was, when, and the seconds since the one before.
        self._read: tuple[_Launched, TokenEvents, float, float] | None = None
        self._ended: deque[tuple[int, float]] = deque()  # sequences without an answer yet, and when they did
        self._last_end = 0.0  # perf_counter at the end of the last step, or when the first request came
        self._peak_usage = 0.0

    @property
    def num_requests(self) -> int:
        return len(self.requests) + len(self._arrived)

    @property
    def load(self) -> Load:
        usage = self.scheduler.block_manager.pool.usage
        return Load(self.num_requests, self._num_running, self._num_waiting, usage, self._peak_usage)

    @property
    def _num_running(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.ending)

    @property
    def _num_waiting(self) -> int:
        return len(self.scheduler.waiting) + self._num_arrived

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, requests: list[Request], deltas: bool = False) -> None:
        now = perf_counter()
        if not (self.requests or self._arrived):
            self._last_end = now
            self.requests.yield_parts(deltas)
        self._arrived.extend([(request, now) for request in requests])
        self._num_arrived += sum([request.params.n for request in requests])

    def _queue(self, enough: float = inf) -> None:
        """Queue the sequences of requests, in order, until `enough` wait. So the device begins after the
        first of many requests, and those of the others are made while it works."""
        waiting = self.scheduler.waiting
        while self._arrived and len(waiting) < enough:
            request, arrival = self._arrived.popleft()
            sequences = self.requests.make_sequences(request)
            self._num_arrived -= len(sequences)
            self.requests.add(request, sequences, arrival)
            for seq in sequences:
                self.scheduler.add(seq)

    def abort(self, request_id: str | int) -> tuple[RequestOutput | None, list[RequestOutput]]:
        self._queue()
        seq_ids = self.requests.unfinished_sequences(request_id)
        for seq_id in seq_ids:
            self.scheduler.abort(seq_id)
        ended, now = dict(self._ended), perf_counter()
        if self._read is not None:  # no answer was made of it yet
            self.requests.first_tokens(*self._read[1:3])
            ended |= dict.fromkeys(self._read[1].finish_reasons, self._read[2])
        aborted = self.requests.finish([(seq_id, ended.get(seq_id, now)) for seq_id in seq_ids])
        parts = self.requests.yielded(TokenEvents([], [], {}), seq_ids, aborted)
        return next(iter(aborted), None), parts

    def clear(self, failed: bool = False) -> bool:
        if failed:
            self._in_flight = self._read = None
            self.scheduler = self._make_scheduler(self._config, self.room)
        else:
            for seq_id in [*self.requests.unfinished]:
                self.scheduler.abort(seq_id)
        self._arrived.clear()
        self._num_arrived = 0
        self.requests.clear()
        return not self.ranks.has_ended

    def step(self) -> tuple[list[RequestOutput], StepStats | None]:
        """Launch the next step, make answers of earlier ones while the device works, then read the previous
        one. Without `async_scheduling`, read the same one, and make its answers."""
        with held_interrupts(), self._device.current():
            launched = self._plan()
            if launched is not None:
                launched = *launched[:3], self.ranks.run(ModelRunner.launch, launched[0])
            self._peak_usage = max(self._peak_usage, self.scheduler.block_manager.pool.usage)
            made = self._answers()
            step = self._in_flight if self._run_ahead else self._drawn(launched)
            if step is not None:
                batch, _, _, handle = step
                assert handle is not None
                with self.ranks.kill_on_error("a step"):
                    output = handle.result()
                seconds, self._last_end = (now := perf_counter()) - self._last_end, now
                self._read = step, self.scheduler.postprocess(batch, output), now, seconds
            if self._run_ahead:
                self._in_flight = self._drawn(launched)
            if self._read is not None:
                events = self._read[1]
                events.finish_reasons.update(stopped := self.requests.find_stop_strings(events))
                for seq_id, reason in stopped.items():
                    self.scheduler.abort(seq_id, reason)
            return made if self._run_ahead else self._answers()

    def share(self, stats: StepStats) -> StepStats:
        return stats

    def _plan(self) -> _Launched | None:
        """Plan the next step, which must be launched then; None if nothing can be planned."""
        self._queue(self._config.max_num_seqs)  # a step admits no more
        blocks = self.scheduler.block_manager
        cached, preempted = blocks.num_cached_tokens, self.scheduler.num_preemptions
        batch = self.scheduler.schedule()
        if batch is None:
            assert self._in_flight or self.scheduler.is_finished(), "stuck: no step runs, and none can"
            return None
        if batch.kind is StepKind.PREFILL:
            self.requests.scheduled(batch, perf_counter())
        return batch, blocks.num_cached_tokens - cached, self.scheduler.num_preemptions - preempted, None

    def _drawn(self, step: _Launched | None) -> _Launched | None:
        """Let a launched step draw its tokens, if it has not; all previous tokens are known now."""
        if step is None or step[3] is not None:
            return step
        masks = self.scheduler.masks(step[0], self.runner.mask_buffer)
        return *step[:3], self.ranks.run(ModelRunner.draw, masks)

    def _answers(self) -> tuple[list[RequestOutput], StepStats | None]:
        """What the step gave that was read last, with the answers that are made until the next one ends."""
        if self._read is None:
            return [], None
        (step, events, now, seconds), self._read = self._read, None
        batch, num_cached_tokens, num_preemptions, _ = step
        if batch.kind is StepKind.PREFILL:
            self.requests.first_tokens(events, now)
        ended, left = events.finish_reasons, len(self._ended)
        self._ended.extend([(seq_id, now) for seq_id in ended])
        outputs = self.requests.finish(self._due(min(left, max(_ANSWERS, left // _ANSWERS))))
        stats = StepStats(
            kind=batch.kind,
            num_seqs=len({*batch.seq_ids}),
            num_new_tokens=len(batch.token_ids),
            num_attention_pairs=attention_pairs(batch.query_lens, batch.context_lens),
            seconds=seconds,
            num_drawn_tokens=len(events.token_ids),
            num_cached_tokens=num_cached_tokens,
            num_finished=len(outputs),
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            kv_cache_usage=self.scheduler.block_manager.pool.usage,
            num_preemptions=num_preemptions,
        )
        return self.requests.yielded(events, ended, outputs), stats

    def _due(self, left: int) -> Iterator[tuple[int, float]]:
        """Sequences whose answers to make: at least `left`, and others until the step that runs ends."""
        handle = None if self._in_flight is None or self.requests.parts else self._in_flight[3]
        while self._ended and (handle is None or left > 0 or not handle.waits_for_host()):
            (seq_id, ended), left = self._ended.popleft(), left - 1
            if seq_id in self.requests.unfinished:  # it was not aborted meanwhile
                yield seq_id, ended

    # -- between requests ------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        return self.scheduler.block_manager.reset()

    def set_tokenizer(self, tokenizer: Any) -> None:
        self.requests.processor.tokenizer = tokenizer

    def close(self) -> None:
        self.ranks.stop()
