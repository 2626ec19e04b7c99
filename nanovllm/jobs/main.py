"""The program `nanovllm`: which command a command line is for, and its exit code.

Imports a command's module when it is asked for: `run` needs torch, and a wrong argument must not wait for it.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

from nanovllm.jobs.arguments import parse_args
from nanovllm.jobs.errors import FAILED, INTERRUPTED, REFUSED, JobRefusedError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, without the program's name; return the exit code."""
    if sys.stderr is None:  # closed, as by `2>&-`
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, TextIOWrapper):  # names of files need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    args = parse_args(argv)
    try:
        code: int = importlib.import_module(f"nanovllm.jobs.{args.command}").main(args)
    except JobRefusedError as error:
        print(f"nanovllm {args.command}: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:  # Python's own exit code, 1, has another meaning
        with suppress(OSError):
            traceback.print_exc()
        return FAILED
    return code
