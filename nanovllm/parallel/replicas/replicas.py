"""Replicas: the Executor of several models, each in a process of its own, fed from one queue.

Keeps the requests as they came, and what a replica that restarts must repeat. Has no model on any device; the
Pool owns the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from time import perf_counter, time
from typing import Any

from nanovllm.answers import RequestMetrics, RequestOutput, changed
from nanovllm.device import Device
from nanovllm.engine.executor import Load
from nanovllm.engine.startup import OpenedModel
from nanovllm.engine.stats import StepStats
from nanovllm.lifecycle import held_interrupts
from nanovllm.parallel.replicas.pool import Pool
from nanovllm.parallel.replicas.replica import Replica, unpack_output
from nanovllm.residency.runner import TAGS, WEIGHTS, RankView
from nanovllm.residency.shared_tensors import SharedMemoryBuffer, SharedTensors
from nanovllm.residency.updates import check_dense, named_pairs, named_tensor
from nanovllm.text.prompts import Request

Update = tuple[SharedMemoryBuffer, SharedTensors]  # of one call of `update`, for replicas that restart


class Replicas:
    """See `ResidentExecutor`. Outputs and their seeds are those of one engine.

    A replica that ends restarts, and its unfinished requests run again. If three replicas in turn die with a
    request, its output has an `error`. WorkerError if no replica is left.
    """

    def __init__(self, model: OpenedModel) -> None:
        """Start `data_parallel_size` replicas and wait until all are ready."""
        config, size = model.config, model.config.tensor_parallel_size
        devices = Device(config.device).ranks(size, config.data_parallel_size)
        own = replace(config, max_model_len=model.max_model_len)  # what it differs in is said once
        self.pool = Pool([replace(own, device=device) for device in devices[::size]])
        self._num_replicas = config.data_parallel_size
        self._processor = model.processor
        self._requests: dict[str, tuple[Request, float]] = {}  # by id; when it came (perf_counter)
        self._last_stats: dict[int, StepStats] = {}  # by number of the replica
        self._peak_usage = 0.0
        self._epoch = time() - perf_counter()  # converts perf_counter to seconds since 1970
        self.asleep: frozenset[str] = frozenset()
        self._drops_weights = False  # they sleep without a copy
        self._updates: dict[int, Update] = {}  # by number, those that the current weights consist of
        self._num_updates = 0
        try:
            rooms = self.pool.call(Replica.get_room)
            self.room = min(rooms, key=lambda room: (room.max_model_len, room.num_blocks))
            self.pool.set(Replica.limit, self.room.max_model_len)
        except BaseException:
            self.pool.kill()
            raise

    @property
    def load(self) -> Load:
        """From the last report of each replica; the mean share of their blocks."""
        last = list(self._last_stats.values())  # a copy, because another thread may add to it
        running, waiting = sum(each.num_running for each in last), sum(each.num_waiting for each in last)
        usage = sum(each.kv_cache_usage for each in last) / self._num_replicas
        return Load(len(self._requests), running, waiting, usage, self._peak_usage)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, requests: list[Request], deltas: bool = False) -> None:
        now = perf_counter()
        for request in requests:
            self._requests[str(request.request_id)] = request, now
        self.pool.add(requests, deltas)

    def step(self) -> tuple[list[RequestOutput], StepStats | None]:
        """Return the results of the next step that a replica finishes; none if that takes longer than
        POLL_SECONDS."""
        arrival = self.pool.next_arrival() if self._requests else None
        if arrival is None:
            return [], None
        outputs = self._take_in(arrival.outputs)
        outputs += [self._given_up(request_id, why) for request_id, why in arrival.lost.items()]
        if arrival.stats is not None:
            self._last_stats[arrival.replica] = arrival.stats
            self._peak_usage = max(self._peak_usage, self.load.kv_cache_usage)
        return outputs, arrival.stats

    def share(self, stats: StepStats) -> StepStats:
        load = self.load
        return replace(
            stats,
            seconds=stats.seconds / self._num_replicas,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_cache_usage=load.kv_cache_usage,
        )

    def abort(self, request_id: str | int) -> tuple[RequestOutput | None, list[RequestOutput]]:
        request, _ = self._requests.get(str(request_id), (None, 0.0))
        found = [] if request is None else self.pool.abort(request.request_id)
        outputs = [self._unrun(found)] * 2 if isinstance(found, Request) else self._take_in(found)
        return next(iter(outputs), None), outputs[1:]

    def clear(self, failed: bool = False) -> bool:
        self._requests.clear()
        self.pool.clear()
        self._last_stats.clear()
        return bool(self.pool.processes)

    def _take_in(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return outputs, with their prompts and arrival times here, and forget requests that have ended."""
        unpacked = [self._unpacked(each, *self._requests[each.request_id]) for each in outputs]
        for each in outputs:
            if each.finished:
                self._requests.pop(each.request_id, None)
        return unpacked

    def _unpacked(self, packed: RequestOutput, request: Request, arrival: float) -> RequestOutput:
        output, metrics = unpack_output(packed, request, self._processor), packed.metrics
        if metrics is None:
            return output
        arrival, scheduled = self._epoch + arrival, metrics.first_scheduled_time
        in_queue = None if scheduled is None else scheduled - arrival
        return changed(output, metrics=replace(metrics, arrival_time=arrival, time_in_queue=in_queue))

    def _unrun(self, request: Request) -> RequestOutput:
        """Forget a request that was aborted before it ran, and return its output."""
        (_, arrival), processor = self._requests.pop(str(request.request_id)), self._processor
        ended = [processor.completion(request, index, [], "abort", None) for index in range(request.params.n)]
        completions = [processor.extras.with_logprobs(each, request, []) for each in ended]
        arrival, now = self._epoch + arrival, self._epoch + perf_counter()
        return processor.output(request, completions, RequestMetrics(arrival, finished_time=now), [])

    def _given_up(self, request_id: int, why: str) -> RequestOutput:
        """Forget a request that no replica survives, and return its output."""
        (request, _), error = self._requests.pop(str(request_id)), ValueError(why)
        return self._processor.extras.refused(request_id, request.index, request, error, error)

    # -- between requests ------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        return not self._requests and self.pool.reset_prefix_cache()

    def set_tokenizer(self, tokenizer: Any) -> None:
        self.pool.set(Replica.set_tokenizer, tokenizer)
        self._processor.tokenizer = tokenizer

    def start_profile(self, folder: str, name: str) -> None:
        """A replica that restarts begins its trace again."""
        if self.pool.is_set(Replica.begin_profile):
            raise RuntimeError("a profile is already on; call stop_profile() first")
        self.pool.set(Replica.begin_profile, (folder, name))

    def stop_profile(self) -> list[str]:
        if not self.pool.is_set(Replica.begin_profile):
            raise RuntimeError("no profile is on; call start_profile() first")
        self.pool.unset(Replica.begin_profile)
        return [path for paths in self.pool.call(Replica.stop_profile) for path in paths]

    def apply(self, function: Callable[[RankView], Any]) -> list[Any]:
        self.pool.forget_prefixes()
        return [result for results in self.pool.call(Replica.apply, function) for result in results]

    def sleep(self, level: int) -> None:
        self._drops_weights |= level > 1
        self.pool.unset(Replica.sleep, Replica.wake_up)  # a replica that restarts sleeps last
        self.pool.forget_prefixes()
        self.pool.set(Replica.sleep, 2 if self._drops_weights else 1)
        self.asleep = frozenset(TAGS)

    def wake_up(self, tags: frozenset[str]) -> None:
        self.pool.set(Replica.wake_up, tags)
        self.asleep -= tags
        if self._drops_weights and WEIGHTS in tags:
            self._drops_weights = False
            self.pool.unset(Replica.load_updates)
            self.pool.wait_for_starts()  # a replica that restarts may still read them
            self._forget_updates()
        if not self.asleep:
            self.pool.unset(Replica.sleep, Replica.wake_up)

    def update(self, tensors: Mapping[str, Any] | Iterable[Any]) -> None:
        """Copy the tensors to shared memory, where all replicas check and load them."""
        buffer = SharedMemoryBuffer(1, grows=True)
        try:
            for index, pair in enumerate(named_pairs(tensors)):
                name, tensor = named_tensor(index, pair)
                check_dense(name, tensor)
                buffer.put(name, tensor.detach())
        except BaseException:
            buffer.close()
            raise
        with held_interrupts():
            self.pool.forget_prefixes()
            self._load((buffer, buffer.take()))

    def _load(self, update: Update) -> None:
        """Have all replicas load an update, and forget earlier ones of which it leaves nothing."""
        self._num_updates += 1
        updates, names = {self._num_updates: update}, update[1].names
        for number, earlier in reversed(self._updates.items()):
            if not earlier[1].names <= names:
                updates[number] = earlier
                names |= earlier[1].names
        updates = dict(sorted(updates.items()))
        shared = {number: tensors for number, (_, tensors) in updates.items()}
        try:
            self.pool.set(Replica.load_updates, shared)
        except BaseException:
            update[0].close()
            raise
        self._updates, before = updates, self._updates
        for number in before.keys() - updates.keys():
            before[number][0].close()

    def _forget_updates(self) -> None:
        """Free the memory of all updates; replicas that restart have the checkpoint's weights."""
        self.pool.unset(Replica.load_updates)
        for buffer, _ in self._updates.values():
            buffer.close()
        self._updates = {}

    def close(self) -> None:
        self.pool.stop()
        self._forget_updates()
