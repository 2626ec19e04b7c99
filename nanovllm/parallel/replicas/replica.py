"""Replica: one of several models that are alike, a Core in its own process, connected through a pipe.

Owns that process and its messages. Prompts arrive tokenised and requests numbered.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing import current_process
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from nanovllm.answers import RequestOutput, changed, unlisted
from nanovllm.config import Config
from nanovllm.engine.startup import open_model
from nanovllm.engine.stats import StepStats
from nanovllm.errors import KVCacheMemoryError, ModelLoadError, WorkerError
from nanovllm.extras.logprobs import LogprobDicts
from nanovllm.lifecycle import no_full_collections
from nanovllm.parallel.watch import Progress
from nanovllm.parallel.worker import exit_with, leave
from nanovllm.plan.sequence import Room
from nanovllm.residency.core import ResidentCore
from nanovllm.residency.shared_tensors import SharedTensors
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Request

KEPT_ERRORS = (ValueError, TypeError, KVCacheMemoryError, ModelLoadError)  # others become a WorkerError


Settings = dict[Callable[["Replica", Any], object], object]  # a method of `Replica` -> its argument

# Messages to a replica: a Call, or None to exit.


class Call(NamedTuple):
    """A method of `Replica` to call between steps."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    has_reply: bool = True  # whether a Reply follows


# Messages from a replica: Ready, then Reports and Replies; a Progress at any time; or a Failure as the last
# message.


class Ready(NamedTuple):
    """The model is loaded, and all that a restart repeats is done."""


class Report(NamedTuple):
    """The results of a step."""

    outputs: list[RequestOutput]  # packed; parts of them in a stream with deltas
    stats: StepStats | None
    num_received: int  # sequences since the start
    num_waiting: int  # sequences that wait now


class Reply(NamedTuple):
    """The result of a Call, or its Failure."""

    value: Any


class Failure(NamedTuple):
    """Why the replica ends, or why a Call failed."""

    kind: type[Exception]
    what: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        if type(error) in KEPT_ERRORS:
            return Failure(type(error), str(error))  # type: ignore[arg-type]
        return Failure(WorkerError, f"it failed:\n{traceback.format_exc()}")


# Messages leave out what the other side has or can compute.


def pack_request(request: Request) -> Request:
    """Remove the prompt's text and the compiled constraint."""
    return replace(request, prompt=None, constraint=None)


def _unpack_request(request: Request, processor: Processor) -> Request:
    """Compile the constraint again."""
    if request.params.structured_outputs is None:
        return request
    return replace(request, constraint=processor.extras.constraint(request.params))


def _pack_output(output: RequestOutput) -> RequestOutput:
    """Remove the prompt, and turn logprobs into (columns, number of None entries before them, the tokens
    before them)."""
    completions = [changed(each, logprobs=_pack_logprobs(each, "logprobs")) for each in output.outputs]
    logprobs = _pack_logprobs(output, "prompt_logprobs")
    return changed(output, prompt=None, prompt_token_ids=[], outputs=completions, prompt_logprobs=logprobs)


def unpack_output(output: RequestOutput, request: Request, processor: Processor) -> RequestOutput:
    """Restore the request's prompt, and logprobs with decoded tokens."""

    def unpacked(owner: object, name: str) -> Any:
        logprobs = unlisted(owner, name)
        if not isinstance(logprobs, tuple):
            return logprobs
        columns, num_unknown, before = logprobs
        return processor.extras.logprob_dicts(request.params, columns, num_unknown, before)

    completions = [changed(each, logprobs=unpacked(each, "logprobs")) for each in output.outputs]
    return changed(
        output,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=completions,
        prompt_logprobs=unpacked(output, "prompt_logprobs"),
    )


def _pack_logprobs(owner: object, name: str) -> Any:
    logprobs = unlisted(owner, name)
    if not isinstance(logprobs, LogprobDicts):
        return logprobs
    return logprobs.columns, logprobs.num_unknown, logprobs.before


class _Link:
    """The replica's end of the pipe. Two threads keep the pipe moving while the engine computes."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()

    def send(self, message: object) -> None:
        self._outbox.put(message)

    def receive(self) -> Any:
        """Wait for the next message and return it. Raises the error of its unpickling, if any."""
        message = self._inbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    def has_message(self) -> bool:
        return not self._inbox.empty()

    def flush(self) -> None:
        """Wait until all messages are sent. Nothing can be sent afterwards."""
        self._outbox.put(None)
        self._sender.join()

    def _receive(self) -> None:
        try:
            while True:
                self._inbox.put(self._pipe.recv())
        except (EOFError, OSError):
            os._exit(1)  # the caller's process is gone
        except Exception as error:  # for example, a class that does not exist here
            self._inbox.put(error)

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)


class Replica(ResidentCore):
    """A Core whose requests come from another process."""

    def __init__(self, number: int, config: Config, link: _Link) -> None:
        """number: the replica's. config: with its own device. link: tells the caller of progress."""
        super().__init__(open_model(config), lambda: link.send(Progress()))
        self._number = number
        self._num_updates = 0  # the number of the last weight update that it has
        self._num_received = 0  # sequences

    def serve(self, link: _Link) -> None:
        """Process messages until None arrives."""
        while True:
            while link.has_message() or not self.num_requests:
                message = link.receive()
                if message is None:
                    return
                try:
                    value = self.run(message)
                except KEPT_ERRORS as error:
                    if not message.has_reply:
                        raise
                    value = Failure.of(error)
                if message.has_reply:
                    link.send(Reply(value))
            with no_full_collections():
                outputs, stats = self.step()
            packed = [_pack_output(output) for output in outputs]
            link.send(Report(packed, stats, self._num_received, self.load.num_waiting))

    def run(self, call: Call) -> Any:
        """The answer to a call."""
        return call.function(self, *call.args)

    # -- calls -----------------------------------------------------------------------------------------------

    def get_room(self) -> Room:
        """Which prompts fit."""
        return self.room

    def limit(self, max_model_len: int) -> None:
        """Lower the maximum length of sequences to what all replicas have memory for. There are no requests.

        KVCacheMemoryError if there is less room here."""
        if (most := self.room.max_model_len) < max_model_len:
            raise KVCacheMemoryError(
                f"the KV cache has room for {most} tokens, but at first all replicas had room for "
                f"{max_model_len}; close other programs on the device, or start again with "
                f"max_model_len={most}"
            )
        self.room = replace(self.room, asked=max_model_len)
        self.scheduler = self._make_scheduler(self._config, self.room)

    def add(self, requests: list[Request], deltas: bool = False) -> None:
        """As `Executor.add`, of packed requests."""
        unpacked = [_unpack_request(request, self.requests.processor) for request in requests]
        self._num_received += sum(request.params.n for request in requests)
        super().add(unpacked, deltas)

    def give_up(self, request_id: int) -> list[RequestOutput]:
        """End a request. Return the output, and then what a stream yields of it; nothing if the request has
        ended."""
        output, parts = self.abort(request_id)
        return [] if output is None else [_pack_output(each) for each in (output, *parts)]

    def load_updates(self, updates: dict[int, SharedTensors]) -> None:
        """Load weight updates, in the order of their numbers, except those that this replica has. Each one is
        checked as a whole."""
        for number, tensors in updates.items():
            if number > self._num_updates:
                self.update(list(tensors))
                self._num_updates = number

    def begin_profile(self, trace: tuple[str, str]) -> None:
        """trace: the folder and the name of the traces of all replicas."""
        self.start_profile(trace[0], f"replica{self._number}.{trace[1]}")


def replica_main(number: int, config: Config, settings: Settings, pipe: Connection, parent: int) -> None:
    """The main function of a replica's process; it never returns.

    config: the engine's, with the replica's own device.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's process handles Ctrl-C
    current_process().daemon = False  # multiprocessing does not let daemonic processes start workers
    threading.Thread(target=exit_with, args=(parent,), daemon=True).start()
    link = _Link(pipe)
    try:
        if config.device == "cpu":
            threads = config.num_threads or torch.get_num_threads()
            torch.set_num_threads(max(1, threads // config.data_parallel_size))
        replica = Replica(number, replace(config, data_parallel_size=1, num_threads=None), link)
        with closing(replica):
            for function, value in settings.items():
                function(replica, value)
            gc.freeze()  # existing objects stay
            link.send(Ready())
            replica.serve(link)
    except BaseException as error:  # report everything to the caller
        link.send(Failure.of(error))
        link.flush()
    leave()  # at once: the libraries need no clean-up
