"""Ctrl-C at a safe place: SIGINT is held back while ranks would fall out of step, then acts as it would have.

Owns no state beyond one `with` block; changes nothing outside the main thread.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class HeldInterrupts:
    """`with HeldInterrupts():` runs the block to its end; a SIGINT in between acts after it.

    The handler that was set before is called then, which for Python's own raises KeyboardInterrupt. When the
    block raises, its exception comes first and carries on alone.
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
