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
from types import FrameType

_SELDOM = 100  # times as many new objects before a collection of those
_NEVER = 2**30  # collections of younger objects before one of all


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Run the block to its end; a SIGINT in between acts after it.

    The handler that was set before is called then, which for Python's own raises KeyboardInterrupt. When the
    block raises, its exception comes first and carries on alone. Changes nothing outside the main thread.
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
    """Put Python's full garbage collections off, which look at every object there is: with torch and
    transformers loaded that takes 0.1 s, twenty steps long. Those of young objects go on, more seldom: they
    look at every id of new prompts."""
    young, middle, old = gc.get_threshold()
    held = old == _NEVER  # by another engine's thread, which will set it back
    try:
        if not held:
            gc.set_threshold(_SELDOM * young, middle, _NEVER)
        yield
    finally:
        if not held:
            gc.set_threshold(young, middle, old)
