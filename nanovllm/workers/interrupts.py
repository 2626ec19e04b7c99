"""Delays interruptions during steps: Ctrl-C, so that all ranks make the same calls, and Python's full garbage
collections.

Owns no state beyond one `with` block.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SELDOM = 100  # factor of the threshold of new objects
_NEVER = 2**30  # threshold of younger collections before a full one


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
