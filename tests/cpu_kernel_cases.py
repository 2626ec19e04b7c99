"""Kernels for tests of what is around the kernels of CPUs, and runs of scripts in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nanovllm.cpu.kernels.int_layout import GROUP, IntWeight, levels
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


def group_numbers(weight: IntWeight, *numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scales [groups, halves or 1, 1, n] and the minimums [groups, n] of a weight, float32."""
    if weight.format.shared:
        multiples, common = numbers
        found = common.float().repeat_interleave(weight.format.shared, 1)[:, : weight.groups] * multiples
        if weight.format.numbers == 1:
            return found.permute(1, 2, 0)[:, :, None], None
        return found[..., :1].permute(1, 2, 0)[:, :, None], -found[..., 1].T
    found = numbers[0].float()
    minimum = found[..., 1].T if weight.format.numbers == 2 else None
    return found[..., :1].permute(1, 2, 0)[:, :, None], minimum


def int_linear_reference(
    x: torch.Tensor,
    weight: IntWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`int_linear` in plain torch."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP))
    halves = padded.unflatten(1, (-1, 2, GROUP // 2))
    largest = halves.abs().amax(-1, keepdim=True)
    factors = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    scales, rounded = largest / 127, (halves * factors).round()
    codes, *numbers = weight.stored(0, weight.n)
    integers = levels(weight.format, codes).unflatten(2, (2, -1))
    products = torch.einsum("tghk,nghk->ghtn", rounded, integers)  # exact integers
    own, minimum = group_numbers(weight, *numbers)
    factors = scales.permute(1, 2, 0, 3)
    sums = (rounded.sum(-1) * scales[..., 0]).sum(-1)
    out = torch.zeros(len(x), weight.n)
    for group in range(weight.groups):
        if len(own[group]) == 1:
            out += (products[group] * factors[group]).sum(0) * own[group, 0]
        else:
            out += (products[group] * factors[group] * own[group]).sum(0)
        if minimum is not None:
            out += sums[:, group, None] * minimum[group]
    for other in (bias, residual):
        if other is not None:
            out += other.float()
    return out.to(x.dtype)
