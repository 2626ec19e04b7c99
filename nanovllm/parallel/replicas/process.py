"""ReplicaProcess: one replica from the caller's side: a process, a pipe, and its requests in flight.

Starts and ends the process. Decides neither what it computes nor whether it restarts.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGCONT
from socket import SO_SNDTIMEO, SOL_SOCKET, socket
from struct import pack

from nanovllm.answers import RequestOutput
from nanovllm.config import Config
from nanovllm.parallel.replicas.replica import Failure, Settings, replica_main
from nanovllm.parallel.watch import KILLED_SECONDS, how_it_ended
from nanovllm.parallel.worker import start_process
from nanovllm.text.prompts import Request

_SEND_SECONDS = 30  # for a message; a thread of the replica reads at all times


class ReplicaProcess:
    """A replica, which may be loading, ready, or down."""

    def __init__(self, number: int, config: Config) -> None:
        """config: the engine's, with the replica's own device."""
        self.number = number
        self._config = config
        self.process: BaseProcess | None = None  # None: it is down
        self.pipe: Connection  # to the process
        self.is_ready = False
        self.failure: Failure | None = None  # the last one
        self.num_failures = 0  # since it last answered a request
        self.why_it_ended = ""  # the last time
        self.requests: dict[int, Request] = {}  # in flight, by id
        self.begun: set[int] = set()  # of these, the ids of those with parts that were yielded
        self.is_exclusive = False  # the request in flight must run alone
        self.cost = 0.0  # of all requests in flight
        self.called: str | None = None  # the method of which a reply is due
        self.silent_seconds = 0.0  # waiting time without a message
        self._num_seqs = 0  # in flight
        self._num_sent = 0  # sequences
        self._num_forgotten = 0  # of these, by `forget_requests`
        self._waiting: deque[int] = deque()  # tokens to compute, for each sequence that may still wait
        self._num_waiting_tokens = 0  # their sum

    def start(self, settings: Settings) -> None:
        """Start the process. It loads the model, calls the methods `settings` of `Replica`, and sends
        Ready."""
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=replica_main,
            args=(self.number, self._config, settings, theirs, os.getpid()),
            name=f"nanovllm replica {self.number}",
            daemon=True,
        )
        start_process(self.process)
        with socket(fileno=os.dup(self.pipe.fileno())) as end:
            end.settimeout(None)  # else the pipe would not block after a call of socket.setdefaulttimeout
            end.setsockopt(SOL_SOCKET, SO_SNDTIMEO, pack("ll", _SEND_SECONDS, 0))
        theirs.close()  # the replica has the only copy, so the pipe ends with the replica
        self.is_ready = False
        self.called = None
        self.silent_seconds = 0.0
        self._num_sent = 0
        self.forget_requests()

    def forget_requests(self) -> None:
        """Count all requests in flight as ended."""
        self.requests.clear()
        self.begun.clear()
        self.is_exclusive = False
        self.cost = 0.0
        self._num_forgotten = self._num_sent
        self._num_seqs = self._num_waiting_tokens = 0
        self._waiting.clear()

    def has_room(self) -> bool:
        """Whether to send another request: the batch and an eighth more are not full, and the waiting tokens
        are less than two prefill steps."""
        if not self.is_ready or self.is_exclusive:
            return False
        config = self._config
        most = config.max_num_seqs + max(1, config.max_num_seqs // 8)
        is_short = self._num_waiting_tokens < 2 * config.max_num_batched_tokens
        return not self.requests or (self._num_seqs < most and is_short)

    def take(self, request: Request, num_held_tokens: int) -> None:
        """Count a request as in flight; the caller sends it. num_held_tokens: tokens of its prompt that the
        replica's prefix cache holds."""
        self.requests[request.request_id] = request
        self.cost += _cost_of(request)
        self._num_seqs += request.params.n
        self._num_sent += request.params.n
        num_new = len(request.prompt_token_ids) - num_held_tokens
        self._waiting += [num_new, *[0] * (request.params.n - 1)]  # samples share the prompt
        self._num_waiting_tokens += num_new

    def answer(self, output: RequestOutput) -> bool:
        """Count a request as ended, or as begun if this is a part of its output; False if it is not in
        flight."""
        request_id = int(output.request_id)
        if request_id not in self.requests:
            return False
        self.num_failures = 0
        if output.finished:
            self.drop(request_id)
        else:
            self.begun.add(request_id)
        return True

    def drop(self, request_id: int) -> Request | None:
        """Count a request as ended; None if it is not in flight."""
        request = self.requests.pop(request_id, None)
        self.begun.discard(request_id)
        if request is not None:
            self.cost -= _cost_of(request)
            self._num_seqs -= request.params.n
            self.is_exclusive = False
        return request

    def hear(self, num_received: int, num_waiting: int) -> bool:
        """Update the waiting sequences from a report: the number received, and how many of the last wait.

        False, without an update, if the report is about forgotten requests.
        """
        if num_received <= self._num_forgotten:
            return False
        while len(self._waiting) > self._num_sent - num_received + num_waiting:
            self._num_waiting_tokens -= self._waiting.popleft()
        return True

    @property
    def phase(self) -> str | None:
        """What the replica does that someone waits for; None if it is idle."""
        if not self.is_ready:
            return "the start"
        return self.called or ("a step" if self.requests else None)

    def silent_for(self, seconds: float) -> float:
        """Count seconds without a message; return their sum since the last message. It is 0 for an idle
        replica."""
        self.silent_seconds = self.silent_seconds + seconds if self.phase else 0.0
        return self.silent_seconds

    def send(self, message: object) -> None:
        """Send a message. It is lost if the replica has ended. A replica that does not read is killed."""
        try:
            self.pipe.send(message)
        except BlockingIOError:
            assert self.process is not None
            self.process.kill()
        except OSError:
            pass  # the next read from the pipe notices the end

    def end(self, seconds: float) -> None:
        """Wait for the process to end, kill it after `seconds`, and close the pipe."""
        self.is_ready = False
        self.called = None
        if self.process is None:
            return
        if self.process.pid is not None:
            self.process.join(seconds)
            if self.process.exitcode is None:
                ranks = _children(self.process.pid)
                self.process.kill()
                for pid in ranks:  # they end with the replica, but not if they are stopped
                    with suppress(ProcessLookupError):
                        os.kill(pid, SIGCONT)
                self.process.join(KILLED_SECONDS)
            how = f" {how_it_ended(self.process.exitcode or 0)}"
            why = how if self.failure is None else f": {self.failure.what}"
            self.why_it_ended = f"replica {self.number}{why}"
        self.pipe.close()


def _children(pid: int) -> list[int]:
    """The processes that process `pid` started."""
    try:
        lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has just ended
        return []
    return [int(child) for each in lists for child in each]


def _cost_of(request: Request) -> float:
    """The estimated work of a request, in output tokens. A prompt token counts as an eighth."""
    max_tokens = request.params.max_tokens
    return len(request.prompt_token_ids) / 8 + request.params.n * (1024 if max_tokens is None else max_tokens)
