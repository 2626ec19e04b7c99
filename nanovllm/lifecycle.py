"""Lifecycle: admits one caller at a time to an engine, in one process, and frees its resources once.

Also delays what would interrupt a step: Ctrl-C, so that all ranks make the same calls, and Python's full
garbage collections. Owns no device, process or request: it only calls the function that frees them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from time import sleep
from types import FrameType
from typing import Any, TypeVar

from nanovllm.errors import EngineClosedError

T = TypeVar("T")

_STREAM_SECONDS = 0.05  # how often a waiting call checks whether another thread's stream has ended
_SELDOM = 100  # factor of the threshold of new objects
_NEVER = 2**30  # threshold of younger collections before a full one


def _keep_forever(reference: weakref.ref[Any]) -> None:
    """In a forked process, never let the object be collected: GPU libraries abort if a process frees what
    another one created. Python drops its own references at exit, so this adds one in C."""
    owner = reference()
    if owner is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


class Lifecycle:
    """Open from its creation until `close`, which calls `free` as soon as no caller is left.

    `owner` is the engine. Its garbage collection closes it, and so does the end of the process, before Python
    unloads its modules. `free` must not refer to `owner`.
    """

    def __init__(self, owner: object, *free: Callable[[], None]) -> None:
        self._pid = os.getpid()
        self._free = free
        self._closed = False
        self._lock = threading.RLock()
        self._caller: int | None = None  # the thread that is inside `calling`
        self._stream: object = None  # the open one
        self._stream_thread: threading.Thread | None = None  # the one that last used it
        self._visits: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # see `visit`
        weakref.finalize(owner, self.close)
        os.register_at_fork(after_in_child=partial(_keep_forever, weakref.ref(owner)))

    def check_open(self) -> None:
        """Raise EngineClosedError if the engine is closed, or belongs to another process."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this engine belongs to process {self._pid}, and this is process {os.getpid()}, forked from "
                "it; call it there, or make a new LLM in a process started with 'spawn'"
            )
        if self._closed:
            raise EngineClosedError("this engine is closed; make a new LLM")

    @contextmanager
    def calling(self, stream: object = None, beside: bool = False) -> Iterator[None]:
        """Give the block exclusive use of the engine; other threads wait until it ends.

        stream: the open stream that makes the call. Without one, this waits until no stream is open, unless
        `beside` is True. RuntimeError if this thread has the open stream, or already uses the engine, such as
        in a callback or a signal handler.
        """
        self._check_outside()
        try:
            while True:
                with self._lock:
                    if beside or self._stream is stream:
                        if stream is not None:
                            self._stream_thread = threading.current_thread()
                        with self._as_caller():
                            yield
                        return
                self._wait_for_stream()
        finally:
            self._admit_if_free()

    def open_stream(self, stream: object) -> None:
        """From now on only calls of `stream` run, or beside it, until `end_stream`. Called within a call."""
        self._stream, self._stream_thread = stream, threading.current_thread()

    def end_stream(self) -> None:
        self._stream_thread = None
        self._stream = None  # last: from now on another one may open

    def _wait_for_stream(self) -> None:
        """Wait until no stream is open. RuntimeError if its thread cannot end it meanwhile."""
        while (thread := self._stream_thread) is not None:
            self.check_open()
            if thread is threading.current_thread() or not thread.is_alive():
                raise RuntimeError("a stream of this engine is open; take all of its outputs, or close() it")
            sleep(_STREAM_SECONDS)

    @contextmanager
    def _as_caller(self) -> Iterator[None]:
        self._caller = threading.get_ident()
        try:
            self.check_open()
            yield
        except BaseException:
            if self._closed:
                # The device may repeat the error of the failed step; the original one is clearer.
                with suppress(RuntimeError):
                    self._free_once()
            raise
        finally:
            self._caller = None
        if self._closed:
            self._free_once()

    def visit(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result: at once if no call runs, else in the running call's thread,
        between its steps. RuntimeError if this thread already uses the engine."""
        self._check_outside()
        outcome: Future[T] = Future()
        self._visits.append((work, outcome))
        self._admit_if_free()  # else the running call admits it, at the latest when it ends
        try:
            return outcome.result()
        except BaseException:
            outcome.cancel()  # after Ctrl-C nobody waits for it
            raise

    def admit(self) -> None:
        """Run the visits that other threads ask for. The running call does so between its steps."""
        while self._visits:
            work, outcome = self._visits.popleft()
            if not outcome.set_running_or_notify_cancel():
                continue
            try:
                self.check_open()
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)
                if not isinstance(error, Exception):
                    raise

    def _admit_if_free(self) -> None:
        # A visit that comes while the lock is taken is seen by this loop of the thread that releases it.
        while self._visits and self._lock.acquire(blocking=False):
            try:
                self._caller = threading.get_ident()
                self.admit()
            finally:
                self._caller = None
                self._lock.release()

    def _check_outside(self) -> None:
        self.check_open()
        if self._caller == threading.get_ident():
            raise RuntimeError(
                "this thread is already in a call of this engine; a callback or a signal handler must not "
                "make another call, let it set a flag instead"
            )

    def close(self) -> None:
        """Close the engine. A second call does nothing, and so does a call in a forked process.

        A running call, of another thread or this one, ends with EngineClosedError at its next `check_open`;
        the engine is freed then. If the running call is another thread's, this call waits for it.
        """
        if os.getpid() != self._pid:
            return
        self._closed = True
        if self._caller != threading.get_ident():
            with self._lock:
                self._free_once()
            self._admit_if_free()

    def _free_once(self) -> None:
        all_of_it, self._free = self._free, ()
        for free in all_of_it:
            free()


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Run the block to its end; a SIGINT during the block acts after it.

    Then the previous handler is called; Python's default raises KeyboardInterrupt. If the block raises, its
    exception propagates and the SIGINT is dropped. Does nothing outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(previous):  # ignored, the system's own, or set by a C library
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        previous(*held[-1])


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Delay Python's full garbage collections. They visit every object, which with torch and transformers
    takes 0.1 s, as long as twenty steps. Collections of young objects, which visit the token ids of new
    prompts, run less often."""
    young, middle, old = gc.get_threshold()
    held = old == _NEVER  # by another engine's thread, which will restore it
    try:
        if not held:
            gc.set_threshold(_SELDOM * young, middle, _NEVER)
        yield
    finally:
        if not held:
            gc.set_threshold(young, middle, old)
