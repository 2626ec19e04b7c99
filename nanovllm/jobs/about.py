"""The command `nanovllm version`: the facts for a bug report."""

from __future__ import annotations

import argparse
import platform

import torch

from nanovllm.attention.backends import BACKENDS
from nanovllm.cpu import isa
from nanovllm.device import Device
from nanovllm.jobs.errors import ANSWERED
from nanovllm.jobs.journal import versions


def version(args: argparse.Namespace) -> int:
    """Print versions, devices and their attention backends."""
    for name, number in versions(("flash-attn", "llguidance", "numba", "pyarrow")).items():
        print(f"{name} {number}")
    print(f"system {platform.platform()}")
    print(f"torch's CUDA {torch.version.cuda or 'none'}")
    for device in Device.all():
        free, total = device.memory()
        capability = f", compute capability {'.'.join(map(str, device.capability))}" if device.is_cuda else ""
        print(f"{device.torch} {device.name}{capability}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        if not device.is_cuda:
            print(f"  kernels for CPUs: {isa.described(torch.get_num_threads())}")
        for backend in BACKENDS.values():
            try:
                dtype = device.resolve_dtype("auto", "bfloat16")
                reason = backend.unavailable(device, dtype, dtype)
            except ValueError as error:  # a wrong level of the CPU
                reason = str(error)
            print(f"  attention backend {backend.name}: {'can run' if reason is None else f'no: {reason}'}")
    return ANSWERED
