"""Jobs that SIGKILL ends.

Each is a process of its own, forked from a server that has imported everything and has one thread.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401 (the server imports them once)

from nanovllm import LLM

CHANGES = ("open", "ftruncate", "truncate", "fsync", "replace", "unlink")  # functions of `os`, like write
# `python -c` with one of these and the arguments of nanovllm is a job that cannot end before a test has seen
# its first rows, however late the test looks.
SLOW_STEPS = """
import functools, time
from nanovllm.__main__ import program
from nanovllm.runner.model_runner import ModelRunner
launch, quick = ModelRunner.launch, iter(range({quick}))

@functools.wraps(launch)  # ranks call it by its name
def slow(self, batch):
    if next(quick, None) is None:
        time.sleep({seconds})
    return launch(self, batch)

ModelRunner.launch = slow
program()
"""
WAITING_FOR_A_FILE = """
import time
from pathlib import Path
from nanovllm import LLM
from nanovllm.__main__ import program
stream = LLM.stream

def waiting(self, *args, **options):
    for number, output in enumerate(stream(self, *args, **options)):
        while number == {rows} and not Path({path!r}).exists():
            time.sleep(0.01)
        yield output

LLM.stream = waiting
program()
"""
PIECE = 512  # bytes that a buffered file writes at once
FORKED = multiprocessing.get_context("forkserver")


@contextmanager
def fork_server() -> Iterator[None]:
    """Have processes of FORKED forked from one that imported this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        FORKED.set_forkserver_preload([__name__])
        yield


def run_and_kill(
    argv: list[Any],
    stdin: Path,
    *,
    change: int | None = None,
    seconds: float | None = None,
    make_llm: Callable[..., Any] = LLM,
) -> int | None:
    """Run a job in a forked process and return its exit code, or -9 if SIGKILL came first.

    The signal comes after `seconds`, or when the job has changed files `change` times and does so again.
    """
    process = FORKED.Process(target=job, args=(argv, stdin, change, make_llm))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode


def job(argv: list[Any], stdin: Path, change: int | None, make_llm: Callable[..., Any]) -> None:
    """Run a job as this process."""
    torch.set_num_threads(1)
    sys.stdin = stdin.open()
    if change is not None:
        kill_at(change)
    sys.exit(
        run(*argv, "--device", "cpu", "--max-num-seqs", 4, "--num-kvcache-blocks", 99, make_llm=make_llm)
    )


def kill_at(change: int) -> None:
    """End this process before its change of a file with this number, or in the middle of what it writes."""
    left = change

    def count(write: Callable[[], object] = lambda: None) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            write()
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted_call(*args: Any, **options: Any) -> Any:
            count()
            return call(*args, **options)

        return counted_call

    class Pieces(io.FileIO):
        def write(self, data: Any) -> int:
            count()
            return super().write(data)

    def fdopen(descriptor: int, mode: str, *args: Any, **options: Any) -> Any:
        if mode != "wb":
            return real_fdopen(descriptor, mode, *args, **options)
        return io.BufferedWriter(Pieces(descriptor, "w"), PIECE)

    def write(descriptor: int, data: bytes) -> int:
        part = random.Random(change).randrange(len(data) + 1)
        count(lambda: real_write(descriptor, data[:part]))
        return real_write(descriptor, data)

    real_fdopen, real_write = os.fdopen, os.write
    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    os.write, os.fdopen = write, fdopen
