"""Ctrl-C while the program `nanovllm` imports the package: it ends the process at once, and says nothing.

The package imports this first, and this imports little. `caught_signals` takes its place. In the process of
any other program it changes nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from nanovllm.jobs.errors import INTERRUPTED


def is_program() -> bool:
    """Whether this process is `nanovllm ...` or `python -m nanovllm ...`."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # until its package is imported; the name stands before the arguments
        program = sys.orig_argv[-len(sys.argv)]
    return os.path.basename(program) == "nanovllm"


def end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(INTERRUPTED)


if is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
