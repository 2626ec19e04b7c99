"""ReplicatedEngine: creates requests like any engine, has replicas compute them, and returns their outputs.

Owns the Replicas. Has no model on any device; its scheduler only checks which prompts fit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from nanovllm.device import Device
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests import Requests, RequestState
from nanovllm.engine.startup import cache_options
from nanovllm.engine.stats import EngineStats, StepStats
from nanovllm.outputs import RequestOutput
from nanovllm.plan.scheduler import Scheduler
from nanovllm.replicas.pool import Replicas
from nanovllm.replicas.replica import unpack_output
from nanovllm.replicas.residency import ReplicaResidency
from nanovllm.text.processor import refused_output
from nanovllm.text.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RemoteRequests(Requests):
    """The unfinished requests of an engine whose sequences are in other processes."""

    def find(self, request_id: str | int) -> Request | None:
        """The request; None if it is unknown or finished."""
        state = self._states.get(str(request_id))
        return None if state is None else state.request

    def take_in(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return outputs, with their prompts and arrival times here, and forget requests that have ended."""
        unpacked = [self._unpacked(each, self._states[each.request_id]) for each in outputs]
        for each in outputs:
            if each.finished:
                self._states.pop(each.request_id, None)
        return unpacked

    def _unpacked(self, packed: RequestOutput, state: RequestState) -> RequestOutput:
        output, metrics = unpack_output(packed, state.request, self._processor), packed.metrics
        if metrics is None:
            return output
        arrival, scheduled = self._epoch + state.arrival, metrics.first_scheduled_time
        in_queue = None if scheduled is None else scheduled - arrival
        return replace(output, metrics=replace(metrics, arrival_time=arrival, time_in_queue=in_queue))

    def abort(self, request_id: int) -> RequestOutput:
        """Forget a request that has not run, and return its output."""
        state = self._states.pop(str(request_id))
        request, processor = state.request, self._processor
        for index in range(request.params.n):
            completion = processor.completion(request, index, [], "abort", None)
            state.completions[index] = processor.with_logprobs(completion, request, [])
        completions = list(state.completions.values())
        return processor.output(request, completions, self._metrics(state, perf_counter()), [])

    def give_up(self, request_id: int, why: str) -> RequestOutput:
        """Forget a request that no replica survives, and return its output."""
        request, error = self._states.pop(str(request_id)).request, ValueError(why)
        return refused_output(request_id, request.index, request, error, error)


def _free(replicas: Replicas, residency: ReplicaResidency) -> None:
    replicas.stop()
    residency.forget_updates()


class ReplicatedEngine(LLMEngine):
    """`data_parallel_size` replicas, fed from one queue: outputs and their seeds are those of one engine.

    A replica that ends restarts, and its unfinished requests run again. If three replicas in turn die with a
    request, its output has an `error`. WorkerError if no replica is left.
    """

    _requests: RemoteRequests

    def _start(self, path: Path, max_model_len: int) -> Callable[[], None]:
        config, size = self.config, self.config.tensor_parallel_size
        devices = Device(config.device).ranks(size, config.data_parallel_size)
        self._requests = RemoteRequests(self._processor, config.seed)
        self._last_stats: dict[int, StepStats] = {}  # by number of the replica
        own = replace(config, max_model_len=max_model_len)  # resolved, and what it differs in is said once
        self._replicas = Replicas([replace(own, device=device) for device in devices[::size]])
        try:
            room = self._replicas.smallest
            self._scheduler = Scheduler(
                replace(config, max_num_seqs=1),  # it runs nothing, and only checks what fits
                room.num_blocks,
                room.block_size,
                room.max_model_len,
                self.model_config.longest,
                cache_options(config, Device(config.device)),
            )
            self._replicas.set("limit_model_len", self._scheduler.max_model_len)
            self._residency = residency = ReplicaResidency(self._replicas)
        except BaseException:
            self._replicas.kill()
            raise
        return partial(_free, self._replicas, residency)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """As in any engine. Setting it also sets it on the replicas."""
        return self._processor.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        with self._calling(asleep=True):
            self._check_idle("setting the tokenizer")
            self._replicas.set("set_tokenizer", tokenizer)
            self._processor.tokenizer = tokenizer

    def _empty_prefix_cache(self) -> bool:
        return not self._requests and self._replicas.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """As in any engine, summed over replicas. Seconds are divided by the number of replicas."""
        return self._counters.snapshot(len(self._requests), *self._running_and_waiting, self._kv_cache_usage)

    # -- inside ------------------------------------------------------------------------------------------

    @property
    def _kv_cache_usage(self) -> float:
        """The mean over the replicas."""
        usage = [each.kv_cache_usage for each in list(self._last_stats.values())]
        return sum(usage) / self.config.data_parallel_size

    @property
    def _running_and_waiting(self) -> tuple[int, int]:
        """The numbers of running and waiting sequences of all replicas, from their last reports."""
        last = list(self._last_stats.values())  # a copy, because another thread may add to it
        return sum(each.num_running for each in last), sum(each.num_waiting for each in last)

    def _abort(self, request_id: str | int) -> tuple[RequestOutput | None, list[RequestOutput]]:
        request = self._requests.find(request_id)
        found = [] if request is None else self._replicas.abort(request.request_id)
        if isinstance(found, Request):
            outputs = [self._requests.abort(found.request_id)] * 2
        else:
            outputs = self._requests.take_in(found)
        return next(iter(outputs), None), outputs[1:]

    def _yield_deltas(self, deltas: bool) -> None:
        self._replicas.deltas = deltas

    def _start_profile(self, folder: str, name: str) -> None:
        """A replica that restarts begins its trace again."""
        if self._replicas.is_set("start_profile"):
            raise RuntimeError("a profile is already on; call stop_profile() first")
        self._replicas.set("start_profile", (folder, name))

    def _stop_profile(self) -> list[str]:
        if not self._replicas.is_set("start_profile"):
            raise RuntimeError("no profile is on; call start_profile() first")
        self._replicas.unset("start_profile")
        return [path for paths in self._replicas.call("stop_profile") for path in paths]

    def _current_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _start_afresh(self) -> None:
        self._abort_all()
        if not self._replicas.processes:
            self.close()

    def _abort_all(self) -> None:
        self._requests.clear()
        self._replicas.clear()
        self._last_stats.clear()

    def _queue(self, requests: list[Request]) -> None:
        now = perf_counter()
        for request in requests:
            self._counters.queued(len(request.prompt_token_ids))
            self._requests.add(request, [], now)
        self._replicas.add(requests)

    def _step(self) -> tuple[list[RequestOutput], StepStats | None]:
        """Wait for the next step of any replica; return the outputs of its finished requests, and its stats.

        Replicas run in parallel, so the returned stats divide the step's seconds by the number of replicas.
        """
        if not self._requests:
            return [], None
        arrival = self._replicas.next_arrival(self._lifecycle.check_open)
        outputs = self._requests.take_in(arrival.outputs)
        outputs += [self._requests.give_up(request_id, why) for request_id, why in arrival.lost.items()]
        stats = arrival.stats
        if stats is None:
            return outputs, None
        self._last_stats[arrival.replica] = stats
        self._counters.planned(self._kv_cache_usage)
        running, waiting = self._running_and_waiting
        share = replace(
            stats,
            seconds=stats.seconds / self.config.data_parallel_size,
            num_running=running,
            num_waiting=waiting,
            kv_cache_usage=self._kv_cache_usage,
        )
        self._counters.record(share, perf_counter())
        if self.on_step is not None:
            self.on_step(stats)
        return outputs, share
