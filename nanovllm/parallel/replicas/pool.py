"""Pool: the processes of the replicas, fed from one queue; a replica that ends restarts.

Owns the queue and the processes. Creates no requests and no text; starts no thread.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing import connection, current_process
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from nanovllm.answers import RequestOutput
from nanovllm.config import Config
from nanovllm.engine.stats import StepStats
from nanovllm.errors import WorkerError
from nanovllm.lifecycle import held_interrupts
from nanovllm.parallel.replicas.process import ReplicaProcess
from nanovllm.parallel.replicas.replica import (
    Call,
    Failure,
    Ready,
    Replica,
    Reply,
    Report,
    Settings,
    pack_request,
)
from nanovllm.parallel.replicas.router import Router
from nanovllm.parallel.watch import Progress, stalled_for
from nanovllm.parallel.worker import EXIT_SECONDS, check_open_files, disown
from nanovllm.text.prompts import Request

logger = logging.getLogger("nanovllm")

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")

MAX_RUNS = 3  # of a request whose replica ends each time; the last time it runs alone
MAX_FAILURES = 3  # of a replica in a row, without an answer in between
POLL_SECONDS = 0.1
_RANKS_SECONDS = 5.0  # the more that a replica of several ranks may be silent: it finds the rank that hangs
PHASES: dict[Callable[..., object], str] = {
    Replica.load_updates: "update_weights",
    Replica.give_up: "abort",
    Replica.begin_profile: "start_profile",
}
_LOOK_AHEAD = 8  # requests that the router chooses from, in multiples of max_num_seqs


class Arrival(NamedTuple):
    """The results of one step of a replica, or requests that are given up."""

    outputs: list[RequestOutput]  # packed
    lost: dict[int, str]  # the reason for each request that is given up, by id
    stats: StepStats | None
    replica: int  # its number


class Pool:
    """The processes of the replicas and the queue of their requests. Used by one thread at a time."""

    def __init__(self, configs: list[Config]) -> None:
        """Start a process for each configuration and wait until all are ready.

        Raises a replica's error, with its number, after ending all processes.
        """
        if current_process().daemon:
            raise RuntimeError(
                "a daemonic process cannot start replicas: create an LLM with data_parallel_size > 1 in the "
                "main process, or in one started with daemon=False"
            )
        check_open_files("data_parallel_size", len(configs))
        self._routes_by_prompt = configs[0].enable_prefix_caching
        self._members = [ReplicaProcess(number, config) for number, config in enumerate(configs)]
        self._settings: Settings = {}  # called at each start
        several = configs[0].tensor_parallel_size > 1
        self.limit = configs[0].distributed_timeout_seconds + several * _RANKS_SECONDS  # for silent replicas
        self._look_ahead = _LOOK_AHEAD * configs[0].max_num_seqs
        self._deltas = False  # whether replicas return parts of answers
        self.router = Router(len(configs), reach=2 * self._look_ahead)
        self._routed: dict[int, Request] = {}  # the requests that wait in the router, by id
        self._backlog: deque[Request] = deque()  # the requests behind them
        self._again: deque[Request] = deque()  # to run again
        self._alone: deque[Request] = deque()  # to run for the last time, alone
        self._num_lost: dict[int, int] = {}  # by request id: number of replicas that ended while it ran
        self._arrivals: deque[Arrival] = deque()
        self._replies: dict[int, Any] = {}  # by number of the replica: the result of its call
        self._is_starting = True
        os.register_at_fork(after_in_child=partial(disown, weakref.ref(self)))
        try:
            with held_interrupts():
                for member in self._members:
                    member.start(self._settings)
            self.wait_for_starts()
            self._is_starting = False
        except BaseException:
            self.kill()
            raise

    @property
    def processes(self) -> list[BaseProcess]:
        return [member.process for member in self._members if member.process is not None]

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, requests: list[Request], deltas: bool) -> None:
        """Queue requests, and send those for which replicas have room. deltas: as in `Executor.add`."""
        self._deltas = deltas
        self._backlog += requests
        self._feed()

    def next_arrival(self) -> Arrival | None:
        """The next arrival; None if none comes within POLL_SECONDS. Raises WorkerError if no replica is
        left."""
        if not self._arrivals:
            self._check_some_are_left()
            self._feed()
            self._receive()
        if not self._arrivals:
            return None
        arrival = self._arrivals.popleft()
        self._feed()
        return arrival

    def abort(self, request_id: int) -> list[RequestOutput] | Request:
        """End a request. Return the request if it has not run; else its packed output, and then what a stream
        yields of it, or nothing if it has ended."""
        with held_interrupts():
            while (request := self._unqueue(request_id)) is None:
                member = next((each for each in self._members if request_id in each.requests), None)
                if member is None:
                    return []
                for outputs in self._call([member], Replica.give_up, (request_id,)).values():
                    member.drop(request_id)
                    return outputs and [outputs[0], *self._take_parts(str(request_id)), *outputs[1:]]
            return request

    def _take_parts(self, request_id: str) -> list[RequestOutput]:
        """Remove the parts of a request's output from the arrivals, and return them."""
        parts = [part for each in self._arrivals for part in each.outputs if part.request_id == request_id]
        for each in self._arrivals:
            each.outputs[:] = [part for part in each.outputs if part.request_id != request_id]
        return parts

    def _unqueue(self, request_id: int) -> Request | None:
        """Remove a request from the queue; None if it is not there."""
        if self.router.remove(request_id):
            return self._routed.pop(request_id)
        for queue in (self._backlog, self._again, self._alone):
            for request in queue:
                if request.request_id == request_id:
                    queue.remove(request)
                    return request
        return None

    def clear(self) -> None:
        """Forget all requests. Replicas abort theirs after the current step; nothing waits for that."""
        with held_interrupts():
            self.router.clear()
            for queue in (self._routed, self._backlog, self._again, self._alone, self._num_lost):
                queue.clear()
            for member in self._members:
                if member.requests:
                    member.forget_requests()
                    member.send(Call(Replica.clear, (), has_reply=False))
            self._arrivals.clear()

    def call(self, call: Callable[Concatenate[Replica, P], T], *args: P.args, **options: P.kwargs) -> list[T]:
        """Call a method of every replica, between steps, with positional arguments; return the results of
        those that are up.

        Waits for replicas that are loading. Replicas run the call in parallel. One that sends nothing for
        `limit` seconds is killed and restarts. Raises a replica's error, with its number; WorkerError if no
        replica is left.
        """
        assert not options, "a message has positional arguments"
        self.wait_for_starts()
        self._check_some_are_left()
        with held_interrupts():
            values = self._call(self._members, call, args)
        for number, value in values.items():
            if isinstance(value, Failure):
                raise value.kind(f"replica {number}: {value.what}")
        return list(values.values())

    def wait_for_starts(self) -> None:
        """Wait until no replica is loading."""
        while any(member.process is not None and not member.is_ready for member in self._members):
            self._receive()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix caches of all replicas, which hold no requests; False if one of them is in use."""
        self.forget_prefixes()
        return all(self.call(Replica.reset_prefix_cache))

    def forget_prefixes(self) -> None:
        """Forget what the prefix caches hold: the replicas are about to empty them."""
        for member in self._members:
            self.router.forget(member.number)

    def set(self, call: Callable[[Replica, V], object], value: V) -> None:
        """Call a method of every replica and, if that succeeds, of every replica that restarts later."""
        before = self._settings
        self._settings = {**before, call: value}
        try:
            self.call(call, value)
        except BaseException:
            self._settings = before
            raise

    def is_set(self, call: Callable[..., object]) -> bool:
        """Whether replicas that restart call this method."""
        return call in self._settings

    def unset(self, *calls: Callable[..., object]) -> None:
        """Stop calling these methods of replicas that restart."""
        for call in calls:
            self._settings.pop(call, None)

    # -- the end ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask all replicas to exit and wait until they are gone; kill those that are loading."""
        with held_interrupts():
            for member in self._members:
                if member.is_ready:
                    member.send(None)
            for member in self._members:
                member.end(EXIT_SECONDS if member.is_ready else 0.0)

    def kill(self) -> None:
        with held_interrupts():
            for member in self._members:
                member.end(0.0)

    # -- inside ----------------------------------------------------------------------------------------------

    def _check_some_are_left(self) -> None:
        if all(member.process is None for member in self._members):
            reasons = "; ".join(member.why_it_ended for member in self._members)
            raise WorkerError(f"no replica is left: {reasons}")

    def _feed(self) -> None:
        """Send each replica requests while it has room; the replica with the least work comes first."""
        chosen: dict[int, list[Request]] = {}
        free = list(self._members)
        with held_interrupts():
            while self._refill() or self._again or self._alone:
                free = [each for each in free if each.has_room()]
                if not free:
                    break
                member = min(free, key=lambda each: each.cost)
                request, num_held_tokens = self._choose(member)
                if request is None:  # only requests that must run alone are left, and this replica is busy
                    free.remove(member)
                    continue
                member.take(request, num_held_tokens)
                chosen.setdefault(member.number, []).append(request)
            for number, requests in chosen.items():
                packed = [pack_request(request) for request in requests]
                self._members[number].send(Call(Replica.add, (packed, self._deltas), has_reply=False))

    def _refill(self) -> bool:
        """Give the next requests to the router; return whether it has any."""
        while self._backlog and len(self._routed) < self._look_ahead:
            request = self._backlog.popleft()
            self._routed[request.request_id] = request
            prompt = request.prompt_token_ids.tobytes() if self._routes_by_prompt else b""
            self.router.add(request.request_id, prompt)
        return bool(self._routed)

    def _choose(self, member: ReplicaProcess) -> tuple[Request | None, int]:
        """Choose the next request for a replica with room; also return how many of its tokens are cached
        there. None if there is no request for it."""
        if self._again:
            return self._again.popleft(), 0
        number = self.router.take(member.number)
        if number is not None:
            return self._routed.pop(number), self.router.num_held_tokens(member.number)
        if member.requests or not self._alone:
            return None, 0
        member.is_exclusive = True
        return self._alone.popleft(), 0

    def _receive(self) -> None:
        """Process received messages; wait up to POLL_SECONDS for one."""
        running = [member for member in self._members if member.process is not None]
        began = monotonic()
        ready = connection.wait([member.pipe for member in running], POLL_SECONDS)
        waited = min(monotonic() - began, POLL_SECONDS)  # this process may have been stopped meanwhile
        for member in running:
            with held_interrupts():
                if member.pipe in ready:
                    self._receive_from(member)
                elif member.silent_for(waited) > self.limit:
                    self._take_down_hanging(member)

    def _receive_from(self, member: ReplicaProcess) -> None:
        try:
            message = member.pipe.recv()
        except (EOFError, OSError):
            self._take_down(member)
            return
        member.silent_seconds = 0.0
        if isinstance(message, Report):
            if not member.hear(message.num_received, message.num_waiting):
                return
            outputs = [each for each in message.outputs if member.answer(each)]
            for output in outputs:
                self._num_lost.pop(int(output.request_id), None)
            self._arrivals.append(Arrival(outputs, {}, message.stats, member.number))
        elif isinstance(message, Reply):
            self._replies[member.number] = message.value
            member.called = None
        elif isinstance(message, Ready):
            member.is_ready = True
        elif not isinstance(message, Progress):
            member.failure = message

    def _call(
        self, members: list[ReplicaProcess], call: Callable[..., object], args: tuple[Any, ...]
    ) -> dict[int, Any]:
        """Call a method of replicas; return the replies by number, without replicas that are down, end or
        hang."""
        called = {member.number: member for member in members if member.is_ready}
        for member in called.values():
            member.called, member.silent_seconds = PHASES.get(call, call.__name__), 0.0
            member.send(Call(call, args))
        while any(member.called for member in called.values()):
            self._receive()
        return {number: self._replies.pop(number) for number in called if number in self._replies}

    def _take_down_hanging(self, member: ReplicaProcess) -> None:
        assert member.process is not None and member.phase is not None
        why = stalled_for(member.process, self.limit, member.phase)
        member.failure = Failure(WorkerError, f"it {why}")
        self._take_down(member)

    def _take_down(self, member: ReplicaProcess) -> None:
        """Requeue the requests of a replica that ended, and restart it unless it has failed too often."""
        member.end(0.0 if member.failure is not None else EXIT_SECONDS)
        why = member.why_it_ended
        if self._is_starting:
            failure = member.failure
            raise WorkerError(f"{why}, at its start") if failure is None else failure.kind(why)
        self.router.forget(member.number)
        member.num_failures += 1
        given_up: dict[int, str] = {}
        again = list(member.requests.values())
        for request in reversed(again):
            if (number := request.request_id) in member.begun:
                given_up[number] = f"its replica ended after a part of the answer was yielded: {why}"
            else:
                self._run_again(request, why, given_up)
        if given_up:
            member.num_failures = 0  # the request is to blame
            self._arrivals.append(Arrival([], given_up, None, member.number))
        if member.num_failures >= MAX_FAILURES:
            logger.warning("%s; it has ended %d time(s) in a row, and stays down", why, MAX_FAILURES)
            member.forget_requests()
            member.process = None
            return
        num_again = len(again) - len(given_up)
        logger.warning("%s; it is started again, and %d request(s) are run again", why, num_again)
        member.failure = None
        member.start(self._settings)

    def _run_again(self, request: Request, why: str, given_up: dict[int, str]) -> None:
        number = request.request_id
        count = self._num_lost[number] = self._num_lost.get(number, 0) + 1
        if count == MAX_RUNS:
            del self._num_lost[number]
            given_up[number] = f"{MAX_RUNS} replicas ended while it ran, the last time alone: {why}"
        elif count == MAX_RUNS - 1:
            self._alone.append(request)
        else:
            self._again.appendleft(request)
