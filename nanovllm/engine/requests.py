"""Requests: the unfinished requests, and which sequence computes which completion.

Creates the sequences of a request and, once the last one ends, its RequestOutput. Schedules nothing; the
Processor handles text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter, time
from typing import Any

import xxhash

from nanovllm.answers import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.batch import Batch, TokenEvents
from nanovllm.checks import PENALTIES, has_extras
from nanovllm.doors import EXTRAS, STREAMS, Table
from nanovllm.params import SamplingParams
from nanovllm.plan.sequence import Sequence
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Request

_EXTRAS: Table[Any] = Table(EXTRAS)
_STREAMS: Table[Any] = Table(STREAMS)


@dataclass(slots=True, eq=False)
class RequestState:
    """An unfinished request. Times are those of perf_counter."""

    request: Request
    sequences: list[Sequence]  # one for each completion, in order
    arrival: float
    completions: dict[int, CompletionOutput] = field(default_factory=dict)  # the finished ones, by index
    first_scheduled: float | None = None
    first_token: float | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache when the first completion was admitted."""
        return self.sequences[0].num_cached_tokens or 0


class Requests:
    """The unfinished requests of an engine. Request ids count up from 0, and so do those of sequences."""

    def __init__(self, processor: Processor, seed: int, keeps_experts: bool = False) -> None:
        """seed: the engine's; seeds of requests without their own seed derive from it. keeps_experts: whether
        outputs say which experts computed their tokens."""
        self.processor = processor
        self._seed, self._keeps_experts = seed, keeps_experts
        self._last: tuple[SamplingParams | None, bool] = None, False  # whether the last ones have extras
        self._seq_ids = count()
        self._states: dict[str, RequestState] = {}  # by request id
        self.unfinished: dict[int, RequestState] = {}  # by id of each unfinished sequence
        self._stops: dict[int, Any] = {}  # `StopStrings` by id of each unfinished sequence with stop strings
        self.parts: Any = None  # `Parts` of all answers, for a stream with deltas
        self._epoch = time() - perf_counter()  # converts perf_counter to seconds since 1970

    def __len__(self) -> int:
        return len(self._states)

    def yield_parts(self, deltas: bool) -> None:
        """Whether `yielded` returns parts of answers from now on. Called while there is no request."""
        self.parts = _STREAMS["parts"](self.processor) if deltas else None

    def make_sequences(self, request: Request) -> list[Sequence]:
        """Return a new sequence for each completion of the request, their ids in order; adds nothing yet."""
        return [
            Sequence(
                next(self._seq_ids),
                request.prompt_token_ids,
                request.params,
                sequence_seed(request, index, self._seed),
                request.stop_token_ids,
                request.num_needed,
                self._extras(request, index),
            )
            for index in range(request.params.n)
        ]

    def _extras(self, request: Request, index: int) -> Any:
        """What a sequence asks for besides tokens, of the door; None for most."""
        params = request.params
        if params is not self._last[0]:
            penalised = any(getattr(params, name) != each.neutral for name, each in PENALTIES.items())
            self._last = params, penalised or has_extras(params)
        asks = self._last[1] or request.first_scored is not None or request.pooling is not None
        return _EXTRAS["sequence"](request, index, self.processor) if asks or self._keeps_experts else None

    def add(self, request: Request, sequences: list[Sequence], arrival: float) -> None:
        """Keep a request, which arrived at `arrival`, until all of its sequences have ended."""
        state = self._states[str(request.request_id)] = RequestState(request, sequences, arrival)
        for index, seq in enumerate(sequences):
            self.unfinished[seq.seq_id] = state
            stop = self.processor.stop_strings(request, always=self.parts is not None)
            if request.params.repetition_detection is not None:
                stop = _EXTRAS["repetitions"].of(self.processor, request, stop)
            if stop is not None:
                self._stops[seq.seq_id] = stop
            if self.parts is not None:
                self.parts.add(seq.seq_id, state, index, stop)

    def unfinished_sequences(self, request_id: str | int) -> list[int]:
        """The ids of the request's unfinished sequences; empty if the request is unknown or finished."""
        state = self._states.get(str(request_id))
        return [] if state is None else [s.seq_id for s in state.sequences if s.seq_id in self.unfinished]

    def scheduled(self, batch: Batch, now: float) -> None:
        """Record that a step for the sequences of `batch` is launched."""
        for seq_id in batch.seq_ids:
            state = self.unfinished[seq_id]
            if state.first_scheduled is None:
                state.first_scheduled = now

    def first_tokens(self, events: TokenEvents, now: float) -> None:
        """Record that the tokens of a prefill step were read."""
        for seq_id in events.seq_ids:
            state = self.unfinished.get(seq_id)
            if state is not None and state.first_token is None:  # else it was aborted meanwhile
                state.first_token = now

    def find_stop_strings(self, events: TokenEvents) -> dict[int, str]:
        """Decode the tokens of a step; return {sequence id: finish reason} for those that a search ends."""
        found: dict[int, str] = _EXTRAS["found_stops"](self._stops, events) if self._stops else {}
        return found

    def finish(self, ended: Iterable[tuple[int, float]]) -> list[RequestOutput]:
        """Record sequences that ended, and when; return the outputs of the requests that ended with them."""
        outputs = []
        for seq_id, now in ended:
            state = self.unfinished.pop(seq_id)
            request, index = state.request, seq_id - state.sequences[0].seq_id
            state.completions[index] = self._complete(request, index, state.sequences[index])
            if len(state.completions) == request.params.n:
                del self._states[str(request.request_id)]
                outputs.append(self._output(state, now))
        return outputs

    def yielded(
        self, events: TokenEvents, ended: Iterable[int], outputs: list[RequestOutput]
    ) -> list[RequestOutput]:
        """Return `outputs`, the whole ones of requests that ended; for a stream with deltas the new parts.

        events: the new tokens. ended: the ids of sequences that ended.
        """
        return outputs if self.parts is None else self.parts.take(events, ended, outputs)

    def _metrics(self, state: RequestState, now: float) -> RequestMetrics:
        epoch, scheduled, token = self._epoch, state.first_scheduled, state.first_token
        whole = {each.finish_reason for each in state.completions.values()}.isdisjoint(("abort", "error"))
        return RequestMetrics(
            arrival_time=epoch + state.arrival,
            first_scheduled_time=None if scheduled is None else epoch + scheduled,
            first_token_time=None if token is None else epoch + token,
            last_token_time=epoch + now if whole else None,
            finished_time=epoch + now,
            time_in_queue=None if scheduled is None else scheduled - state.arrival,
        )

    def _output(self, state: RequestState, now: float) -> RequestOutput:
        extras = state.sequences[0].extras
        scores, pooled = ([], None) if extras is None else (extras.prompt_logprobs, extras.pooled)
        completions = [state.completions[index] for index in range(state.request.params.n)]
        failed = [s for s in state.sequences if s.extras is not None and s.finish_reason == "error"]
        dead_end = _EXTRAS["dead_end"](failed) if failed else None
        metrics = self._metrics(state, now)
        return self.processor.output(
            state.request, completions, metrics, scores, state.num_cached_tokens, pooled, dead_end
        )

    def clear(self) -> None:
        """Forget all requests; ids continue to count up."""
        self._states.clear()
        self.unfinished.clear()
        self._stops.clear()
        self.parts = None

    def _complete(self, request: Request, index: int, seq: Sequence) -> CompletionOutput:
        """Return completion `index` of the request, computed by `seq`."""
        stop = self._stops.pop(seq.seq_id, None)
        token_ids = seq.completion_token_ids
        if stop is not None and stop.finish():
            output: CompletionOutput = stop.completion(request.params, index, token_ids)
        else:
            assert seq.finish_reason is not None
            output = self.processor.completion(request, index, token_ids, seq.finish_reason, seq.stop_reason)
        if seq.extras is None:
            return output
        computed = seq.num_prompt_tokens + len(output.token_ids) - 1  # not the last token
        output.routed_experts = seq.extras.routed_experts(computed)
        return self.processor.extras.with_logprobs(output, request, seq.extras.logprobs)


def sequence_seed(request: Request, index: int, engine_seed: int) -> int:
    """The seed of completion `index`.

    The first completion has the request's own seed, or one derived from the engine's seed and the request's
    number. The seeds of the others derive from the first one's seed and the index.
    """
    seed = request.params.seed
    if seed is None:
        seed = drawn_seed(engine_seed, request.request_id)
    return int(seed) if index == 0 else drawn_seed(seed, index)


def drawn_seed(seed: int, number: int) -> int:
    """The seed of request, completion or row `number`, derived from `seed`; at most 63 bits."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed % 2**64, number)) >> 1
