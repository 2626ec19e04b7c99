"""`nanovllm version`: the facts for a bug report: versions, devices and their attention backends."""

from __future__ import annotations

import argparse
import platform

import torch

from nanovllm.attention.backends import BACKENDS
from nanovllm.device import Device
from nanovllm.jobs.errors import ANSWERED
from nanovllm.versions import versions

OPTIONAL = ("flash-attn", "llguidance", "pyarrow")


def main(args: argparse.Namespace) -> int:
    for name, number in versions(OPTIONAL).items():
        print(f"{name} {number}")
    print(f"system {platform.platform()}")
    print(f"torch's CUDA {torch.version.cuda or 'none'}")
    for device in Device.all():
        free, total = device.memory()
        capability = f", compute capability {'.'.join(map(str, device.capability))}" if device.is_cuda else ""
        print(f"{device.torch} {device.name}{capability}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        dtype = device.resolve_dtype("auto", "bfloat16")
        for backend in BACKENDS:
            reason = backend.unavailable(device, dtype, dtype)
            print(f"  attention backend {backend.name}: {'can run' if reason is None else f'no: {reason}'}")
    return ANSWERED
