"""compile_ahead: the kernels that a model needs are compiled when its engine starts, in several processes.

Finds them by steps in which no kernel runs. A kernel that no such step needs compiles on its first use.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import torch

from nanovllm.batch import StepKind, map_columns
from nanovllm.cpu import isa
from nanovllm.cpu.attention import CPUBackend
from nanovllm.cpu.kernels.checking import CHECKED
from nanovllm.cpu.kernels.launch import Wanted, wanted
from nanovllm.cpu.kernels.native import address_and_note, cache_folder, is_kept, say_once
from nanovllm.cpu.kernels.team import OWN, team_size
from nanovllm.kernels.sampling import sample

logger = logging.getLogger("nanovllm")

_FEW = 3  # kernels; fewer are compiled on first use, which takes less time than new processes
_MOST_PROCESSES = 8
# Modules come from where this process has them, not from the current folder.
_CHILD = "import sys; sys.path[:] = filter(None, sys.path); from nanovllm.cpu.ahead import compile_each; "
_CHILD += "compile_each()"
_CLEAR = "\r\x1b[K"
_Kernel: TypeAlias = "tuple[Any, ...]"  # the arguments of `address_and_note`


def compile_ahead(runner: Any) -> None:
    """Compile what a `ModelRunner` on a CPU needs and the disk does not have, in processes of their own, and
    say how far it is. Each of several ranks compiles on first use, and so does an engine whose attention is
    plain torch, that checks addresses, or whose level was set within this process."""
    if not isinstance(runner.backend, CPUBackend) or CHECKED or runner.tp.size > 1 or not isa.is_own():
        return
    if (folder := cache_folder()) is None:
        return
    if len(missing := _missing(runner)) < _FEW:
        return
    with _alone(folder):
        missing = [each for each in missing if not is_kept(each)]  # another process may have compiled them
        if len(missing) >= _FEW:
            _compile(missing)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process of this user compiles at a time: the next one then finds the kernels."""
    with open(folder / "lock", "w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@torch.inference_mode()
def _missing(runner: Any) -> list[_Kernel]:
    """The kernels of a prefill step and a decode step that are not kept on the disk."""
    found: Wanted = {}
    token, recorded = wanted.set(found), runner.recorded
    runner.recorded = None
    try:
        length = min(2, runner.max_model_len)
        prefill = runner.equal_batch(StepKind.PREFILL, 1, length, length)
        no_copy = np.zeros((1, 4), np.int32)  # of no cell
        runner.run(replace(prefill, copies=(no_copy,) * len(prefill.tables)))
        decode = runner.equal_batch(StepKind.DECODE, 1, 1, runner.max_model_len)  # read in parts
        runner.run(decode)
        sampling = map_columns(decode.sampling, lambda _, column: torch.from_numpy(column))
        sample(torch.zeros(1, runner.model_config.vocab_size), sampling)  # as with penalties and constraints
    finally:
        runner.recorded = recorded
        wanted.reset(token)
        runner.ending.last_token_ids.zero_()
    return [each for each in [*((make,) for make in OWN), *found] if not is_kept(each)]


def _compile(kernels: list[_Kernel]) -> None:
    queue: SimpleQueue[_Kernel] = SimpleQueue()
    for each in kernels:
        queue.put(each)
    processes = min(team_size(), -(-len(kernels) // 2), _MOST_PROCESSES)
    with _shown(len(kernels)) as done, ThreadPoolExecutor(processes) as pool:
        try:
            for future in as_completed([pool.submit(_feed, queue, done) for _ in range(processes)]):
                future.result()
        except BaseException:  # Ctrl-C: let the processes end
            with suppress(Empty):
                while True:
                    queue.get_nowait()
            raise


def _feed(queue: SimpleQueue[_Kernel], done: Callable[[], object]) -> None:
    """Have a process compile what is in the queue. If it ends early, the rest compiles on first use."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            with suppress(Empty, BrokenPipeError):
                while True:
                    pickle.dump(queue.get_nowait(), child.stdin)
                    child.stdin.flush()
                    if not child.stdout.read(1):
                        return
                    done()
        finally:
            with suppress(BrokenPipeError):
                child.stdin.close()


def compile_each() -> None:
    """In a process of its own: compile the kernels that standard input names, and write a byte for each."""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            address_and_note(*pickle.load(sys.stdin.buffer))
            sys.stdout.buffer.write(b".")
            sys.stdout.buffer.flush()


@contextmanager
def _shown(total: int) -> Iterator[Callable[[], None]]:
    """Say "12 of 31" in a terminal or a notebook, in one line; else only that it begins."""
    stream = sys.stderr
    redraws = stream is not None and (stream.isatty() or "ipykernel" in sys.modules)
    if not redraws or os.environ.get("TQDM_DISABLE"):
        say_once(total)
        yield lambda: None
        return
    numbers = count()

    def show() -> None:
        stream.write(f"\rcompiling kernels for this CPU, once: {next(numbers)} of {total}")
        stream.flush()

    show()
    try:
        yield show
    finally:
        stream.write(_CLEAR if stream.isatty() else "\n")
        stream.flush()
