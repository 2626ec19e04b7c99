"""What tests of unknown kinds, and of ends that are forced, read behind the public names of the package.

`inside.py` does for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import pytest
import torch

from nanovllm.cpu import ahead
from nanovllm.cuda_graphs import prefill
from nanovllm.engine import startup
from nanovllm.formats.fp8.loading import Part
from nanovllm.formats.int4.method import Int4LinearMethod
from nanovllm.jobs import parquet
from nanovllm.kernels import activation
from nanovllm.layers import weights
from nanovllm.parallel.kernels import all_reduce

E = TypeVar("E", bound=Enum)
KIND_OF, ACTIVATION_KINDS = activation._KIND_OF, activation._KINDS
bits, check_kind = all_reduce._bits, weights._check_kind


def named(member: E, name: str, value: str) -> E:
    member._name_, member._value_ = name, value
    return member


def cpu_tables() -> list[dict[str, Any]]:
    """The tables of kernels for CPUs with an entry for each level of instructions."""
    from nanovllm.cpu.kernels import int_vectors, native

    return [int_vectors._MOST_ROWS, int_vectors._DOTS, native._TARGETS]


def accumulators() -> Any:
    from nanovllm.cpu.kernels import attention_tiles

    return attention_tiles._accumulators()


def pairs(*values: Any) -> Any:
    from nanovllm.cpu.kernels import int_vectors

    return int_vectors._pairs(*values)


def byte_pairs(*values: Any) -> Any:
    from nanovllm.cpu.kernels import int_vectors

    return int_vectors._byte_pairs(*values)


def scales_of_rows(part: Part, *values: Any) -> Any:
    return part._scales_of_rows(*values)


def shard(format: Any, *values: Any) -> Any:
    return format._shard(*values)


def waits_for_shards(method: Int4LinearMethod, format: Any) -> None:
    method.format, method._waiting, method.device = format, {}, torch.device("cpu")


def own_memory_in_pieces(patch: pytest.MonkeyPatch) -> None:
    """Let pieces of prefill steps keep what they hand on, where memory has no pool."""
    patch.setattr(prefill, "_not_owned", lambda x: x)


# -- kernels that are compiled at a start -------------------------------------------------------------------


def kernel_asked(kernel: Any, variant: tuple[object, ...]) -> tuple[Any, ...]:
    """How a start asks for what a launch of this variant needs."""
    from nanovllm.cpu.kernels import launch

    return launch._entry, kernel._make, *variant


def compile_ahead(kernels: list[tuple[Any, ...]]) -> None:
    ahead._compile(kernels)


def note_compiled(patch: pytest.MonkeyPatch, note: Any) -> None:
    """Give `note` the kernels that a start would compile."""
    patch.setattr(ahead, "_compile", note)


def compile_by(patch: pytest.MonkeyPatch, code: str) -> None:
    """Let the processes that compile run this code."""
    patch.setattr(ahead, "_CHILD", code)


def compile_in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Let starts compile here, in the place of a process that would import torch and numba first."""

    def feed(queue: SimpleQueue[tuple[Any, ...]], done: Callable[[], object]) -> None:
        with suppress(Empty):
            while True:
                ahead.address_and_note(*queue.get_nowait())
                done()

    patch.setattr(ahead, "_feed", feed)


def nothing_was_said(patch: pytest.MonkeyPatch) -> None:
    from nanovllm.cpu.kernels import native

    patch.setattr(native, "_said", [])


def begin_reading_parquet_by(patch: pytest.MonkeyPatch, code: str) -> None:
    """Let the process that reads Parquet files run this code first."""
    patch.setattr(parquet, "_START", parquet._START.replace("runpy.run", code + "runpy.run"))


def end_no_answer_early(patch: pytest.MonkeyPatch) -> None:
    """Engines compute the last token of every answer from now on, also where no other one may follow."""
    from nanovllm.plan import scheduler

    patch.setitem(scheduler._EXTRAS, "forced_ends", lambda batch, seqs: [])


def keep_experts(patch: pytest.MonkeyPatch) -> None:
    """Every sequence that asks for something has experts of a token, as with `return_routed_experts`."""
    import numpy as np

    from nanovllm.engine import requests

    make = requests._EXTRAS["sequence"]

    def with_experts(*args: Any) -> Any:
        extras = make(*args)
        extras.routed.append((0, np.zeros((1, 1, 1), np.int16)))
        return extras

    patch.setitem(requests._EXTRAS, "sequence", with_experts)


def keep_tokens_of_a_step(patch: pytest.MonkeyPatch) -> None:
    """Undo what programs without a device change of the limit of a CPU's steps."""
    patch.setattr(startup, "_CPU_STEP", startup._CPU_STEP)


def stop_fork_server() -> None:
    """End the process that multiprocessing forks others from. Who starts a process makes the next one, whose
    forks have SIGINT blocked if it is blocked then."""
    from multiprocessing import forkserver

    forkserver._forkserver._stop()
