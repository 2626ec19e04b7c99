"""How a job ends: its exit codes, and the exceptions and signals that end it early.

The messages say what to do next. While rows run, Ctrl-C, SIGTERM and SIGHUP are looked at between steps of
the engine and between rows; before and after that they raise KeyboardInterrupt at once. Ends no process.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nanovllm.errors import NanoVLLMError, WorkerError

ANSWERED = 0  # every row has an answer
ERROR_ROWS = 1  # every row was run, and some are error rows
REFUSED = 2  # nothing was run: a wrong argument, or an output that belongs to another job
TOO_MANY_ERRORS = 3  # stopped by --max-errors
FAILED = 4  # the disk, the device or the engine failed; the same command resumes
HUNG_UP = 129  # SIGHUP, because the terminal was closed; the same command resumes
INTERRUPTED = 130  # Ctrl-C; the same command resumes
READER_LEFT = 141  # the reader of standard output, such as `head`, closed it early
TERMINATED = 143  # SIGTERM; the same command resumes


class JobRefusedError(Exception):
    """The command cannot run; nothing was run or written."""


@contextmanager
def refusing(where: str = "") -> Iterator[None]:
    """Raise errors of the block as JobRefusedError; `where` is put before the message."""
    try:
        yield
    except WorkerError:  # a process ended, for example; no value is wrong
        raise
    except (NanoVLLMError, TypeError, ValueError) as error:
        raise JobRefusedError(f"{where}{error}") from None


class JobFailedError(Exception):
    """The job cannot continue, for an external reason or because of too many error rows, as its code says.
    All complete lines of the output are kept."""

    def __init__(self, why: str, code: int = FAILED) -> None:
        super().__init__(why)
        self.code = code


_ENDS: dict[int, tuple[int, str]] = {  # exit code and name
    signal.SIGINT: (INTERRUPTED, "Ctrl-C"),
    signal.SIGTERM: (TERMINATED, "SIGTERM"),
    signal.SIGHUP: (HUNG_UP, "SIGHUP"),
}


class Signals:
    """The signals that came, in order; the first one tells how the job ends.

    A handler that raises is not enough: Python prints and drops what is raised within a callback of a weak
    reference, `__del__` or the garbage collector. So `check` raises at every safe point, too.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._before: dict[int, Any] = {}  # the handlers that come back at the end
        self._waits = False
        self._held = False

    @property
    def end(self) -> tuple[int, str]:
        """The exit code, and the name of the signal."""
        return _ENDS[self.seen[0] if self.seen else signal.SIGINT]

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came."""
        if self.seen and not self._held:
            raise KeyboardInterrupt

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """In the block the first signal only lets `check` raise."""
        self._waits = True
        try:
            self.check()
            yield
        finally:
            self._waits = False
        self.check()

    def hold(self) -> None:
        """From here on only note signals: what is left to do is short, and must be done."""
        self._held = True

    def ignore(self) -> None:
        """From here on signals change nothing, also after the block of `caught_signals`: nothing is left to
        stop, and the end of Python would lose the exit code."""
        self._held = True
        self._before = dict.fromkeys(self._before, signal.SIG_IGN)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """The handler. Every signal but the first raises at once: it ends a step or a clean-up that takes too
        long."""
        self.seen.append(number)
        if self._held or (self._waits and len(self.seen) == 1):
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
    before = {number: signal.getsignal(number) for number in _ENDS}
    for handler in before.values():
        if isinstance(outer := getattr(handler, "__self__", None), Signals):
            yield outer
            return
    signals = Signals()
    signals._before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    print_dropped = sys.unraisablehook

    def dropped(error: Any) -> None:
        if not (signals.seen and issubclass(error.exc_type, KeyboardInterrupt)):  # `check` raises it again
            print_dropped(error)

    try:
        sys.unraisablehook = dropped
        for number in signals._before:
            signal.signal(number, signals.stop)
        yield signals
    finally:
        signals.hold()
        for number, old in signals._before.items():
            signal.signal(number, old)
        sys.unraisablehook = print_dropped
