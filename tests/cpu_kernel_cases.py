"""Kernels for tests of what is around the kernels of CPUs, and runs of scripts in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nanovllm.cpu.kernels.launch import Address, Kernel
from nanovllm.cpu.kernels.team import Team, num_threads, team

TESTS = Path(__file__).parent


@contextmanager
def threads(number: int) -> Iterator[Team]:
    """The team of so many threads, for the launches of a block."""
    token = num_threads.set(number)
    try:
        yield team()
    finally:
        num_threads.reset(token)


def _make_count() -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    get_i64, set_i64 = v.get_i64, v.set_i64

    def count(counts: Address, program: int, thread: int) -> None:
        place = counts + 8 * program
        set_i64(place, get_i64(place) + 1)

    return count


def _make_copy() -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    get_f32, set_f32 = v.get_f32, v.set_f32

    def copy(source: Address, target: Address, n: int, program: int, thread: int) -> None:
        for i in range(n):
            set_f32(target + 4 * i, get_f32(source + 4 * i))

    return copy


_COUNT, _COPY = Kernel(_make_count), Kernel(_make_copy)


def count(counts: torch.Tensor) -> None:
    """Add 1 to each of these int64, one in each program."""
    _COUNT.launch((), len(counts), counts)


def copy(source: torch.Tensor, target: torch.Tensor, n: int) -> None:
    """Copy `n` float32, which may be more than there are."""
    _COPY.launch((), 1, source, target, n)


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start Python with the tests in its path."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return subprocess.Popen(
        [sys.executable, *(arguments or ("-c", code))],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    """The lines of its output, and its errors; it must end well."""
    out, errors = process.communicate(timeout=900)  # all kernels may have to be compiled
    assert process.returncode == 0, out + errors
    return out.splitlines(), errors
