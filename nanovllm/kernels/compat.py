"""The one place that imports Triton, so that every kernel file imports cleanly where Triton does not exist.

`triton` and `tl` are None there, and where torch has no CUDA for a kernel to run on; `jit` then changes
nothing. Never decides anything about an engine: which implementation runs is chosen at each call, from the
tensor's device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

__all__ = ["TensorDescriptor", "tl", "triton"]  # of other modules; all that is defined here is public too

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
except ImportError:  # that, or no wheel for this platform: the torch twins do all the work
    triton = tl = TensorDescriptor = None

HAS_TRITON = triton is not None
INTERPRET = HAS_TRITON and _INTERPRETER_ASKED
INTERPRETED = tl.constexpr(INTERPRET) if HAS_TRITON else False  # the same, as kernels can read it

FEW_ROWS = 2  # up to here a step's time is in starting kernels and in reading weights: other ways pay

# Set while a step is captured, and run for the first time before that: a replay starts kernels for nothing.
in_graph: ContextVar[bool] = ContextVar("in_graph", default=False)


def jit(*unspecialized: str) -> Callable[[Any], Any]:
    """A decorator: `triton.jit`, or the identity without Triton (the function is then never called).

    Triton compiles a kernel anew when an argument is 1, a multiple of 16, or a pointer not so aligned. Named
    here are the arguments that vary from step to step and whose alignment buys nothing: no batch waits for a
    compiler, and no graph capture meets one.
    """
    if not HAS_TRITON:
        return lambda function: function
    return lambda function: triton.jit(function, do_not_specialize=unspecialized)


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on `tensor` runs as a Triton kernel, launched on the current CUDA device."""
    return HAS_TRITON and tensor.is_cuda


def by_device(
    kernel: Callable[Concatenate[torch.Tensor, P], T], twin: Callable[Concatenate[torch.Tensor, P], T]
) -> Callable[Concatenate[torch.Tensor, P], T]:
    """An operation: `kernel` where its first argument is on a GPU that Triton knows, else `twin`."""

    @wraps(kernel)
    def operation(x: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return (kernel if use_triton(x) else twin)(x, *args, **kwargs)

    return operation


def launch_early(x: torch.Tensor) -> bool:
    """Whether kernels on the device of `x` start before the one ahead has ended; see `await_inputs`.

    By programmatic dependent launch, which compute capability 9.0 brought.
    """
    return not INTERPRET and capability(x.device) >= (9, 0)


def early(x: torch.Tensor) -> dict[str, bool]:
    """The options by which a kernel whose constant is EARLY is launched on the device of `x`."""
    return dict.fromkeys(("EARLY", "launch_pdl"), launch_early(x))


@lru_cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that one program may take on `device`; plenty in the interpreter."""
    if INTERPRET:
        return 2**20
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors `device` has; 2 in the interpreter."""
    if INTERPRET:
        return 2
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of CUDA device `device`."""
    return torch.cuda.get_device_capability(device)


@jit()
def await_inputs(EARLY: tl.constexpr) -> None:
    """In a kernel that was launched early: let the next one start too, and wait for the one ahead to end.

    Before this call a program may read weights and the step's inputs, but nothing that a kernel computed, and
    it writes nothing. Every program must come here: the kernel after it relies on all before being done.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
