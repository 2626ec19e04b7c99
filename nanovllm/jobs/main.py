"""The program `nanovllm`: runs the command of a command line and returns its exit code.

Imports a command's module only on use: `run` needs torch, and a wrong argument should not wait for it.
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
from nanovllm.jobs.errors import FAILED, INTERRUPTED, READER_LEFT, REFUSED, JobRefusedError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, without the program's name; return the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed; without this the next opened file gets its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for as long as the process lives)
    if isinstance(sys.stdout, TextIOWrapper):  # file names may not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    args = parse_args(argv)
    try:
        code: int = importlib.import_module(f"nanovllm.jobs.{args.command}").main(args)
        sys.stdout.flush()
    except JobRefusedError as error:
        print(f"nanovllm {args.command}: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's own flush at exit is silent
        return READER_LEFT
    except Exception:  # Python's own exit code, 1, has another meaning
        with suppress(OSError):
            traceback.print_exc()
        return FAILED
    return code
