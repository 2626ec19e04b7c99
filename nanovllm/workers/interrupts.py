"""What must not come between the steps of a batch is held back, then acts as it would have: Ctrl-C while
ranks would fall out of step, and Python's full garbage collections.

Owns no state beyond one `with` block.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_NEVER = 2**30  # collections of younger objects before one of all


class HeldInterrupts:
    """`with HeldInterrupts():` runs the block to its end; a SIGINT in between acts after it.

    The handler that was set before is called then, which for Python's own raises KeyboardInterrupt. When the
    block raises, its exception comes first and carries on alone. Changes nothing outside the main thread.
    """

    def __enter__(self) -> HeldInterrupts:
        self._held: tuple[int, FrameType | None] | None = None
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # neither ignored, nor the system's own, nor set by a C library
                self._previous = handler
                signal.signal(signal.SIGINT, self._hold)
        return self

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        if self._held is not None and kind is None:
            self._previous(*self._held)


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Put Python's full garbage collections off, which look at every object there is: with torch and
    transformers loaded that takes 0.1 s, twenty steps long. Those of young objects go on."""
    young, middle, old = gc.get_threshold()
    held = old == _NEVER  # by another engine's thread, which will set it back
    try:
        if not held:
            gc.set_threshold(young, middle, _NEVER)
        yield
    finally:
        if not held:
            gc.set_threshold(young, middle, old)
