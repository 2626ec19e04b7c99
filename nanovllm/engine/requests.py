"""Requests: the unfinished requests, and which sequence computes which completion.

Creates the sequences of a request and, once the last one ends, its RequestOutput, or parts of it for a stream
with deltas. Schedules nothing; the Processor handles text.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter, time
from typing import Any

import xxhash

from nanovllm.batch import Batch, TokenEvents
from nanovllm.config import Config
from nanovllm.doors import EXTRAS, Table
from nanovllm.errors import BadRow
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput, changed, unlisted
from nanovllm.plan.sequence import Sequence
from nanovllm.text.detokenizer import LONGEST_CUT
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Prompt, Request

_EXTRAS: Table[Any] = Table(EXTRAS)


def check_can_run(request: Request, config: Config, has_head: bool) -> None:
    """Raise ValueError if this engine cannot run the request, whatever its length. has_head: whether its
    model has an LM head."""
    ranks, replicas = config.tensor_parallel_size, config.data_parallel_size
    if max(ranks, replicas) > 1 and request.params.logits_processors:
        raise ValueError(
            "logits_processors are functions of this process and need tensor_parallel_size=1 and "
            f"data_parallel_size=1, not {ranks} and {replicas}; use logit_bias, allowed_token_ids or "
            "structured_outputs"
        )
    if request.pooling is None and not has_head:
        raise ValueError(
            "this model has no LM head (its files have no lm_head.weight, and config.json no "
            "tie_word_embeddings), so it draws and scores no tokens; embed() makes embeddings"
        )


@dataclass(slots=True, eq=False)
class _RequestState:
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


@dataclass(slots=True, eq=False)
class _StreamState:
    """An unfinished completion, and how much of it was yielded."""

    state: _RequestState
    index: int
    text: Any  # `StopStrings`, which decodes its tokens; None if outputs have no text
    num_tokens: int = 0
    num_characters: int = 0
    num_thoughts: int = 0  # characters of its thinking
    before: list[int] = field(default_factory=list)  # the last yielded tokens


class Requests:
    """The unfinished requests of an engine. Request ids count up from 0, and so do those of sequences."""

    def __init__(self, processor: Processor, seed: int) -> None:
        """seed: the engine's; seeds of requests without their own seed derive from it."""
        self.processor = processor
        self._seed = seed
        self._seq_ids = count()
        self._states: dict[str, _RequestState] = {}  # by request id
        self._owners: dict[int, _RequestState] = {}  # by id of each unfinished sequence
        self._stops: dict[int, Any] = {}  # `StopStrings` by id of each unfinished sequence with stop strings
        self._streams: dict[int, _StreamState] = {}  # by id of each unfinished sequence, with `yields_deltas`
        self.yields_deltas = False  # whether `parts` returns parts of answers
        self._epoch = time() - perf_counter()  # converts perf_counter to seconds since 1970

    def __len__(self) -> int:
        return len(self._states)

    def make_sequences(self, request: Request) -> list[Sequence]:
        """Return a new sequence for each completion of the request, their ids in order; adds nothing yet."""
        return [
            Sequence(
                next(self._seq_ids),
                request.prompt_token_ids[: request.num_needed],
                request.params,
                sequence_seed(request, index, self._seed),
                request.stop_token_ids,
                request.prompt_token_ids,
                self._rules(request),
                next_wanted=request.next_wanted if index == 0 else None,
                pooling=request.pooling,
            )
            for index in range(request.params.n)
        ]

    def _rules(self, request: Request) -> list[Any]:
        """The rules of one sequence on its next token."""
        params = request.params
        asks = (
            *(request.constraint, request.bad_words, params.min_tokens, params.allowed_token_ids),
            params.thinking_token_budget is not None,
        )
        return _EXTRAS["rules"](request, self.processor.eos_token_ids) if any(asks) else []

    def add(self, request: Request, sequences: list[Sequence], arrival: float) -> None:
        """Keep a request, which arrived at `arrival`, until all of its sequences have ended."""
        state = self._states[str(request.request_id)] = _RequestState(request, sequences, arrival)
        for index, seq in enumerate(sequences):
            self._owners[seq.seq_id] = state
            stop = self.processor.stop_strings(request, always=self.yields_deltas)
            if stop is not None:
                self._stops[seq.seq_id] = stop
            if self.yields_deltas:
                self._streams[seq.seq_id] = _StreamState(state, index, stop)

    @property
    def unfinished(self) -> list[int]:
        """The ids of all sequences that have not ended."""
        return list(self._owners)

    def unfinished_sequences(self, request_id: str | int) -> list[int]:
        """The ids of the request's unfinished sequences; empty if the request is unknown or finished."""
        state = self._states.get(str(request_id))
        return [] if state is None else [s.seq_id for s in state.sequences if s.seq_id in self._owners]

    def scheduled(self, batch: Batch, now: float) -> None:
        """Record that a step for the sequences of `batch` is launched."""
        for seq_id in batch.seq_ids:
            state = self._owners[seq_id]
            if state.first_scheduled is None:
                state.first_scheduled = now

    def first_tokens(self, events: TokenEvents, now: float) -> None:
        """Record that the tokens of a prefill step were read."""
        for seq_id in events.seq_ids:
            state = self._owners[seq_id]
            if state.first_token is None:
                state.first_token = now

    def find_stop_strings(self, events: TokenEvents) -> dict[int, str]:
        """Decode the tokens of a step; return {sequence id: "stop"} for sequences that reach a stop string.

        The token that stopped a sequence is not part of its text.
        """
        found: dict[int, str] = {}
        if self._stops:
            for seq_id, token_id in zip(events.seq_ids, events.token_ids, strict=True):
                stop = self._stops.get(seq_id)
                if stop is None or events.finish_reasons.get(seq_id) == "stop":
                    continue
                if stop.append(token_id):
                    found[seq_id] = "stop"
        return found

    def finish(self, seq_ids: Iterable[int], now: float) -> list[RequestOutput]:
        """Record sequences that ended; return the outputs of the requests that ended with them."""
        outputs = []
        for seq_id in seq_ids:
            state = self._owners.pop(seq_id)
            request, index = state.request, seq_id - state.sequences[0].seq_id
            seq = state.sequences[index]
            state.completions[index] = self._complete(request, index, seq)
            if len(state.completions) == request.params.n:
                del self._states[str(request.request_id)]
                outputs.append(self._output(state, now))
        return outputs

    def parts(
        self, events: TokenEvents, ended: Iterable[int], outputs: list[RequestOutput]
    ) -> list[RequestOutput]:
        """Return `outputs`; for a stream with deltas the new parts, one output for each request that has any.

        events: the new tokens. ended: the ids of sequences that ended. outputs: the whole outputs of requests
        that ended.
        """
        if not self.yields_deltas:
            return outputs
        token_ids: dict[int, list[int]] = {seq_id: [] for seq_id in [*events.seq_ids, *ended]}
        for seq_id, token_id in zip(events.seq_ids, events.token_ids, strict=True):
            token_ids[seq_id].append(token_id)
        parts: dict[str, tuple[_RequestState, list[CompletionOutput]]] = {}
        for seq_id, new in token_ids.items():
            stream = self._streams[seq_id]
            key = str(stream.state.request.request_id)
            parts.setdefault(key, (stream.state, []))[1].append(self._part(seq_id, stream, new))
        whole = {output.request_id: output for output in outputs}
        return [
            changed(whole[key], outputs=completions) if key in whole else _unfinished(state, completions)
            for key, (state, completions) in parts.items()
        ]

    def _part(self, seq_id: int, stream: _StreamState, token_ids: list[int]) -> CompletionOutput:
        """The new part of a completion: `token_ids`, or all that is left if it ended."""
        completion = stream.state.completions.get(stream.index)
        if completion is not None:
            del self._streams[seq_id]
            start, logprobs = stream.num_tokens, unlisted(completion, "logprobs")
            return changed(
                completion,
                text=completion.text[stream.num_characters :],
                reasoning=_rest(completion.reasoning, stream.num_thoughts),
                token_ids=completion.token_ids[start:],
                logprobs=None if logprobs is None else logprobs[start:],
            )
        text = "" if stream.text is None else stream.text.take()
        part = CompletionOutput(stream.index, text, token_ids)
        part.reasoning = None if stream.text is None else stream.text.take_reasoning()
        stream.num_thoughts += len(part.reasoning or "")
        rows = stream.state.sequences[stream.index].logprobs[stream.num_tokens :]
        stream.num_characters += len(text)
        stream.num_tokens += len(token_ids)
        part = self.processor.with_logprobs(part, stream.state.request, rows, stream.before)
        stream.before = [*stream.before, *token_ids][-LONGEST_CUT:]
        return changed(part, cumulative_logprob=None)

    def _metrics(self, state: _RequestState, now: float) -> RequestMetrics:
        epoch, scheduled, token = self._epoch, state.first_scheduled, state.first_token
        whole = {each.finish_reason for each in state.completions.values()} <= {"stop", "length"}
        return RequestMetrics(
            arrival_time=epoch + state.arrival,
            first_scheduled_time=None if scheduled is None else epoch + scheduled,
            first_token_time=None if token is None else epoch + token,
            last_token_time=epoch + now if whole else None,
            finished_time=epoch + now,
            time_in_queue=None if scheduled is None else scheduled - state.arrival,
        )

    def _output(self, state: _RequestState, now: float) -> RequestOutput:
        first = state.sequences[0]
        completions = [state.completions[index] for index in range(state.request.params.n)]
        failed = [seq for seq in state.sequences if seq.rules and seq.finish_reason == "error"]
        dead_end = _EXTRAS["dead_end"](failed) if failed else None
        metrics = self._metrics(state, now)
        return self.processor.output(
            state.request,
            completions,
            metrics,
            first.prompt_logprobs,
            state.num_cached_tokens,
            first.pooled,
            dead_end,
        )

    def clear(self) -> None:
        """Forget all requests; ids continue to count up."""
        self._states.clear()
        self._owners.clear()
        self._stops.clear()
        self._streams.clear()

    def _complete(self, request: Request, index: int, seq: Sequence) -> CompletionOutput:
        """Return completion `index` of the request, computed by `seq`."""
        stop = self._stops.pop(seq.seq_id, None)
        token_ids = seq.completion_token_ids
        if stop is not None and stop.found is not None:
            output = self.processor.stopped_completion(request, index, token_ids, stop)
        else:
            assert seq.finish_reason is not None
            output = self.processor.completion(request, index, token_ids, seq.finish_reason, seq.stop_reason)
        computed = seq.num_prompt_tokens + len(output.token_ids) - 1  # not the last token
        output.routed_experts = seq.routed_experts(computed)
        return self.processor.with_logprobs(output, request, seq.logprobs)


def _rest(text: str | None, start: int) -> str | None:
    return None if text is None else text[start:]


def _unfinished(state: _RequestState, completions: list[CompletionOutput]) -> RequestOutput:
    """The output of a request with unfinished completions."""
    request = state.request
    return RequestOutput(
        request_id=str(request.request_id),
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=None,
        outputs=completions,
        num_cached_tokens=state.num_cached_tokens,
        index=request.index,
        finished=False,
    )


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


def refused_output(
    request_id: int, index: int, request: Request | BadRow, prompt: Prompt | BadRow, error: BadRow
) -> RequestOutput:
    """Return the output of a prompt that cannot run, with the known part of the prompt."""
    text: str | None = None
    ids: array[int] | list[int] = []
    if isinstance(request, Request):
        text, ids = request.prompt, request.prompt_token_ids
    elif isinstance(prompt, Prompt):
        text, ids = prompt.text, list(prompt.token_ids or ())
    answer = CompletionOutput(0, "", [], finish_reason="error")
    return RequestOutput(str(request_id), text, ids, None, [answer], error=str(error), index=index)
