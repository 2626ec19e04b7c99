"""The signals that end a job: Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt between steps of the engine.

Holds the handlers for one block, and notes what came. Ends no process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nanovllm.jobs.errors import HUNG_UP, INTERRUPTED, TERMINATED

ENDS = {  # exit code and name
    signal.SIGINT: (INTERRUPTED, "Ctrl-C"),
    signal.SIGTERM: (TERMINATED, "SIGTERM"),
    signal.SIGHUP: (HUNG_UP, "SIGHUP"),
}


class Signals:
    """The signals that came, in order; the first one tells how the job ends."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._held = False

    @property
    def code(self) -> int:
        """The exit code."""
        return ENDS[signal.Signals(self.seen[0])][0] if self.seen else INTERRUPTED

    @property
    def name(self) -> str:
        return ENDS[signal.Signals(self.seen[0])][1] if self.seen else "Ctrl-C"

    def hold(self) -> None:
        """From here on only note signals: what is left to do is short, and must be done."""
        self._held = True

    def stop(self, number: int, frame: FrameType | None) -> None:
        """The handler. Every signal interrupts, so a second one ends a clean-up that takes too long."""
        self.seen.append(number)
        if self._held:
            return
        if number != signal.SIGINT and callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)  # the engine delays this one up to the end of its step
        else:  # itself, or Ctrl-C is ignored, as in the background
            raise KeyboardInterrupt


@contextmanager
def caught_signals() -> Iterator[Signals]:
    """Let the signals interrupt the block, except those that are ignored, as SIGHUP is under `nohup`.

    Within another such block it is the same one. Outside the main thread nothing is caught.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Signals()
        return
    before = {number: signal.getsignal(number) for number in ENDS}
    for handler in before.values():
        if isinstance(outer := getattr(handler, "__self__", None), Signals):
            yield outer
            return
    signals = Signals()
    caught = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in caught:
            signal.signal(number, signals.stop)
        yield signals
    finally:
        for number, old in caught.items():
            signal.signal(number, old)
