"""The program `nanovllm`: runs the command of a command line and returns its exit code.

Imports a command's module only on use: `run` needs torch, and a wrong argument should not wait for it.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import NoReturn

from nanovllm.jobs.arguments import parse_args
from nanovllm.jobs.errors import FAILED, READER_LEFT, REFUSED, JobRefusedError, Signals, caught_signals

_MODULES = {"run": "run", "check": "check", "version": "check"}  # of the commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, without the program's name; return the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed; without this the next opened file gets its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for as long as the process lives)
    if isinstance(sys.stdout, TextIOWrapper):  # file names may not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    args = parse_args(argv)
    with caught_signals() as signals:
        code = _code(args, signals)
        if signals.seen:
            _leave(code)
        return code


def _code(args: argparse.Namespace, signals: Signals) -> int:
    """Run a command; return its exit code."""
    try:
        module = importlib.import_module(f"nanovllm.jobs.{_MODULES[args.command]}")
        code: int = getattr(module, args.command)(args)
        sys.stdout.flush()
    except JobRefusedError as error:
        print(f"nanovllm {args.command}: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return signals.end[0]
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's own flush at exit is silent
        return READER_LEFT
    except Exception:  # Python's own exit code, 1, has another meaning
        if signals.seen:  # an import that is interrupted may raise anything
            return signals.end[0]
        with suppress(OSError):
            traceback.print_exc()
        return FAILED
    return code


def _leave(code: int) -> NoReturn:
    """End this process and its children at once. Python's own exit may wait for an engine whose close was
    interrupted, and a further signal would change the code."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
