"""The one place that imports Triton, so that kernel files can be imported without Triton.

`triton` and `tl` are None without Triton, or if torch has no CUDA; `jit` then does nothing. Each call selects
its implementation from the tensor's device; nothing is decided here for an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from nanovllm import doors
from nanovllm.device import has_cpu_kernels

__all__ = ["TensorDescriptor", "tl", "triton"]  # re-exported; all definitions below are public too

P = ParamSpec("P")
T = TypeVar("T")

# Triton reads this variable when a kernel is decorated, so it must be set before this package is imported.
_INTERPRETER_ASKED = os.environ.get("TRITON_INTERPRET") == "1"

try:
    if not (_INTERPRETER_ASKED or torch.backends.cuda.is_built()):
        raise ImportError("a kernel has nothing to run on")
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # raised above, or no wheel for this platform: the torch references do all the work
    triton = tl = TensorDescriptor = None

HAS_TRITON = triton is not None
INTERPRET = HAS_TRITON and _INTERPRETER_ASKED
INTERPRETED = tl.constexpr(INTERPRET) if HAS_TRITON else False  # the same value for kernels

_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW_ROWS = 2  # up to this size, launches and reading weights dominate a step: special kernels pay

# Set during the capture of a step and the run before it. In a replay, kernel launches cost the host nothing.
in_graph: ContextVar[bool] = ContextVar("in_graph", default=False)


def jit(*unspecialized: str) -> Callable[[Any], Any]:
    """A decorator: `triton.jit`, or the identity without Triton (the function is then never called).

    Triton specialises a kernel on arguments that are 1 or multiples of 16, and on pointer alignment.
    unspecialized: arguments that vary from step to step and gain nothing from alignment. So no batch waits
    for a compilation, and none happens during a graph capture.
    """
    if not HAS_TRITON:
        return lambda function: function
    return lambda function: triton.jit(function, do_not_specialize=unspecialized)


def next_power_of_2(n: int) -> int:
    """The least power of 2 from `n` on, for positive `n`. Triton's own takes 35 times as long."""
    return 1 << (n - 1).bit_length()


def row_warps(padded: int) -> int:
    """Warps of a program for a whole row of `padded` elements: one for every 512, at most 16."""
    return max(1, min(16, padded // 512))


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32; float64 stays what it is."""
    return x.float() if x.itemsize < 4 else x


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on `tensor` runs as a Triton kernel, launched on the current CUDA device."""
    return HAS_TRITON and tensor.is_cuda


def use_cpu_kernels(tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...] = _CPU_DTYPES) -> bool:
    """Whether an operation on `tensor` runs as a kernel of `cpu/kernels`, which takes these dtypes."""
    return tensor.device.type == "cpu" and tensor.dtype in dtypes and has_cpu_kernels()


@lru_cache
def cpu_kernel(name: str) -> Callable[..., Any]:
    """The function "file.function" of `cpu/kernels`, imported on use."""
    found: Callable[..., Any] = doors.find(f"{doors.CPU_KERNELS}.{name.replace('.', ':')}")
    return found


def by_device(
    kernel: Callable[Concatenate[torch.Tensor, P], T],
    reference: Callable[Concatenate[torch.Tensor, P], T],
    cpu: str = "",
    dtypes: tuple[torch.dtype, ...] = _CPU_DTYPES,
) -> Callable[Concatenate[torch.Tensor, P], T]:
    """An operation: `kernel` if its first argument is on a GPU that Triton supports; on a CPU the function
    `cpu` of `cpu/kernels`, if there is one, it can run here and takes the dtype; else `reference`."""

    @wraps(kernel)
    def operation(x: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        run = reference
        if use_triton(x):
            run = kernel
        elif cpu and use_cpu_kernels(x, dtypes):
            run = cpu_kernel(cpu)
        return run(x, *args, **kwargs)

    return operation


def uses_cuda() -> bool:
    """Whether torch has made a CUDA context in this process."""
    return torch.cuda.is_initialized()


def use_pdl(x: torch.Tensor) -> bool:
    """Whether kernels on the device of `x` start before the previous kernel has ended; see `await_inputs`.

    This is programmatic dependent launch, available from compute capability 9.0 on.
    """
    return not INTERPRET and capability(x.device) >= (9, 0)


def pdl_options(x: torch.Tensor) -> dict[str, bool]:
    """The launch options of a kernel with the constant USE_PDL on the device of `x`."""
    return dict.fromkeys(("USE_PDL", "launch_pdl"), use_pdl(x))


@lru_cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that one program may use on `device`; 1 MiB in the interpreter."""
    if INTERPRET:
        return 2**20
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of `device`; 2 in the interpreter."""
    if INTERPRET:
        return 2
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of CUDA device `device`."""
    return torch.cuda.get_device_capability(device)


@jit()
def await_inputs(USE_PDL: tl.constexpr) -> None:
    """In a kernel that was launched early: let the next kernel start, and wait until the previous one ends.

    Before this call a program may read weights and the step's inputs, but no result of a kernel, and must not
    write. Every program must make this call: the next kernel relies on all previous kernels having ended.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
