"""Kernel: compiles itself for the arguments of a launch, and runs its programs now or as part of a recording.

A kernel is written as `make(*variant)`, which returns the function of one program. The function's parameters
are addresses (`Address`), integers and floats, then `program` and `thread`.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from nanovllm.cpu.kernels.checking import CHECKED, allow, complain, table_lock
from nanovllm.cpu.kernels.native import address_and_note, assembly, jit
from nanovllm.cpu.kernels.team import team, team_size
from nanovllm.kernels.kinds import Kinds

Address = int  # the annotation of a parameter that takes a tensor, or None for the address 0
DTYPES = Kinds(  # of variants
    "dtype on a CPU", {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
)
_FORMATS = Kinds(
    "argument", {"Address": "q", "int": "q", int: "q", "float": "d", float: "d"}
)  # of `struct`, by annotation
_READERS = Kinds("argument", {"q": "get_i64", "d": "get_f64"})
Argument = torch.Tensor | int | float | None


class Launch(NamedTuple):
    """The programs of a kernel with their arguments."""

    name: str  # of the kernel
    function: int  # its address
    programs: int
    pack: struct.Struct  # of the argument block
    values: tuple[int | float, ...]  # in the block
    arguments: tuple[Argument, ...]  # the same, tensors instead of their addresses


class Recorder(Protocol):
    """What launches go to instead of running at once."""

    def launch(self, launch: Launch) -> None: ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...


recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
# Where it is set, launches do not run: each notes the arguments of `address_and_note`, and results are 0.
Wanted = dict[tuple[Any, ...], None]
wanted: ContextVar[Wanted | None] = ContextVar("wanted", default=None)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory for the result of a kernel. In a recording it belongs to the recording."""
    if wanted.get() is not None:
        return torch.zeros(shape, dtype=dtype)
    found = recorder.get()
    return torch.empty(shape, dtype=dtype) if found is None else found.empty(shape, dtype)


def profiled(name: str) -> AbstractContextManager[object]:
    """A block that a profile shows; not by an operation of torch, which could not be recorded."""
    block: AbstractContextManager[object] = torch._C._profiler._RecordFunctionFast(name)
    return block


def scratch(num_bytes: int) -> torch.Tensor:
    """Uninitialised memory: `num_bytes` for each thread of a launch, in order."""
    return empty((team_size() * num_bytes,), torch.uint8)


def run_now(launch: Launch) -> None:
    """Run a launch, and wait for its end. A profile shows it by its name."""
    own = team()
    if not CHECKED:
        with profiled(launch.name):
            own.run_one(launch.function, launch.programs, launch.pack, launch.values)
        return
    with profiled(launch.name), table_lock, own.lock:
        allow(launch.arguments, own.arguments)
        own.run_one(launch.function, launch.programs, launch.pack, launch.values)
        complain(launch.name)


class Kernel:
    """A kernel by its `make`; see this module's text."""

    def __init__(self, make: Callable[..., Callable[..., None]]) -> None:
        self._make = make
        self.name = f"{make.__module__}.{make.__name__}"
        self.variants: set[tuple[object, ...]] = set()  # that were compiled or loaded
        self._compiled: Callable[..., tuple[int, struct.Struct]] = lru_cache(None)(self._compile)

    def _compile(self, *variant: object) -> tuple[int, struct.Struct]:
        self.variants.add(variant)
        address, kinds = address_and_note(_entry, self._make, *variant)
        return address, struct.Struct(kinds)

    def assembly(self, variant: tuple[object, ...], level: str) -> str:
        """The machine code of a variant as text, for CPUs of `level`, perhaps not this one."""
        return assembly(_entry, (self._make, *variant), "void", level)

    def launch(self, variant: tuple[object, ...], programs: int, *arguments: Argument) -> None:
        """Run `programs` programs. variant: of `make`, constants of the machine code."""
        if (noted := wanted.get()) is not None:
            noted[(_entry, self._make, *variant)] = None
            return
        if programs == 0:
            return
        function, pack = self._compiled(*variant)
        values = tuple([x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in arguments])
        found = recorder.get()
        run = run_now if found is None else found.launch
        run(Launch(self.name, function, programs, pack, values, arguments))


def _kinds(make: Callable[..., Any], variant: tuple[object, ...]) -> str:
    """The format of an argument block: 8 bytes for each parameter."""
    parameters = [*inspect.signature(make(*variant)).parameters.values()]
    return "".join(_FORMATS[each.annotation] for each in parameters[:-2])


def _entry(make: Callable[..., Any], *variant: object) -> Callable[[int, int, int], None]:
    """The function (argument block, program, thread) that reads the block and calls a kernel's program."""
    from nanovllm.cpu.kernels.vectors import get_f64, get_i64

    body = jit(make(*variant))
    kinds = _kinds(make, variant)
    reads = ", ".join(f"{_READERS[kind]}(block + {8 * index})" for index, kind in enumerate(kinds))
    scope = {"body": body, "get_i64": get_i64, "get_f64": get_f64}
    exec(f"def entry(block, program, thread):\n    body({reads}, program, thread)", scope)
    entry: Callable[[int, int, int], None] = scope["entry"]
    entry.note = kinds  # type: ignore[attr-defined]
    return entry
