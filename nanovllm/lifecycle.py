"""Lifecycle: admits one caller at a time to an engine, in one process, and frees its resources once.

Owns no device, process or request: it only calls the function that frees them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from nanovllm.errors import EngineClosedError


def finalize(owner: object, free: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """As `weakref.finalize`: `free(*args)` is called once, when `owner` is collected or Python exits.

    A forked process has a copy of `owner` but does not own its resources: there nothing is freed.
    """
    pid = os.getpid()

    def free_here() -> None:
        if os.getpid() == pid:
            free(*args)

    return weakref.finalize(owner, free_here)


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

    def __init__(self, owner: object, free: Callable[[], None]) -> None:
        self._pid = os.getpid()
        self._free: Callable[[], None] | None = free
        self._closed = False
        self._lock = threading.RLock()
        self._caller: int | None = None  # the thread that is inside `calling`
        finalize(owner, self.close)
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
    def calling(self) -> Iterator[None]:
        """Give the block exclusive use of the engine; other threads wait until it ends.

        RuntimeError if this thread already uses the engine, such as in a callback or a signal handler.
        """
        self.check_open()
        if self._caller == threading.get_ident():
            raise RuntimeError(
                "this thread is already in a call of this engine; a callback or a signal handler must not "
                "make another call, let it set a flag instead"
            )
        with self._lock:
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

    def _free_once(self) -> None:
        free, self._free = self._free, None
        if free is not None:
            free()
