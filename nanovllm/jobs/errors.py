"""How a job ends: its exit codes, and the exceptions that end it early.

The messages say what to do next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


class TooManyErrorsError(Exception):
    """There are more error rows than --max-errors allows."""


class JobFailedError(Exception):
    """The job cannot continue, for an external reason. All complete lines of the output are kept."""
