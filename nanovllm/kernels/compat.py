"""The one place that imports Triton, so that every kernel file imports cleanly where Triton does not exist.

`triton` and `tl` are None there and `jit` changes nothing. Never decides anything about an engine: which
implementation runs is chosen at each call, from the tensor's device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["HAS_TRITON", "INTERPRET", "jit", "tl", "triton", "use_triton"]

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this platform: the torch twins do all the work
    triton = tl = None

HAS_TRITON = triton is not None

# Triton reads this variable when a kernel is decorated, so it must be set before this package is imported.
INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


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
