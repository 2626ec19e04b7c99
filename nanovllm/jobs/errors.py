"""How a job ends: its exit codes, and the exceptions and signals that end it early.

The messages say what to do next. Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt between steps of the
engine. Ends no process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
    """The signals that came, in order; the first one tells how the job ends."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._held = False

    @property
    def end(self) -> tuple[int, str]:
        """The exit code, and the name of the signal."""
        return _ENDS[self.seen[0] if self.seen else signal.SIGINT]

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
    before = {number: signal.getsignal(number) for number in _ENDS}
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
