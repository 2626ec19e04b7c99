"""Lifecycle: who may use an engine, and when what it owns is freed. One caller at a time, in one process.

Owns no device, no process and no request: it only calls what frees them, once.
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

    A forked process has copies of `owner` and of this, and what is freed is not its own: it frees nothing.
    """
    pid = os.getpid()

    def free_here() -> None:
        if os.getpid() == pid:
            free(*args)

    return weakref.finalize(owner, free_here)


def _keep_for_ever(reference: weakref.ref[Any]) -> None:
    """In a forked process, never let the object be collected: a GPU's libraries abort when something is freed
    that another process made. Python's own references end with its modules, so this is one more in C."""
    owner = reference()
    if owner is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


class Lifecycle:
    """Open from its creation until `close`, which calls `free` once no caller is left.

    `owner` is the engine: its collection closes it, and so does the end of the process, before Python takes
    its modules apart. `free` must not refer to it.
    """

    def __init__(self, owner: object, free: Callable[[], None]) -> None:
        self._pid = os.getpid()
        self._free: Callable[[], None] | None = free
        self._closed = False
        self._lock = threading.RLock()
        self._caller: int | None = None  # the thread that is inside `calling`
        finalize(owner, self.close)
        os.register_at_fork(after_in_child=partial(_keep_for_ever, weakref.ref(owner)))

    def check_open(self) -> None:
        """Raise EngineClosedError when the engine is closed, or belongs to another process."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this engine belongs to process {self._pid}, and this is process {os.getpid()}, forked from "
                "it; call it there, or make a new LLM in a process started with 'spawn'"
            )
        if self._closed:
            raise EngineClosedError("this engine is closed; make a new LLM")

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Let the block use the engine alone; another thread's waits until it is done.

        RuntimeError in the thread that uses it already, such as in a callback or a signal handler.
        """
        self.check_open()
        if self._caller == threading.get_ident():
            raise RuntimeError(
                "this thread is in a call of this engine already; a callback or a signal handler must not "
                "make another, let it set a flag instead"
            )
        with self._lock:
            self._caller = threading.get_ident()
            try:
                self.check_open()
                yield
            except BaseException:
                if self._closed:
                    # The device's RuntimeError is about the step that failed: there is a better one.
                    with suppress(RuntimeError):
                        self._free_once()
                raise
            finally:
                self._caller = None
            if self._closed:
                self._free_once()

    def close(self) -> None:
        """Close; a second call does nothing, nor does one in a forked process.

        A call that is going on, in another thread or in this one, ends with EngineClosedError at its next
        `check_open`; what the engine owns is freed then, and another thread waits for it here.
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
